"""The run lock: one launcher a run, for a second one would write over the first one's records and checkpoints."""

from __future__ import annotations

from contextlib import AbstractContextManager

from pipeline.records.step import run_directory
from pipeline.store import Store
from pipeline.store.refusals import taken


def run_lock(store: Store, run: str) -> AbstractContextManager[None]:
    """Lock ``run`` for this launcher while the context lasts; LaunchError where another one holds it.

    A lock of the file system, which ends with its process; object stores have none.
    """
    folder = run_directory(run)
    hint = "run the same command again once that one has ended, or run=<another name>"
    busy = taken(f"run {run!r} is running already", "another launcher", store.full(folder), hint)
    return store.locked(folder, busy)
