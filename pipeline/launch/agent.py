"""torchrun for the ranks of one machine: ``python -m pipeline.launch.agent <arguments of torchrun>``.

``torchrun --standalone`` keeps a c10d rendezvous in a store that listens on all interfaces, also with ``--local-addr
127.0.0.1``, and unpickles what it finds in it: whoever reaches the port runs commands as this user. Its static
rendezvous has no pickles, but the same store. Here the one agent meets nobody, and its store, at which its ranks meet,
is on the loopback.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.run import main as torchrun

from pipeline.launch.loopback import LOOPBACK, loopback_environment, loopback_store

BACKEND = "loopback"
PATIENCE = timedelta(minutes=10)  # of a rank that waits for a key, as torchrun's static rendezvous has it


class LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of a single agent. ``run_id``: of torchrun; begins its keys in the store."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self._store = loopback_store()
        self._store.set_timeout(PATIENCE)

    def get_backend(self) -> str:
        """The name that torchrun knows it by."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks meet at the agent's store: always, for rank 0's own would listen on all interfaces."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """The only agent of a world of one, at once."""
        place = RendezvousStoreInfo(LOOPBACK, self._store.port)
        return RendezvousInfo(PrefixStore(self.run_id, self._store), 0, 1, place)

    def is_closed(self) -> bool:
        """Never: it ends with the agent."""
        return False

    def set_closed(self) -> None:
        """Nothing to close: no other agent may come."""

    def num_nodes_waiting(self) -> int:
        """No other agent waits."""
        return 0

    def get_run_id(self) -> str:
        """The id of the run, by torchrun."""
        return self.run_id

    def shutdown(self) -> bool:
        """Nothing to take apart: the store ends with the agent."""
        return True


def _handler(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)


def main(arguments: list[str]) -> None:
    """Run torchrun with ``arguments`` and the rendezvous of this module."""
    rendezvous_handler_registry.register(BACKEND, _handler)
    os.environ.update(loopback_environment())
    torchrun(["--rdzv-backend", BACKEND, "--local-addr", LOOPBACK, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
