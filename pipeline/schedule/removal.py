"""Removing from a store while no night works on it, and which runs a launcher has locked."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

from pipeline.checkpoint.fault_points import FaultPoint, OnPoint, ignore
from pipeline.errors import LaunchError
from pipeline.launch.runlock import run_lock
from pipeline.publishing import versions
from pipeline.records.runs import run_directory
from pipeline.schedule.inventory import RUN
from pipeline.schedule.lock import night_lock
from pipeline.store import Store, removal
from pipeline.store.references import of_run
from pipeline.store.removal import Removal, written

LEASE_SECONDS = 30.0
LOOK_SECONDS = 5.0  # between two checks of an object store for new runs


def locked_runs(store: Store) -> set[str]:
    """Runs that a launcher on this file system works on. On an object store, a run in progress counts as young."""
    return {run for run in store.names("runs") if _is_locked(store, run)} if store.is_local else set()


def _is_locked(store: Store, run: str) -> bool:
    if not store.fs.isdir(store.full(run_directory(run))):
        return False
    try:
        with run_lock(store, run, LEASE_SECONDS):
            return False
    except LaunchError:
        return True


def remove(
    store: Store, going: list[Removal], since: float, on_point: OnPoint = ignore
) -> tuple[list[Removal], list[Removal]]:
    """Remove what ``may_go`` allows; returns what was removed, and what stays because it is in use by now.

    ``since``: when the store was listed, seconds since 1970 by its own clock. Of each artifact the manifest goes first,
    then ``on_point`` is called, then its folder goes, so half of one never looks whole. Raises ArtifactError if the
    store refuses.
    """
    gone, left, used, looked = [], [], set[str](), -math.inf
    for entry in sorted(going, key=lambda entry: entry.kind != RUN):
        if store.is_local or time.monotonic() - looked > LOOK_SECONDS:
            used, looked = _used(store, since), time.monotonic()
        try:
            _remove(store, entry, used, on_point)
        except LaunchError:
            left.append(replace(entry, reason="in use", noticed=True))
        else:
            gone.append(entry)
    return gone, left


def _used(store: Store, since: float) -> set[str]:
    """Runs that began at ``since`` or later, and the keys that they name.

    A launcher writes the steps of its run before it checks which of them are committed, and then reads what it found.
    """
    store.fs.invalidate_cache()
    steps = {run: f"{run_directory(run)}/steps.json" for run in store.names("runs")}
    runs = {run for run, path in steps.items() if store.exists(path) and written(store, store.full(path)) >= since}
    named = [of_run(store, run, starts=True) for run in runs]
    return runs.union(*(each.keys | each.meant for each in named))


def _remove(store: Store, entry: Removal, used: set[str], on_point: OnPoint) -> None:
    """Remove ``entry``; LaunchError if it is in ``used`` or another process holds it."""
    busy = LaunchError(f"{entry.path} is in use", hint="run the same command again")
    if entry.path.rpartition("/")[2] in used:
        raise busy
    if not store.fs.isdir(store.full(entry.path)):
        removal.remove(store, entry.path)
        return
    with store.locked(entry.path, busy):
        removal.remove(store, entry.path, lambda: on_point(FaultPoint.PRUNE), nested=True)
    parent = entry.path.rpartition("/")[0]
    if store.is_local and parent.count("/") == 2 and not store.names(parent):  # the folder of a dataset's day
        with suppress(OSError):  # another process writes there
            store.fs.rmdir(store.full(parent))


@contextmanager
def alone(store: Store) -> Iterator[None]:
    """Hold the lock of every model, so that no night works on the store; LaunchError names a night that does."""
    with ExitStack() as stack:
        for model in sorted({*versions.models(store), *store.names("nightly")}):
            try:
                stack.enter_context(night_lock(store, model, LEASE_SECONDS, "store gc"))
            except LaunchError as error:
                raise LaunchError(
                    error.message, hint="run the same command once that one has ended; or --dry-run"
                ) from None
        yield
