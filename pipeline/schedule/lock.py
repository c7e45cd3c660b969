"""One night of a model at a time: a lease in the store, ``nightly/<model>/lease.json``."""

from __future__ import annotations

from contextlib import AbstractContextManager

from pipeline.store import Store
from pipeline.store.lease import Lease
from pipeline.store.leasefile import LeaseFile


def lease_path(model: str) -> str:
    """Where the lease of ``model`` lies, relative to the store."""
    return f"nightly/{model}/lease.json"


def model_lease(store: Store, model: str, seconds: float, doing: str) -> Lease:
    """The lease of ``model``; others see ``doing`` as what its holder works on."""
    place = LeaseFile(
        store, lease_path(model), name=f"the lock of model {model!r}",
        taken=f"model {model!r} is being worked on already",
        hint="the same command once that one has ended, or publish.model=<another name>",
        doing=doing, seconds=seconds,
    )  # fmt: skip
    return Lease(place, seconds)


def night_lock(store: Store, model: str, seconds: float, doing: str) -> AbstractContextManager[None]:
    """Hold the lease of ``model`` while ``doing`` something; LaunchError, naming the holder, if another process has it.

    A dead holder's lease is taken over ``seconds`` (its own) after the first look at it. A launcher that loses its
    lease ends; the next call goes on with what it began.
    """
    return model_lease(store, model, seconds, doing).held()
