"""What the gate looks at: figures of candidate and incumbent on the same rows, overall and by slice, as a record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config.gate import GateConfig
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
from pipeline.evaluation.drift import (
    calibration_by_prediction,
    histogram,
    kolmogorov_smirnov,
    population_stability,
)
from pipeline.evaluation.gate_tasks import ScoredTask, measure_tasks
from pipeline.evaluation.metrics import check_labels, evaluate, reliability, sigmoid
from pipeline.evaluation.power import error_of
from pipeline.records.gate import (
    Beside,
    Best,
    Calibrated,
    Figures,
    Former,
    GateRecord,
    ModelFigures,
    Serving,
    Shift,
    Slice,
)

OTHERS = "all others"
Floats = NDArray[np.floating]


@dataclass(frozen=True, kw_only=True)
class SliceColumn:
    """A column that rows are told apart by: ``codes`` [n] integers, and what the codes are called (else as numbers)."""

    codes: NDArray[np.integer]
    names: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Logits of the same rows, [n] each: as the candidate serves them, the incumbent (None: there is none), and as the
    candidate was evaluated after training (None: not known). ``labels`` 0 and 1; ``slices`` by name. ``best``: of the
    best of the last versions, where that is not the incumbent; ``baseline``: of a simple model. ``uncalibrated``: the
    candidate's without its calibrator, which ``calibrated`` describes.
    """

    labels: Floats
    candidate: Floats
    incumbent: Floats | None = None
    trained: Floats | None = None
    best: Floats | None = None
    baseline: Floats | None = None
    slices: Mapping[str, SliceColumn] = field(default_factory=dict)
    tasks: Mapping[str, ScoredTask] = field(default_factory=dict)
    weights: Floats | None = None
    uncalibrated: Floats | None = None
    calibrated: Calibrated | None = None

    def of_rows(self, kept: NDArray[np.bool_]) -> Scored:
        """The rows that are ``kept`` [n]."""
        names = ("labels", "candidate", "incumbent", "trained", "best", "baseline", "weights", "uncalibrated")
        columns: dict[str, Any] = {name: None if (c := getattr(self, name)) is None else c[kept] for name in names}
        slices = {name: replace(each, codes=each.codes[kept]) for name, each in self.slices.items()}
        tasks = {name: each.of_rows(kept) for name, each in self.tasks.items()}
        return replace(self, **columns, slices=slices, tasks=tasks)


def measure(scored: Scored, settings: GateConfig, seed: int = 0) -> GateRecord:
    """The figures of ``gate.json``, without a verdict.

    Where a logit of the candidate is not finite there are no figures, only how many are not. Raises DataError for
    labels that allow none.
    """
    clicked = check_labels(scored.labels)
    bare = GateRecord(
        rows=len(clicked),
        clicks=int(clicked.sum()),
        click_rate=float(clicked.mean()),
        confidence=settings.confidence,
        predictions_not_finite=_not_finite(scored),
    )
    if any(bare.predictions_not_finite.values()):
        return bare
    weights = poisson_weights(settings.replicates, min(settings.blocks, len(clicked)), seed)
    groups = list(_groups(scored, settings))
    slices = tuple(_slice(scored, clicked, group, weights, settings, len(groups)) for group in groups)
    tasks = measure_tasks(scored.tasks, settings, seed) or None
    return replace(bare, **_figures(scored, clicked, weights, settings), slices=slices, tasks=tasks)


def _not_finite(scored: Scored) -> dict[str, int]:
    """Predictions that are not finite, of all tasks, by model."""
    counts = {name: int((~np.isfinite(values)).sum()) for name, values in _models(scored).items()}
    for task in scored.tasks.values():
        counts["candidate"] += int((~np.isfinite(task.candidate)).sum())
        if task.incumbent is not None:
            counts["incumbent"] += int((~np.isfinite(task.incumbent)).sum())
    return counts


def _own(scored: Scored) -> NDArray[np.float64] | None:
    return None if scored.weights is None else scored.weights.astype(np.float64)


def _models(scored: Scored) -> dict[str, Floats]:
    models = {"candidate": scored.candidate}
    return models if scored.incumbent is None else {**models, "incumbent": scored.incumbent}


