"""What the gate measures: figures of candidate and incumbent on the same rows, overall and by slice, as a record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config.gate import GateConfig
from pipeline.evaluation import metrics
from pipeline.evaluation.bootstrap import (
    FIGURES,
    Resampled,
    block_of_rows,
    block_sums,
    difference,
    poisson_weights,
    ratio,
    resample,
)
from pipeline.evaluation.gate.power import error_of
from pipeline.evaluation.user_auc import compare_gauc
from pipeline.records.gate import (
    Beside,
    Best,
    Figures,
    Former,
    GateRecord,
    ModelFigures,
    Serving,
    Shift,
    Slice,
    TaskComparison,
)
from pipeline.specs.gate_check import ScoredRows, ScoredTask
from pipeline.specs.label_kind import LABEL_KINDS

OTHERS = "all others"
# Blocks of rows in which each class of a slice must lie. A draw without any of them has no figures, and then the slice
# has no interval. Of 400 draws, one misses all 15 blocks in one slice of 8,000; with 6 blocks, this happens in two
# slices of three.
SLICE_BLOCKS = 15
Floats = NDArray[np.floating]


def measure(scored: ScoredRows, settings: GateConfig, seed: int = 0) -> GateRecord:
    """Measure the figures of ``gate.json``, without a verdict.

    Args:
        scored: Labels and logits. Where a logit of candidate or incumbent is not finite, the record says how many are
            not, and has no figures.
        settings: Group ``gate``: confidence, replicates and blocks of the bootstrap, sizes of slices.
        seed: The seed of the bootstrap's draws.

    Raises:
        DataError: The labels allow no figures.
    """
    # 1. Count, which is possible for any rows. If a model diverged, stop here: figures would be NaN, or hide it.
    clicked = metrics.check_labels(scored.labels)
    not_finite = {"candidate": int((~np.isfinite(scored.candidate)).sum())}
    if scored.incumbent is not None:
        not_finite["incumbent"] = int((~np.isfinite(scored.incumbent)).sum())
    for task in scored.tasks.values():
        not_finite["candidate"] += int((~np.isfinite(task.candidate)).sum())
        if task.incumbent is not None:
            not_finite["incumbent"] += int((~np.isfinite(task.incumbent)).sum())
    counted = clicked
    if scored.weights is not None:
        # Rows of weight 0 do not count towards ``gate.min_rows``.
        counted = clicked[scored.weights > 0]
    record = GateRecord(
        rows=len(counted),
        clicks=int(counted.sum()),
        click_rate=float(counted.mean()),
        confidence=settings.confidence,
        predictions_not_finite=not_finite,
    )
    if any(not_finite.values()):
        return record

    # 2. Compute the figures. All models and slices share one set of draws; tasks and GAUC draw their own rows or users.
    bootstrap = _Bootstrap(scored, clicked, settings, seed)
    overall = _measure_all_rows(scored, bootstrap, settings)
    parts = list(_largest_slices(scored, settings, bootstrap.blocks))
    # Find all slices before measuring the first, because their number widens the intervals.
    slices = tuple(_measure_slice(scored, part, bootstrap, settings.confidence, len(parts)) for part in parts)
    tasks = {name: _measure_task(task, settings, seed) for name, task in scored.tasks.items()}
    gauc = compare_gauc(scored, settings.confidence, settings.replicates, settings.blocks, seed)
    if gauc is not None:
        gauc = replace(gauc, by=scored.users_by, limit=settings.max_gauc_drop)
    return replace(record, **overall, slices=slices, tasks=tasks or None, gauc=gauc)


def former_figures(record: GateRecord) -> Former | None:
    """Return what a version's own gate record says of it, with standard errors; None if it has no figures."""
    figures, confidence = record.candidate, record.confidence
    if figures is None:
        return None
    return Former(
        ne=figures.ne.point,
        ne_error=error_of(figures.ne, confidence),
        calibration=figures.calibration.point,
        calibration_error=error_of(figures.calibration, confidence),
        calibration_by_prediction=figures.calibration_by_prediction,
        calibration_by_prediction_error=figures.calibration_by_prediction_error,
        click_rate=record.click_rate,
        coverage=record.coverage,
        importance=record.importance,
    )


