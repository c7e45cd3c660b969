"""One step of a run: a stage with its key and the paths of what it reads and writes, as ``steps.json`` holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Step:
    """A stage of a run. Paths are relative to the store.

    ``inputs``: the input stages' names and their artifacts' paths; ``config``: what of the configuration the key
    covers; ``input_keys``: the inputs' keys; ``scratch``: other paths that belong to the artifact and go with it when
    it is made again (a training step's checkpoints).
    """

    name: str
    key: str
    path: str
    inputs: dict[str, str] = field(default_factory=dict)
    input_keys: dict[str, str] = field(default_factory=dict)
    config: dict[str, object] = field(default_factory=dict)
    scratch: tuple[str, ...] = ()


def run_directory(run: str) -> str:
    """Where a run's records lie, relative to the store."""
    return f"runs/{run}"


def steps_record(steps: Sequence[Step]) -> dict[str, Any]:
    """The content of ``steps.json``."""
    return {"version": 1, "steps": [asdict(step) for step in steps]}


def steps_of(record: Mapping[str, Any]) -> list[Step]:
    """The steps in the content of ``steps.json``; KeyError or TypeError where it holds something else."""
    return [Step(**{**step, "scratch": tuple(step["scratch"])}) for step in record["steps"]]