def _figures(
    scored: Scored, clicked: NDArray[np.bool_], weights: NDArray[np.float64], settings: GateConfig
) -> dict[str, Any]:
    """The fields of the record that are figures of all rows."""
    models = _models(scored)
    drawn = _resampled(models, clicked, weights, own=_own(scored))
    ours = _model_figures(scored, scored.candidate, drawn["candidate"], settings.confidence)
    beside = _beside_incumbent(scored, drawn, settings) if scored.incumbent is not None else {}
    others = {
        name: kind(**_comparison(drawn["candidate"]["ne"], logits, clicked, weights, settings, _own(scored)))
        for name, logits, kind in (("best", scored.best, Best), ("baseline", scored.baseline, Beside))
        if logits is not None
    }
    before = {} if scored.uncalibrated is None else {"uncalibrated": scored.uncalibrated}
    return {
        "reliability": {
            name: reliability(scored.labels, logits, weights=scored.weights)
            for name, logits in {**models, **before}.items()
        },
        "candidate": ours,
        "histogram": histogram(models),
        "serving": _serving(scored, ours.ne.point),
        **_calibrated(scored, clicked, weights, settings),
        **beside,
        **others,
    }


def _calibrated(
    scored: Scored, clicked: NDArray[np.bool_], weights: NDArray[np.float64], settings: GateConfig
) -> dict[str, Any]:
    """The record of the calibrator with the candidate's figures without it; nothing where there is none."""
    if scored.calibrated is None or scored.uncalibrated is None:
        return {}
    drawn = _resampled({"before": scored.uncalibrated}, clicked, weights, own=_own(scored))["before"]
    before = Figures(**{name: drawn[name].interval(settings.confidence) for name in FIGURES})
    return {"calibrated": replace(scored.calibrated, before=before)}


def _model_figures(scored: Scored, logits: Floats, drawn: Mapping[str, Resampled], confidence: float) -> ModelFigures:
    off, error = calibration_by_prediction(reliability(scored.labels, logits, bins=10, weights=scored.weights))
    return ModelFigures(
        **{name: drawn[name].interval(confidence) for name in FIGURES},
        calibration_by_prediction=off,
        calibration_by_prediction_error=error,
    )


def _beside_incumbent(
    scored: Scored, drawn: Mapping[str, dict[str, Resampled]], settings: GateConfig
) -> dict[str, Any]:
    assert scored.incumbent is not None
    psi = population_stability(scored.incumbent, scored.candidate)
    return {
        "incumbent": _model_figures(scored, scored.incumbent, drawn["incumbent"], settings.confidence),
        "change": _change(drawn, settings.confidence),
        "shift": Shift(psi=psi, ks=kolmogorov_smirnov(scored.incumbent, scored.candidate)),
    }


def _serving(scored: Scored, served_ne: float) -> Serving | None:
    if scored.trained is None:
        return None
    ne = evaluate(scored.labels, scored.trained, weights=scored.weights)["ne"]
    served = scored.candidate
    if scored.uncalibrated is not None:  # training has no calibrator
        served = scored.uncalibrated
        served_ne = evaluate(scored.labels, served, weights=scored.weights)["ne"]
    return Serving(
        trained_ne=ne,
        gap=served_ne / ne - 1,
        largest_difference=float(np.abs(sigmoid(scored.trained) - sigmoid(served)).max()),
        ulps=units_in_the_last_place(scored.trained, served),
    )


def units_in_the_last_place(trained: Floats, served: Floats) -> float:
    """The largest difference of two models' logits, in units in the last place of float32: 2**-23 of a logit's size.

    A logit is a sum of terms of about 1, so the unit of one near 0 is that of 1.
    """
    size = np.maximum(np.abs(trained.astype(np.float64)), 1.0)
    return float((np.abs(trained.astype(np.float64) - served) / (size * np.finfo(np.float32).eps)).max(initial=0.0))


