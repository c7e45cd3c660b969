"""Removing from a store: manifests first, so that half of an artifact never looks whole."""

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
    """Something that goes or stays, and the ``reason`` in words.

    ``kind``: what it is, such as dataset or remains; ``bytes`` of its files, None where they are not known;
    ``noticed``: whether people should see that it stays.
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
    """Around the removal of ``path``: ArtifactError where the store refuses it."""
    return disk_errors(path, option="", doing="removing")


def forget(store: Files, path: str) -> None:
    """Remove the manifest in ``path``: from now on no artifact is there, whatever files are."""
    with removing(path):
        if store.exists(f"{path}/{MANIFEST}"):
            store.fs.rm_file(store.full(f"{path}/{MANIFEST}"))


def remove(store: Files, path: str, between: Callable[[], None] = lambda: None, *, nested: bool = False) -> None:
    """Remove the file or folder at ``path``: manifests first, then ``between`` is called, then the rest goes.

    ``nested``: artifacts lie in it, too; those of stages go before checkpoints, and those that rest on others before
    these. ArtifactError where the store refuses it. Removing what is gone already is no error.
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
    """Seconds since a file was written; 0, which is young, where the store does not say."""
    return time.time() - written(store, full)


def written(store: Files, full: str) -> float:
    """When a file was last written, seconds since 1970; now where the store does not say, for it may be so."""
    try:
        when = store.fs.modified(full)
    except (NotImplementedError, KeyError, FileNotFoundError):
        return time.time()
    return float((when if when.tzinfo else when.replace(tzinfo=datetime.UTC)).timestamp())
