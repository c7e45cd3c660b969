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
LOCAL = "LOCAL_WORLD_SIZE"  # torchrun's


def loopback_store() -> TCPStore:
    """Serve a store of torch on a port of the loopback, where ranks of one machine meet.

    A store listens on all interfaces, whatever address it is given, and asks nobody who they are; this one is handed a
    socket that is bound to the loopback, and holds its port from the start: no other program can take it. Gloo and NCCL
    listen there, too, by the variables of ``machine.loopback_variables``.
    """
    from torch.distributed import TCPStore

    own = socket.create_server((LOOPBACK, 0), backlog=1024)
    port = own.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=own.detach())


def loopback_environment() -> dict[str, str]:
    """The variables by which gloo and NCCL of a rank listen on the loopback alone, without those the user has set."""
    return {name: value for name, value in loopback_variables().items() if name not in os.environ}


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