class _Bootstrap:
    """The draws of blocks that all models and slices share, so that their differences are paired."""

    def __init__(self, scored: ScoredRows, clicked: NDArray[np.bool_], settings: GateConfig, seed: int) -> None:
        self.clicked = clicked
        self.row_weights = scored.weights.astype(np.float64) if scored.weights is not None else None
        self.draws = poisson_weights(settings.replicates, min(settings.blocks, len(clicked)), seed)
        self.blocks = block_of_rows(len(clicked), self.draws.shape[1])

    def resample(self, logits: Floats, rows: NDArray[np.int64] | None = None) -> dict[str, Resampled]:
        """Return NE, AUC and calibration of a model, or only of its ``rows``, which stay in their blocks."""
        clicked, blocks, row_weights = self.clicked, self.blocks, self.row_weights
        if rows is not None:
            clicked, blocks, logits = clicked[rows], blocks[rows], logits[rows]
            if row_weights is not None:
                row_weights = row_weights[rows]
        return resample(block_sums(clicked, logits, blocks, self.draws.shape[1], row_weights), self.draws)


def _measure_all_rows(scored: ScoredRows, bootstrap: _Bootstrap, settings: GateConfig) -> dict[str, Any]:
    confidence = settings.confidence
    models = {"candidate": scored.candidate}
    if scored.incumbent is not None:
        models["incumbent"] = scored.incumbent
    candidate = bootstrap.resample(scored.candidate)
    figures: dict[str, Any] = {
        "candidate": _model_figures(scored, scored.candidate, candidate, confidence),
        "histogram": metrics.histogram(models),
        "serving": _compare_with_trained(scored, candidate["ne"].point),
    }
    if scored.incumbent is not None:
        incumbent = bootstrap.resample(scored.incumbent)
        figures["incumbent"] = _model_figures(scored, scored.incumbent, incumbent, confidence)
        figures["change"] = _change(candidate, incumbent, confidence)
        figures["shift"] = Shift(
            psi=metrics.population_stability(scored.incumbent, scored.candidate),
            ks=metrics.kolmogorov_smirnov(scored.incumbent, scored.candidate),
        )
    if scored.best is not None:
        figures["best"] = Best(**_compare_ne(candidate["ne"], scored.best, bootstrap, settings))
    if scored.baseline is not None:
        figures["baseline"] = Beside(**_compare_ne(candidate["ne"], scored.baseline, bootstrap, settings))
    curves = {}
    for name, logits in models.items():
        curves[name] = metrics.reliability(scored.labels, logits, weights=scored.weights)
    if scored.uncalibrated is not None:
        curves["uncalibrated"] = metrics.reliability(scored.labels, scored.uncalibrated, weights=scored.weights)
        if scored.calibrated is not None:
            before = _intervals(bootstrap.resample(scored.uncalibrated), confidence)
            figures["calibrated"] = replace(scored.calibrated, before=Figures(**before))
    figures["reliability"] = curves
    return figures


def _intervals(drawn: dict[str, Resampled], confidence: float, tests: int = 1) -> dict[str, Any]:
    return {name: drawn[name].interval(confidence, tests) for name in FIGURES}


def _model_figures(scored: ScoredRows, logits: Floats, drawn: dict[str, Resampled], confidence: float) -> ModelFigures:
    curve = metrics.reliability(scored.labels, logits, bins=10, weights=scored.weights)
    off, error = metrics.calibration_by_prediction(curve)
    return ModelFigures(
        **_intervals(drawn, confidence),
        calibration_by_prediction=off,
        calibration_by_prediction_error=error,
    )


