"""torchrun for the ranks of one machine: ``python -m pipeline.launch.agent <arguments of torchrun>``.

``torchrun --standalone`` keeps a c10d rendezvous in a store that listens on all interfaces, also with ``--local-addr
127.0.0.1``, and unpickles what it finds in it: whoever reaches the port runs commands as this user. Its static
rendezvous has no pickles, but a store like that. Here it has one on the loopback, at which the ranks meet, too.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.run import main as torchrun

from pipeline.launch.local_ranks import LOOPBACK, loopback_store
from pipeline.machine import stay_on_loopback

BACKEND = "loopback"  # as torchrun knows the rendezvous
PATIENCE_SECONDS = 600  # torchrun's own for its static rendezvous


class LoopbackRendezvous(StaticTCPRendezvous):
    """torchrun's static rendezvous under a name of its own, which torchrun compares with the one it asked for."""

    def get_backend(self) -> str:
        """The name."""
        return BACKEND


def _rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    """The static rendezvous of a single agent, at a store that is there already: it makes none of its own."""
    store = loopback_store()
    handler = LoopbackRendezvous(LOOPBACK, store.port, 0, 1, parameters.run_id, PATIENCE_SECONDS)
    handler._store = store
    return handler


def main(arguments: list[str]) -> None:
    """Run torchrun with ``arguments`` and this rendezvous."""
    rendezvous_handler_registry.register(BACKEND, _rendezvous)
    stay_on_loopback()
    meeting = ["--rdzv-backend", BACKEND, "--rdzv-endpoint", LOOPBACK]  # without an endpoint, torchrun warns
    torchrun([*meeting, "--local-addr", LOOPBACK, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
