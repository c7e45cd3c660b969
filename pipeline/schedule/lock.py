"""One launcher per model: a lease in the store, ``nightly/<model>/lease.json``."""

from __future__ import annotations

from contextlib import AbstractContextManager

from pipeline.clock import CLOCK, Clock
from pipeline.store import Store
from pipeline.store.lease import Lease, LeaseFile


def lease_path(model: str) -> str:
    """The path of the lease of ``model``, relative to the store."""
    return f"nightly/{model}/lease.json"


def model_lease(store: Store, model: str, seconds: float, doing: str, clock: Clock = CLOCK) -> Lease:
    """The lease of ``model``. Others see ``doing`` as the work of its holder."""
    place = LeaseFile(
        store,
        lease_path(model),
        name=f"the lock of model {model!r}",
        taken=f"model {model!r} is already being worked on",
        hint="run the same command once that one has ended, or publish.model=<another name>",
        doing=doing,
        seconds=seconds,
        clock=clock,
    )
    return Lease(place, seconds, clock=clock)


def night_lock(
    store: Store, model: str, seconds: float, doing: str, clock: Clock = CLOCK
) -> AbstractContextManager[None]:
    """Hold the lease of ``model``; LaunchError names another process that holds it.

    The lease of a dead process is taken over after the seconds that its record promises. A launcher that loses its
    lease ends, and the next call continues its work.
    """
    return model_lease(store, model, seconds, doing, clock).held()
