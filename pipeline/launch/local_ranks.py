"""Ranks of one machine: the store on the loopback where they meet, and their number where libraries look for it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipeline.machine import loopback_variables

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"


def loopback_store() -> TCPStore:
    """Serve a store on a port of the loopback, which it holds from the start: no other program can take it."""
    from torch.distributed import TCPStore

    own = socket.create_server((LOOPBACK, 0), backlog=1024)
    port = own.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=own.detach())


def loopback_environment() -> dict[str, str]:
    """The variables by which gloo and NCCL of a rank listen on the loopback alone, without those the user has set."""
    return {name: value for name, value in loopback_variables().items() if name not in os.environ}


LOCAL = "LOCAL_WORLD_SIZE"  # torchrun's


@contextmanager
def local_world(ranks: int) -> Iterator[None]:
    """Have TorchRec, which asks the environment as torchrun sets it, find ``ranks`` ranks on this host."""
    before = os.environ.get(LOCAL)
    os.environ[LOCAL] = str(ranks)
    try:
        yield
    finally:
        os.environ.pop(LOCAL)
        if before is not None:
            os.environ[LOCAL] = before