def _comparison(
    ours: Resampled,
    logits: Floats,
    clicked: NDArray[np.bool_],
    weights: NDArray[np.float64],
    settings: GateConfig,
    own: NDArray[np.float64] | None,
) -> dict[str, Any]:
    """NE of another model on the same rows, the change from it to the candidate, and the candidate's share of its gain.

    ``spare``: by how much the candidate's gain is above ``gate.min_baseline_gain`` of the other one's. A difference,
    for where that gain is small a quotient has no bounds. Or how many of the other's predictions are not finite.
    """
    if bad := int((~np.isfinite(logits)).sum()):
        return {"predictions_not_finite": bad}
    theirs = _resampled({"other": logits}, clicked, weights, own=own)["other"]["ne"]
    gain = Resampled((1 - ours.point) / (1 - theirs.point), (1 - ours.replicates) / (1 - theirs.replicates))
    asked = settings.min_baseline_gain or 0.0
    spare = Resampled(
        (1 - ours.point) - asked * (1 - theirs.point), (1 - ours.replicates) - asked * (1 - theirs.replicates)
    )
    drawn = {"ne": theirs, "change": ratio(ours, theirs), "gain": gain, "spare": spare}
    return {name: each.interval(settings.confidence) for name, each in drawn.items()}


def former_figures(record: GateRecord) -> Former | None:
    """What a version's own gate record says of it, with standard errors; None where it has no figures."""
    own, confidence = record.candidate, record.confidence
    if own is None:
        return None
    return Former(
        ne=own.ne.point,
        ne_error=error_of(own.ne, confidence),
        calibration=own.calibration.point,
        calibration_error=error_of(own.calibration, confidence),
        calibration_by_prediction=own.calibration_by_prediction,
        calibration_by_prediction_error=own.calibration_by_prediction_error,
        click_rate=record.click_rate,
        coverage=record.coverage,
        importance=record.importance,
    )


def _resampled(
    models: Mapping[str, Floats],
    clicked: NDArray[np.bool_],
    weights: NDArray[np.float64],
    rows: Any = None,
    own: NDArray[np.float64] | None = None,
) -> dict[str, dict[str, Resampled]]:
    blocks = block_of_rows(len(clicked), weights.shape[1])
    if rows is not None:
        clicked, blocks = clicked[rows], blocks[rows]
        models = {name: logits[rows] for name, logits in models.items()}
        own = None if own is None else own[rows]
    return {
        name: resample(block_sums(clicked, logits, blocks, weights.shape[1], own), weights)
        for name, logits in models.items()
    }


def _change(drawn: Mapping[str, dict[str, Resampled]], confidence: float, tests: int = 1) -> Figures:
    """From incumbent to candidate: NE as a share, AUC and calibration as differences."""
    ours, theirs = drawn["candidate"], drawn["incumbent"]
    return Figures(
        ne=ratio(ours["ne"], theirs["ne"]).interval(confidence, tests),
        auc=difference(ours["auc"], theirs["auc"]).interval(confidence, tests),
        calibration=difference(ours["calibration"], theirs["calibration"]).interval(confidence, tests),
    )


@dataclass(frozen=True)
class _SliceRows:
    """The ``rows`` of one slice."""

    column: str
    value: str
    rows: NDArray[np.int64]
    clicks: int


def _groups(scored: Scored, settings: GateConfig) -> Iterator[_SliceRows]:
    """The largest values of every sliced column, the rest together; only what has enough rows of both classes."""
    for name, column in scored.slices.items():
        values, counts = np.unique(column.codes, return_counts=True)
        largest = values[np.argsort(-counts, kind="stable")][: settings.slice_values]
        groups = [(column.names.get(int(v), str(int(v))), np.flatnonzero(column.codes == v)) for v in largest]
        if len(values) > len(largest):
            groups.append((OTHERS, np.flatnonzero(~np.isin(column.codes, largest))))
        for value, rows in groups:
            clicks = int((scored.labels[rows] == 1).sum())
            kept = scored.labels[rows if scored.weights is None else rows[scored.weights[rows] > 0]] == 1
            if min(kept.sum(), (~kept).sum()) >= settings.slice_min_clicks:
                yield _SliceRows(name, value, rows, clicks)


def _slice(
    scored: Scored,
    clicked: NDArray[np.bool_],
    group: _SliceRows,
    weights: NDArray[np.float64],
    settings: GateConfig,
    tests: int,
) -> Slice:
    """The figures of one of ``tests`` slices."""
    drawn = _resampled(_models(scored), clicked, weights, group.rows, _own(scored))
    models = {
        name: Figures(**{figure: figures[figure].interval(settings.confidence, tests) for figure in FIGURES})
        for name, figures in drawn.items()
    }
    change = _change(drawn, settings.confidence, tests) if scored.incumbent is not None else None
    return Slice(
        slice=group.column, value=group.value, rows=len(group.rows), clicks=group.clicks, **models, change=change
    )
