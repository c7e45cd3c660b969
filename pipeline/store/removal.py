"""Removing from a store: manifests first, so that half an artifact never looks whole."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from pipeline.store.files import Files
from pipeline.store.manifest import MANIFEST
from pipeline.store.refusals import disk_errors


@dataclass(frozen=True, kw_only=True)
class Removal:
    """Something that is removed or stays, and why.

    ``kind``: what it is, such as dataset. ``bytes``: of its files, None if unknown. ``noticed``: whether to tell the
    user that it stays.
    """

    path: str
    bytes: int | None
    reason: str
    kind: str = ""
    noticed: bool = False

    def to_json(self, *names: str) -> dict[str, Any]:
        """The fields ``names`` as plain data."""
        return {name: getattr(self, name) for name in names}


def removing(path: str) -> AbstractContextManager[None]:
    """Context for removing ``path``: ArtifactError if the store refuses."""
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
            manifests = [each for each in store.fs.find(full) if each.rpartition("/")[2] == MANIFEST]
            for each in sorted(sorted(manifests, reverse=True), key=lambda name: "/checkpoints/" in name):
                store.fs.rm_file(each)
    else:
        forget(store, path)
    between()
    with removing(path):
        if store.exists(path):
            store.fs.rm(full, recursive=True)


def age(store: Files, full: str) -> float:
    """Seconds since a file was written; 0 if the store does not say."""
    return time.time() - written(store, full)


def written(store: Files, full: str) -> float:
    """When a file was last written, seconds since 1970; now if the store does not say."""
    try:
        when = store.fs.modified(full)
    except (NotImplementedError, KeyError, FileNotFoundError):
        return time.time()
    return float((when if when.tzinfo else when.replace(tzinfo=datetime.UTC)).timestamp())
