"""One launcher a run: a second one would write over the first one's records, steps and checkpoints."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pipeline.artifacts import Store, disk_errors
from pipeline.errors import LaunchError
from pipeline.launch.step import run_directory


@contextmanager
def holding(store: Store, run: str) -> Iterator[None]:
    """Hold ``run`` for this launcher; LaunchError where another one holds it.

    An advisory lock of the run's folder: it leaves nothing behind and ends with the process, however that ends. Object
    stores, and file systems without locks, have none.
    """
    if not store.is_local:
        yield
        return
    path = store.full(run_directory(run))
    with disk_errors(run_directory(run), store.option):
        store.fs.makedirs(path, exist_ok=True)
        handle = os.open(path, os.O_RDONLY)
    try:
        _lock(handle, run, path)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, run: str, path: str) -> None:
    with suppress(OSError):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LaunchError(
                f"run {run!r} is running already: another launcher holds {path}",
                hint="the same command again once that one has ended, or run=<another name>",
            ) from None