def _change(
    candidate: dict[str, Resampled], incumbent: dict[str, Resampled], confidence: float, tests: int = 1
) -> Figures:
    # Compare NE as a ratio, because its level differs from day to day with the click rate. Compare AUC and calibration
    # as differences, because they have fixed scales, on which 0.5 is chance and 1 is perfect.
    return Figures(
        ne=ratio(candidate["ne"], incumbent["ne"]).interval(confidence, tests),
        auc=difference(candidate["auc"], incumbent["auc"]).interval(confidence, tests),
        calibration=difference(candidate["calibration"], incumbent["calibration"]).interval(confidence, tests),
    )


def _compare_with_trained(scored: ScoredRows, served_ne: float) -> Serving | None:
    if scored.trained is None:
        return None
    trained_ne = metrics.evaluate(scored.labels, scored.trained, weights=scored.weights)["ne"]
    served = scored.candidate
    if scored.uncalibrated is not None:
        # Training has no calibrator, so compare the program without it.
        served = scored.uncalibrated
        served_ne = metrics.evaluate(scored.labels, served, weights=scored.weights)["ne"]
    return Serving(
        trained_ne=trained_ne,
        gap=served_ne / trained_ne - 1,
        largest_difference=float(np.abs(metrics.sigmoid(scored.trained) - metrics.sigmoid(served)).max()),
        ulps=units_in_the_last_place(scored.trained, served),
    )


def units_in_the_last_place(trained: Floats, served: Floats) -> float:
    """Return the largest difference of two models' logits [n] in units in the last place of float32.

    A unit is 2**-23 of a logit's size. A logit is a sum of terms of about 1, so the unit of one near 0 is that of 1.
    """
    size = np.maximum(np.abs(trained.astype(np.float64)), 1.0)
    return float((np.abs(trained.astype(np.float64) - served) / (size * np.finfo(np.float32).eps)).max(initial=0.0))


def _compare_ne(candidate: Resampled, logits: Floats, bootstrap: _Bootstrap, settings: GateConfig) -> dict[str, Any]:
    # Return the fields of ``Beside``: the candidate's NE beside that of a model with ``logits`` for the same rows.
    not_finite = int((~np.isfinite(logits)).sum())
    if not_finite:
        return {"predictions_not_finite": not_finite}
    other = bootstrap.resample(logits)["ne"]
    gain = Resampled((1 - candidate.point) / (1 - other.point), (1 - candidate.replicates) / (1 - other.replicates))
    # Compute how far the candidate's gain is above the required share. Use a difference, since a quotient has no bounds
    # where the other model's gain is small.
    share = settings.min_baseline_gain or 0.0
    spare = Resampled(
        (1 - candidate.point) - share * (1 - other.point),
        (1 - candidate.replicates) - share * (1 - other.replicates),
    )
    return {
        "ne": other.interval(settings.confidence),
        "change": ratio(candidate, other).interval(settings.confidence),
        "gain": gain.interval(settings.confidence),
        "spare": spare.interval(settings.confidence),
    }


@dataclass(frozen=True)
class _SliceRows:
    column: str
    value: str
    rows: NDArray[np.int64]
    clicks: int


def _largest_slices(scored: ScoredRows, settings: GateConfig, blocks: NDArray[np.int64]) -> Iterator[_SliceRows]:
    """Yield the largest values of each sliced column, and its others together, if both classes have enough rows.

    ``blocks``: the block of every row. Successive rows may lie in few blocks however many they are, and draws without
    any of them have no figures.
    """
    fewest = min(SLICE_BLOCKS, settings.blocks, settings.slice_min_clicks)
    for name, column in scored.slices.items():
        values, counts = np.unique(column.codes, return_counts=True)
        largest = values[np.argsort(-counts, kind="stable")][: settings.slice_values]
        groups = []
        for value in largest:
            groups.append((column.names.get(int(value), str(int(value))), np.flatnonzero(column.codes == value)))
        if len(values) > len(largest):
            groups.append((OTHERS, np.flatnonzero(~np.isin(column.codes, largest))))
        for value, rows in groups:
            counted = rows
            if scored.weights is not None:
                counted = rows[scored.weights[rows] > 0]
            clicked = scored.labels[counted] == 1
            if min(clicked.sum(), (~clicked).sum()) < settings.slice_min_clicks:
                continue
            if min(len(np.unique(blocks[counted[clicked]])), len(np.unique(blocks[counted[~clicked]]))) >= fewest:
                yield _SliceRows(name, value, rows, clicks=int((scored.labels[rows] == 1).sum()))


