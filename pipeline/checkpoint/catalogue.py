"""Which checkpoints there are: only committed ones count."""

from __future__ import annotations

import re

from pipeline.artifacts import MANIFEST, Artifact, Store

_NAME = re.compile(r"step-(\d{8,})")


def checkpoint_path(directory: str, step: int) -> str:
    """Where the checkpoint of ``step`` lies under ``directory`` (both relative to the store)."""
    return f"{directory}/step-{step:08d}"


def _steps(store: Store, directory: str) -> list[int]:
    """Steps of all checkpoint directories, committed or not, newest first."""
    found = (_NAME.fullmatch(name) for name in store.names(directory))
    return sorted((int(match[1]) for match in found if match), reverse=True)


def latest(store: Store, directory: str) -> Artifact | None:
    """The newest committed checkpoint under ``directory``; None where there is none."""
    for step in _steps(store, directory):
        artifact = store.find(checkpoint_path(directory, step))
        if artifact is not None:
            return artifact
    return None


def prune(store: Store, directory: str, keep_last: int) -> list[str]:
    """Remove all but the newest ``keep_last`` committed checkpoints; the paths removed. For one rank to call.

    The manifest goes first, so a killed prune leaves no damaged checkpoint that looks whole. Uncommitted
    remains older than the newest kept checkpoint go too; newer ones may be in the making and stay.
    """
    kept: list[int] = []
    removed = []
    for step in _steps(store, directory):
        path = checkpoint_path(directory, step)
        committed = store.exists(f"{path}/{MANIFEST}")
        if committed and len(kept) < keep_last:
            kept.append(step)
        elif kept:
            if committed:
                store.fs.rm(store.full(f"{path}/{MANIFEST}"))
            store.fs.rm(store.full(path), recursive=True)
            removed.append(path)
    return removed
