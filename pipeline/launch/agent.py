"""Ranks of one machine meet on its loopback: the store, its variables, and torchrun as ``-m pipeline.launch.agent``.

``torchrun --standalone`` keeps a c10d rendezvous in a store that listens on all interfaces, also with ``--local-addr
127.0.0.1``, and unpickles what it finds in it: whoever reaches the port runs commands as this user. Its static
rendezvous has no pickles, but a store like that. Here it has one on the loopback, at which the ranks meet, too.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipeline.core.machine import loopback_variables, stay_on_loopback

if TYPE_CHECKING:
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

LOOPBACK = "127.0.0.1"
BACKEND = "loopback"
# The timeout of torchrun's static rendezvous.
JOIN_SECONDS = 600
_LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"


def loopback_store() -> TCPStore:
    """Serve a store of torch on a port of the loopback, where ranks of one machine meet."""
    from torch.distributed import TCPStore

    # A store listens on all interfaces, whatever address it is given, and does not authenticate its clients. So pass a
    # socket that is bound to the loopback, which holds its port from the start: no other program can take it. Do not
    # wait for workers, because ranks start only once the port is known.
    listener = socket.create_server((LOOPBACK, 0), backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def loopback_environment() -> dict[str, str]:
    """Return the variables by which gloo and NCCL listen on the loopback alone, without those the user has set."""
    return {name: value for name, value in loopback_variables().items() if name not in os.environ}


@contextmanager
def local_world(ranks: int) -> Iterator[None]:
    """Let TorchRec, which reads torchrun's variables from the environment, find ``ranks`` ranks on this host."""
    before = os.environ.get(_LOCAL_WORLD_SIZE)
    os.environ[_LOCAL_WORLD_SIZE] = str(ranks)
    try:
        yield
    finally:
        os.environ.pop(_LOCAL_WORLD_SIZE)
        if before is not None:
            os.environ[_LOCAL_WORLD_SIZE] = before


def main(arguments: list[str]) -> None:
    """Run torchrun with ``arguments`` and a rendezvous on the loopback."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
    from torch.distributed.run import main as torchrun

    class LoopbackRendezvous(StaticTCPRendezvous):
        # Torchrun compares this name with the backend that it asked for.
        def get_backend(self) -> str:
            return BACKEND

    def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
        store = loopback_store()
        handler = LoopbackRendezvous(LOOPBACK, store.port, 0, 1, parameters.run_id, JOIN_SECONDS)
        # A handler that has a store makes none of its own.
        handler._store = store
        return handler

    rendezvous_handler_registry.register(BACKEND, create_handler)
    stay_on_loopback()
    # Torchrun warns if it gets no endpoint.
    torchrun(["--rdzv-backend", BACKEND, "--rdzv-endpoint", LOOPBACK, "--local-addr", LOOPBACK, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