def _measure_slice(scored: ScoredRows, part: _SliceRows, bootstrap: _Bootstrap, confidence: float, tests: int) -> Slice:
    # Return the figures of one of ``tests`` slices, whose intervals must hold together.
    candidate = bootstrap.resample(scored.candidate, part.rows)
    measured = Slice(
        slice=part.column,
        value=part.value,
        rows=len(part.rows),
        clicks=part.clicks,
        candidate=Figures(**_intervals(candidate, confidence, tests)),
    )
    if scored.incumbent is None:
        return measured
    incumbent = bootstrap.resample(scored.incumbent, part.rows)
    return replace(
        measured,
        incumbent=Figures(**_intervals(incumbent, confidence, tests)),
        change=_change(candidate, incumbent, confidence, tests),
    )


def _measure_task(task: ScoredTask, settings: GateConfig, seed: int) -> TaskComparison:
    # Return the figures of a task on the rows with its label, or only their number if they allow no figures.
    known = metrics.known_rows(task.labels, task.kind, task.weights)
    rows, kind = int(known.sum()), LABEL_KINDS.get(task.kind)
    if not rows:
        return TaskComparison(kind=task.kind, figure=kind.title)
    confidence, main = settings.confidence, kind.title.lower()
    draws = poisson_weights(settings.replicates, min(settings.blocks, rows), seed)
    candidate = _resample_task(task, task.candidate, known, draws)
    # Only classes have an AUC.
    auc = candidate["auc"].interval(confidence) if kind.classes else None
    measured = TaskComparison(
        kind=task.kind,
        figure=kind.title,
        rows=rows,
        candidate=candidate[main].interval(confidence),
        auc=auc,
        calibration=candidate["calibration"].interval(confidence),
    )
    if task.incumbent is None:
        return measured
    incumbent = _resample_task(task, task.incumbent, known, draws)
    return replace(
        measured,
        incumbent=incumbent[main].interval(confidence),
        change=ratio(candidate[main], incumbent[main]).interval(confidence),
    )


def _resample_task(
    task: ScoredTask, logits: Floats, known: NDArray[np.bool_], draws: NDArray[np.float64]
) -> dict[str, Resampled]:
    labels, values = task.labels[known], logits[known]
    row_weights = task.weights[known].astype(np.float64) if task.weights is not None else None
    count = draws.shape[1]
    blocks, kind = block_of_rows(len(labels), count), LABEL_KINDS.get(task.kind)
    if kind.classes:
        return resample(block_sums(labels == 1, values, blocks, count, row_weights), draws)

    # For numbers, four sums of each block take the place of the six of ``block_sums``.
    predicted, observed = kind.predicted(values), labels.astype(np.float64)
    if row_weights is None:
        row_weights = np.ones(len(observed))
    squares = row_weights * (predicted - observed) ** 2
    columns = (row_weights, squares, row_weights * predicted, row_weights * observed)
    sums = np.stack([np.bincount(blocks, column, minlength=count) for column in columns], axis=1)

    # The point estimates are those of a replicate that draws every block once.
    figures = []
    for totals in (sums.sum(0)[None], draws @ sums):
        weight, square, prediction, observation = totals.T
        # A replicate may draw no block, or one without a label above 0.
        with np.errstate(divide="ignore", invalid="ignore"):
            figures.append((np.sqrt(square / weight), prediction / observation))
    (rmse, calibration), (drawn_rmse, drawn_calibration) = figures
    return {
        "rmse": Resampled(float(rmse[0]), drawn_rmse),
        "calibration": Resampled(float(calibration[0]), drawn_calibration),
    }
