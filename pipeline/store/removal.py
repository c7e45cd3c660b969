"""Removing from a store: manifests first, so that half an artifact never looks whole."""

from __future__ import annotations

import datetime
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

from pipeline.core.errors import ArtifactError, UnreachableError
from pipeline.store.errors import disk_errors, reachable
from pipeline.store.files import Files
from pipeline.store.manifest import MANIFEST

# Folder for the clock probes of ``store_time``, because ``store gc`` removes leftovers there.
_CLOCKS = "datasets"


@dataclass(frozen=True, kw_only=True)
class Removal:
    """Something that is removed or stays, and why.

    ``kind``: what it is, such as dataset. ``bytes``: size of its files, None if unknown. ``noticed``: whether to tell
    the user that it stays.
    """

    path: str
    bytes: int | None
    reason: str
    kind: str = ""
    noticed: bool = False

    def to_json(self, *names: str) -> dict[str, Any]:
        """Return the fields ``names`` as plain data."""
        return {name: getattr(self, name) for name in names}


def removing(path: str) -> AbstractContextManager[None]:
    """Return a context for removing ``path``: ArtifactError if the store refuses."""
    return disk_errors(path, option="", doing="removing")


def forget(store: Files, path: str) -> None:
    """Remove the manifest in ``path``, so that the artifact no longer exists although its files do."""
    with removing(path):
        if store.exists(f"{path}/{MANIFEST}"):
            store.fs.rm_file(store.full(f"{path}/{MANIFEST}"))


def remove(store: Files, path: str, between: Callable[[], None] = lambda: None, *, nested: bool = False) -> None:
    """Remove the file or folder at ``path``: first manifests, then ``between`` is called, then the rest is removed.

    ``nested``: the folder contains other artifacts. Artifacts of stages lose their manifests before checkpoints do, and
    deltas before the checkpoints they depend on. Raises ArtifactError if the store refuses. A missing path is no error.
    """
    full = store.full(path)
    if nested:
        store.fs.invalidate_cache(full)
        with removing(path):
            # Deltas have later names than the checkpoints they depend on, so they are removed first. The second sort is
            # stable, so it keeps this order among checkpoints.
            manifests = [file for file in store.fs.find(full) if file.rpartition("/")[2] == MANIFEST]
            manifests.sort(reverse=True)
            manifests.sort(key=lambda name: "/checkpoints/" in name)
            for file in manifests:
                store.fs.rm_file(file)
    else:
        forget(store, path)
    between()
    with removing(path):
        if store.exists(path):
            store.fs.rm(full, recursive=True)


def store_time(store: Files) -> float:
    """Return the time by the clock that stamps the files of ``store``, seconds since 1970, and no later than that.

    UnreachableError if the store does not answer.
    """
    # An object store and a file server have clocks of their own, and a disk's stamps follow one that ticks some hundred
    # times a second. The time of a small file says what it shows; the file is written and removed again.
    if store.is_local and not store.exists(_CLOCKS):
        # A probe anywhere else would look like a run or a model.
        return time.time()
    path = f"{_CLOCKS}/.write-clock-{uuid.uuid4().hex[:12]}"
    try:
        with reachable(store.url):
            store.write_bytes(path, b"clock")
    except UnreachableError:
        raise
    except ArtifactError:
        # The store takes no file, so this machine's clock has to do.
        return time.time()
    with reachable(store.url):
        store.fs.invalidate_cache(store.full(path))
        now = written(store, store.full(path))
    with suppress(ArtifactError), removing(path):
        store.fs.rm_file(store.full(path))
    # On a disk, take the earlier one of both clocks: manifests there are compared by when their writers made them,
    # files by what the file server stamped, and neither may look old too soon.
    if store.is_local:
        return min(now, time.time())
    return now


def age(store: Files, full: str, now: float) -> float:
    """Return the seconds from a file's last write to ``now``, a ``store_time``; 0 if the store does not say."""
    # A file without a time counts as new, so that it is not removed.
    when = _stamp(store, full)
    return 0.0 if when is None else now - when


def written(store: Files, full: str) -> float:
    """Return when a file was last written by the clock of the store, seconds since 1970; now if it does not say."""
    when = _stamp(store, full)
    return time.time() if when is None else when


def _stamp(store: Files, full: str) -> float | None:
    # KeyError comes from object stores, whose folders have no time.
    try:
        when = store.fs.modified(full)
    except (NotImplementedError, KeyError, FileNotFoundError):
        return None
    # fsspec's times without a zone are UTC.
    if not when.tzinfo:
        when = when.replace(tzinfo=datetime.UTC)
    return float(when.timestamp())
