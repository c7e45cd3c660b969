"""``force=true``: remove what a stage made before, manifests first. Checkpoints that a version names stay.

A forced training whose former checkpoints must stay gets a directory of its own beside them, ``<key>.2`` and so on. The
training continues in the highest number: later attempts and later commands resume from its own checkpoints alone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace

from pipeline.records.runs import Step
from pipeline.store.artifacts import Store
from pipeline.store.references import pins
from pipeline.store.removal import remove

Clear = Callable[[Store, str, dict[str, str]], list[str]]
MARKER = "forced.json"  # reserves a directory before its first checkpoint


def current_directory(store: Store, directory: str) -> str:
    """Where the training continues whose checkpoints are in ``directory``, or beside it once it was forced."""
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
    matches = (re.fullmatch(rf"{re.escape(base)}\.(\d+)", name) for name in store.names(parent))
    return [int(match[1]) for match in matches if match]
