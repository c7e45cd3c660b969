"""One launcher a run: a second one would write over the first one's records, steps and checkpoints."""

from __future__ import annotations

from contextlib import AbstractContextManager

from pipeline.errors import LaunchError
from pipeline.launch.step import run_directory
from pipeline.store import Store


def holding(store: Store, run: str) -> AbstractContextManager[None]:
    """Hold ``run`` for this launcher while the context lasts; LaunchError where another one holds it."""
    folder = run_directory(run)
    busy = LaunchError(
        f"run {run!r} is running already: another launcher holds {store.full(folder)}",
        hint="the same command again once that one has ended, or run=<another name>",
    )
    return store.locked(folder, busy)
