"""Figures of every further task on the rows that have its label."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.records import TaskColumn, TaskFigures
from pipeline.specs import LABEL_KINDS

Floats = NDArray[np.floating]


def known_rows(labels: Floats, kind: str, weights: Floats | None = None) -> NDArray[np.bool_]:
    """The rows [n] with a label; none where those with a weight allow no figures: a single class, or no label."""
    there = ~np.isnan(labels)
    values = labels[there if weights is None else there & (weights > 0)]
    if not len(values) or (LABEL_KINDS.get(kind).classes and values.min() == values.max()):
        return np.zeros(len(labels), bool)
    return there


def evaluate_tasks(
    tasks: Sequence[TaskColumn], labels: Mapping[str, Floats], logits: Floats, weights: Floats | None = None
) -> dict[str, TaskFigures]:
    """The figures of each of ``tasks``; of one without rows that allow some, ``samples`` alone.

    ``logits`` [n, T]: the main task's first; ``labels`` [n] by task, NaN where missing.
    """
    figures = {}
    for place, task in enumerate(tasks, start=1):
        there = known_rows(labels[task.name], task.kind, weights)
        if not there.any():
            figures[task.name] = TaskFigures(kind=task.kind, samples=0)
            continue
        own = None if weights is None else weights[there]
        measured = LABEL_KINDS.get(task.kind).figures(labels[task.name][there], logits[there, place], own)
        known = {name: value for name, value in measured.items() if not math.isnan(value)}
        figures[task.name] = TaskFigures(kind=task.kind, **known)  # type: ignore[arg-type]
    return figures
