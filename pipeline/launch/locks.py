"""Locks in a store: one launcher per run, one night per model."""

from __future__ import annotations

from contextlib import AbstractContextManager

from pipeline.clock import CLOCK, Clock
from pipeline.records.runs import run_directory
from pipeline.store.artifacts import Store
from pipeline.store.errors import taken
from pipeline.store.lease import Lease, LeaseFile


def run_lock(store: Store, run: str, seconds: float, clock: Clock = CLOCK) -> AbstractContextManager[None]:
    """Lock ``run`` for this launcher while the context lasts; LaunchError if another launcher holds the lock.

    One launcher per run, because a second one would overwrite the first one's records and checkpoints.

    On a local disk this is a lock of the run's folder, which ends with its process. On an object store it is the lease
    ``runs/<run>/lease.json``, which another launcher takes over once nobody has renewed it for ``seconds``.
    """
    hint = "run the same command again once that one has ended, or run=<another name>"
    return folder_lock(store, run_directory(run), f"run {run!r}", seconds, hint=hint, clock=clock)


def folder_lock(
    store: Store, folder: str, of: str, seconds: float, *, hint: str, clock: Clock = CLOCK
) -> AbstractContextManager[None]:
    """The lock of ``folder``, as ``run_lock`` says. ``of``: what is locked, for messages."""
    what = f"{of} is running already"
    if store.is_local:
        return store.locked(folder, taken(what, "another launcher", store.full(folder), hint))
    place = LeaseFile(
        store,
        f"{folder}/lease.json",
        name=f"the lock of {of}",
        taken=what,
        hint=hint,
        doing=of.replace("'", ""),
        seconds=seconds,
        clock=clock,
    )
    return Lease(place, seconds, clock=clock).held()


def night_lease_path(model: str) -> str:
    """The path of the lease that nights of ``model`` hold, relative to the store."""
    return f"nightly/{model}/lease.json"


def model_lease(store: Store, model: str, seconds: float, doing: str, clock: Clock = CLOCK) -> Lease:
    """The lease of ``model``. Others see ``doing`` as the work of its holder."""
    place = LeaseFile(
        store,
        night_lease_path(model),
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
