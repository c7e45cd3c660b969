"""Figures of further tasks for the gate, with intervals, and its questions about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipeline.config.gate import GateConfig
from pipeline.config.tasks import TaskLimits
from pipeline.evaluation.bootstrap import Resampled, block_of_rows, block_sums, poisson_weights, ratio, resample
from pipeline.evaluation.check import above, not_worse, percent, place
from pipeline.evaluation.metrics import known_rows
from pipeline.records.gate import Check, GateRecord, TaskComparison
from pipeline.specs.label_kind import LABEL_KINDS

Floats = NDArray[np.floating]


@dataclass(frozen=True)
class ScoredTask:
    """Labels [n] of a task (NaN where missing) of ``kind``, and logits of candidate and incumbent (None: it lacks it).

    ``weights``: of the rows.
    """

    kind: str
    labels: Floats
    candidate: Floats
    incumbent: Floats | None = None
    weights: Floats | None = None

    def of_rows(self, kept: NDArray[np.bool_]) -> ScoredTask:
        """The rows that are ``kept`` [n]."""
        incumbent = None if self.incumbent is None else self.incumbent[kept]
        weights = None if self.weights is None else self.weights[kept]
        return replace(
            self, labels=self.labels[kept], candidate=self.candidate[kept], incumbent=incumbent, weights=weights
        )


def measure_tasks(tasks: Mapping[str, ScoredTask], settings: GateConfig, seed: int) -> dict[str, TaskComparison]:
    """The figures of each task on the rows with its label; of one whose rows allow none, their number alone."""
    return {name: _measured(task, settings, seed) for name, task in tasks.items()}


def _measured(task: ScoredTask, settings: GateConfig, seed: int) -> TaskComparison:
    there = known_rows(task.labels, task.kind, task.weights)
    rows, kind = int(there.sum()), LABEL_KINDS.get(task.kind)
    if not rows:
        return TaskComparison(kind=task.kind, figure=kind.title)
    draws = poisson_weights(settings.replicates, min(settings.blocks, rows), seed)
    ours = _resampled(task, task.candidate, there, draws)
    main, confidence = kind.title.lower(), settings.confidence
    more = {}
    if task.incumbent is not None:
        theirs = _resampled(task, task.incumbent, there, draws)
        more = {
            "incumbent": theirs[main].interval(confidence),
            "change": ratio(ours[main], theirs[main]).interval(confidence),
        }
    auc = ours["auc"].interval(confidence) if kind.classes else None
    return TaskComparison(
        kind=task.kind,
        figure=kind.title,
        rows=rows,
        candidate=ours[main].interval(confidence),
        auc=auc,
        calibration=ours["calibration"].interval(confidence),
        **more,
    )


def _resampled(
    task: ScoredTask, logits: Floats, there: NDArray[np.bool_], draws: NDArray[np.float64]
) -> dict[str, Resampled]:
    labels, values = task.labels[there], logits[there]
    own = None if task.weights is None else task.weights[there].astype(np.float64)
    count = draws.shape[1]
    blocks, kind = block_of_rows(len(labels), count), LABEL_KINDS.get(task.kind)
    if kind.classes:
        return resample(block_sums(labels == 1, values, blocks, count, own), draws)
    predicted, known = kind.predicted(values), labels.astype(np.float64)
    own = np.ones(len(known)) if own is None else own
    columns = (own, own * (predicted - known) ** 2, own * predicted, own * known)
    sums = np.stack([np.bincount(blocks, column, minlength=count) for column in columns], axis=1)
    points, drawn = _number_figures(sums.sum(0)[None]), _number_figures(draws @ sums)
    return {name: Resampled(float(points[name][0]), drawn[name]) for name in points}


def _number_figures(totals: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    weight, square, predicted, known = totals.T
    with np.errstate(divide="ignore", invalid="ignore"):
        return {"rmse": np.sqrt(square / weight), "calibration": predicted / known}


def ask_tasks(record: GateRecord, settings: GateConfig) -> Iterator[Check]:
    """The questions of ``gate.tasks`` about every task with figures; a task that it does not name has the defaults."""
    for name, task in (record.tasks or {}).items():
        limits = settings.tasks.get(name) or TaskLimits()
        if task.candidate is None:
            words = f"no test row has a label of task {name} that allows figures"
            yield Check(f"{name}: rows", "", True, words, warned=True)
            continue
        yield from _floors(name, task, task.candidate.point, limits)
        if task.change is not None and task.incumbent is not None and limits.max_increase is not None:
            limit, change = limits.max_increase, task.change
            passed = not_worse(change, limit)
            words = (
                f"{task.figure} of task {name} is {task.candidate.point:.4f}, the incumbent's "
                f"{task.incumbent.point:.4f}: {percent(change)}, {place(change.point, limit, passed)} +{limit:.1%} "
                f"(gate.tasks.{name}.max_increase)"
            )
            yield Check(f"{name}: {task.figure} beside the incumbent", f"gate.tasks.{name}.max_increase", passed, words)


def _floors(name: str, task: TaskComparison, figure: float, limits: TaskLimits) -> Iterator[Check]:
    """What a task must reach, incumbent or not."""
    classes = LABEL_KINDS.get(task.kind).classes
    setting = "max_ne" if classes else "max_rmse"
    what = f"{task.figure} of task {name} is"
    yield from above(f"{name}: {task.figure}", f"tasks.{name}.{setting}", figure, getattr(limits, setting), what)
    if task.auc is not None and limits.min_auc is not None:
        passed = task.auc.point >= limits.min_auc
        words = f"AUC of task {name} is {task.auc.point:.4f}, {'not ' if passed else ''}below {limits.min_auc:g}"
        yield Check(f"{name}: AUC", f"gate.tasks.{name}.min_auc", passed, f"{words} (gate.tasks.{name}.min_auc)")
    limit = limits.max_calibration_error
    if task.calibration is not None and limit is not None:
        point, low, high = task.calibration
        passed = low <= 1 + limit and high >= 1 - limit
        words = (
            f"calibration of task {name} is {point:.4f} [{low:.4f}, {high:.4f}], "
            f"{place(abs(point - 1), limit, passed)} {limit:.1%} (gate.tasks.{name}.max_calibration_error)"
        )
        yield Check(f"{name}: calibration", f"gate.tasks.{name}.max_calibration_error", passed, words)
