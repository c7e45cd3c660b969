"""The figures that trackers receive, with one name each, whatever the tracker calls them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.core import units
from pipeline.records.result import Result

# Keys of ``metrics.jsonl`` that are not curves.
NO_CURVE = frozenset({"step", "steps_total", "eta_seconds", "seconds", "resumed_step", "best_step", "epoch"})
# Full names of figures of the training loop; figures that are not listed go under "train".
GROUPS = {"validation_ne": "validation/ne", "validation_auc": "validation/auc", "ne_window": "train/ne"}
EVALUATED = ("ne", "auc", "gauc", "logloss", "calibration", "bayes_ne")


def curve_figures(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a record of the training loop, those of further tasks as ``<task>_<figure>``."""
    figures = {name: value for name, value in record.items() if name not in NO_CURVE}
    for task, own in (figures.pop("tasks", None) or {}).items():
        for name, value in own.items():
            figures[f"{task}_{name}"] = value
    return _known(figures)


def grouped(name: str) -> str:
    """Return ``name`` of ``curve_figures`` with the group that a program shows it in."""
    return GROUPS.get(name, f"train/{name}")


def final_figures(result: Result) -> dict[str, float]:
    """Return NE, AUC, log loss and calibration on held-out rows; those of further tasks as ``<task>_<figure>``."""
    scores = result.eval
    if scores is None:
        return {}
    figures = {name: getattr(scores, name) for name in EVALUATED}
    for task, own in (scores.tasks or {}).items():
        # The kind of a task decides which figures it has: all numbers in its record count, except its number of rows.
        for name, value in own.to_json().items():
            if name not in ("kind", "samples"):
                figures[f"{task}_{name}"] = value
    return _known(figures)


def _known(figures: Mapping[str, Any]) -> dict[str, float]:
    # Neither charts nor JSON can hold nan, so unknown figures, such as GAUC without groups, are left out.
    known = {}
    for name, value in figures.items():
        if units.known(value):
            known[name] = float(value)
    return known
