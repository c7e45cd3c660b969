"""``force=true``: what a stage made before goes, manifests first. Checkpoints that a version names stay where they are.

A forced training whose former checkpoints must stay gets a directory of its own beside them, ``<key>.2`` and so on; the
highest number is the one that the training goes on in. So what was forced resumes from its own checkpoints alone, a
further attempt of the same run and a later command alike.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace

from pipeline.records.step import Step
from pipeline.store import Store
from pipeline.store.references import pins
from pipeline.store.removal import remove

Clear = Callable[[Store, str, dict[str, str]], list[str]]
MARKER = "forced.json"  # makes a directory be there before its first checkpoint is


def current_directory(store: Store, directory: str) -> str:
    """Where the training goes on whose checkpoints lie in ``directory`` unless it was forced."""
    number = max(_numbers(store, directory), default=1)
    return directory if number == 1 else f"{directory}.{number}"


def discard(store: Store, step: Step) -> Step:
    """Remove what ``step`` made; the step as it is to run now, its ``scratch`` another directory where some stays.

    Raises DamagedError, before anything is removed, where it cannot be read what versions name.
    """
    from pipeline.checkpoint.retention import clear

    named = pins(store, run="") if step.scratch else {}
    remove(store, step.path)
    return replace(step, scratch=tuple(_cleared(store, place, named, clear) for place in step.scratch))


def _cleared(store: Store, current: str, named: dict[str, str], clear: Clear) -> str:
    """Clear the checkpoints of the training that goes on in ``current``; the directory in which it begins anew."""
    parent, _, name = current.rpartition("/")
    base = name.partition(".")[0]
    stays = False
    for each in store.names(parent):
        if each == base or each.startswith((f"{base}.", f"{base}-")):
            stays |= bool(clear(store, f"{parent}/{each}", named)) and each == name
    if not stays:
        return current
    fresh = f"{parent}/{base}.{1 + max(_numbers(store, f'{parent}/{base}'), default=1)}"
    store.write_json(f"{fresh}/{MARKER}", {"created": time.time()})
    return fresh


def _numbers(store: Store, directory: str) -> list[int]:
    """Numbers of the directories that forced trainings with checkpoints in ``directory`` were given."""
    parent, _, base = directory.rpartition("/")
    found = (re.fullmatch(rf"{re.escape(base)}\.(\d+)", name) for name in store.names(parent))
    return [int(match[1]) for match in found if match]
