"""Figures of predictions over all evaluated rows, in float64, exact and independent of row order.

NE, AUC, log loss and calibration are computed from two sorted arrays, the logits of the clicked rows and those of the
others. Two orders of the same rows give the same two arrays, so they give the same bits, whatever the world size was.
The module also has the reliability curve, figures of numbers (counts, values) and of further tasks, and the distance
between two sets of predictions for the same rows.

NE is the normalised entropy: the log loss divided by the entropy of the rows' click rate. Always predicting that rate
gives 1, and lower is better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipeline.core.errors import DataError
from pipeline.records.dataset import TaskColumn
from pipeline.records.gate import Curve, Histogram
from pipeline.records.result import TaskFigures
from pipeline.specs.label_kind import LABEL_KINDS

# Rows per block, which keeps the float64 temporaries at 8 MiB each however many rows there are.
BLOCK_ROWS = 1 << 20
# float32 cannot tell a probability closer to one than this from certainty.
NEAREST_TO_ONE = 1.0 - 2.0**-25
NEAREST_TO_ZERO = float(np.finfo(np.float32).tiny)
Rate = TypeVar("Rate", float, NDArray[np.float64])
Floats = NDArray[np.floating]


@dataclass(frozen=True)
class ByClass:
    """Values of the rows, ascending, split by label: ``clicked`` has label 1, ``other`` label 0."""

    clicked: NDArray[np.floating]
    other: NDArray[np.floating]

    @property
    def rows(self) -> int:
        return len(self.clicked) + len(self.other)


def evaluate(
    labels: ArrayLike,
    logits: ArrayLike,
    true_probability: ArrayLike | None = None,
    weights: NDArray[np.floating] | None = None,
) -> dict[str, float]:
    """Return the figures of ``result.json``'s ``eval`` part.

    Args:
        labels: 0 or 1, [n].
        logits: The logits of the same rows, [n].
        true_probability: Probabilities in [0, 1], [n]; None: unknown.
        weights: How many rows each row counts as, [n]; None: one.

    Returns:
        ``samples``, ``ne`` (log loss / entropy of these rows' base rate; He et al. 2014, section 2), ``auc``
        (Mann-Whitney, a tie counts one half), ``logloss`` (nats per row), ``calibration`` (sum of predicted / sum of
        observed clicks) and, with ``true_probability`` and without ``weights``, ``bayes_ne``: the NE of a model that
        knows it.

    Raises:
        DataError: There are no rows, one class only (rows of weight 0 apart), labels other than 0 and 1, or logits
            that are not finite.
    """
    clicked = check_labels(labels)
    values = check_logits(logits, len(clicked))
    if weights is not None:
        _check_weights(clicked, weights)
        return {"samples": len(clicked), **_weighted(clicked, values, weights)}
    scores = split_by_class(clicked, values)
    entropy = base_entropy(len(scores.clicked), len(scores.other))
    # Compute the loss from logits, not from probabilities: a wrong logit of 80 costs 80 nats, but a probability of 1
    # would cost infinitely much.
    loss_of_clicked = _sum_blocks(lambda x: np.logaddexp(0.0, -x), scores.clicked)
    loss_of_other = _sum_blocks(lambda x: np.logaddexp(0.0, x), scores.other)
    loss = (loss_of_clicked + loss_of_other) / scores.rows
    figures: dict[str, float] = {
        "samples": scores.rows,
        "ne": loss / entropy,
        "auc": exact_auc(scores),
        "logloss": loss,
        "calibration": calibration(scores),
    }
    if true_probability is not None:
        truth = split_by_class(clicked, _check_probabilities(true_probability, len(clicked)))
        # In float32, a probability may have been rounded to 0 or 1, which must not cost infinitely much.
        clicked_loss = _sum_blocks(lambda p: -np.log(np.maximum(p, NEAREST_TO_ZERO)), truth.clicked)
        other_loss = _sum_blocks(lambda p: -np.log1p(-np.minimum(p, NEAREST_TO_ONE)), truth.other)
        figures["bayes_ne"] = (clicked_loss + other_loss) / truth.rows / entropy
    return figures


def check_labels(labels: ArrayLike) -> NDArray[np.bool_]:
    """Return ``labels`` as booleans; DataError for no rows, values other than 0 and 1, or a single class."""
    values = np.asarray(labels)
    if values.ndim != 1:
        raise ValueError(f"labels have shape {values.shape}, expected one dimension")
    if not len(values):
        raise DataError("there are no rows to evaluate", hint="more rows, or data.split.test_share=<larger>")
    clicked = values == 1
    wrong = ~(clicked | (values == 0))
    if wrong.any():
        raise DataError(
            f"{wrong.sum():,} of {len(values):,} labels are neither 0 nor 1, the first is {values[wrong][0]}",
            hint="data.label.positive=<value that means a click> data.label.negative=<value that means none>",
        )
    clicks = int(clicked.sum())
    if clicks in (0, len(values)):
        raise DataError(
            f"all {len(values):,} evaluated rows have label {int(clicks > 0)}, expected both classes: "
            "NE and AUC are not defined for one class only",
            hint="data.split.test_share=<a larger share>, or check data.label.column and data.label.positive",
        )
    return clicked


def _check_weights(clicked: NDArray[np.bool_], weights: NDArray[np.floating]) -> None:
    weighted = clicked[weights > 0]
    clicks = int(weighted.sum())
    if clicks in (0, len(weighted)):
        labels = ""
        if len(weighted):
            labels = f", and all of these have label {int(clicks > 0)}"
        raise DataError(
            f"{len(weighted):,} of {len(clicked):,} evaluated rows have a weight above 0{labels}, expected both "
            "classes: NE and AUC are not defined for one class only",
            hint="logs in which the column of data.weight is above 0 for rows of both classes, or data.weight=null",
        )


def check_logits(logits: ArrayLike, rows: int) -> NDArray[np.floating]:
    """Return ``logits`` as float32 or float64 of ``rows`` finite values; DataError says how many are not."""
    values = _as_floats(logits)
    if values.shape != (rows,):
        raise ValueError(f"logits have shape {values.shape}, expected ({rows},) as the labels")
    finite = np.isfinite(values)
    if not finite.all():
        nan = int(np.isnan(values).sum())
        bad = rows - int(finite.sum())
        raise DataError(
            f"{bad:,} of {rows:,} logits are not finite ({nan:,} NaN, {bad - nan:,} infinite): the model diverged",
            hint="train again with lower rates (train.lr=0.0005 train.sparse_lr=0.01) or train.precision=fp32",
        )
    return values


def _check_probabilities(probabilities: ArrayLike, rows: int) -> NDArray[np.floating]:
    values = _as_floats(probabilities)
    if values.shape != (rows,):
        raise ValueError(f"true probabilities have shape {values.shape}, expected ({rows},) as the labels")
    wrong = ~((values >= 0) & (values <= 1))
    if wrong.any():
        raise DataError(
            f"{wrong.sum():,} of {rows:,} true probabilities lie outside [0, 1], the first is {values[wrong][0]}",
            hint="force=true stages=[ingest] writes the dataset again",
        )
    return values


def _as_floats(values: ArrayLike) -> NDArray[np.floating]:
    # Keep float32: sorting it is twice as fast, and it converts exactly to float64.
    array = np.asarray(values)
    if array.dtype != np.float32:
        array = array.astype(np.float64)
    return array


def split_by_class(clicked: NDArray[np.bool_], values: NDArray[np.floating]) -> ByClass:
    """Return ``values`` [n] of the clicked rows and of the others, each sorted."""
    return ByClass(np.sort(values[clicked]), np.sort(values[~clicked]))


def exact_auc(scores: ByClass) -> float:
    """Return the probability that a clicked row scores above another one, ties counting one half."""
    # Twice the count is an integer, so the AUC is rounded once, in the division.
    twice = 0
    for start in range(0, len(scores.clicked), BLOCK_ROWS):
        block = scores.clicked[start : start + BLOCK_ROWS]
        below = np.searchsorted(scores.other, block, side="left")
        below_or_tied = np.searchsorted(scores.other, block, side="right")
        twice += int(below.sum(dtype=np.int64)) + int(below_or_tied.sum(dtype=np.int64))
    return twice / (2 * len(scores.clicked) * len(scores.other))


def calibration(scores: ByClass) -> float:
    """Return the sum of predicted probabilities over the number of clicks: 1 is perfect, above 1 predicts too much."""
    predicted = _sum_blocks(sigmoid, scores.clicked) + _sum_blocks(sigmoid, scores.other)
    return predicted / len(scores.clicked)


def grouped_auc(counts: NDArray[Any], clicks: NDArray[Any]) -> float:
    """Return ``exact_auc`` of groups of rows by rising score, a group's rows being ties; 0.5 for a single class.

    ``counts``, ``clicks``: rows and clicks of each group.
    """
    others = counts - clicks
    total = float(clicks.sum()) * float(others.sum())
    if not total:
        return 0.5
    below = np.cumsum(others) - others
    return float((clicks * (below + 0.5 * others)).sum() / total)


def base_entropy(clicked: int, other: int) -> float:
    """Return the entropy (nats) of the share of clicked rows: the log loss of always predicting that share."""
    # Do not use entropy_of_rate(clicked / rows): it rounds differently, which would change the last bits of recorded
    # figures.
    rows = clicked + other
    return -(clicked * math.log(clicked / rows) + other * math.log(other / rows)) / rows


def entropy_of_rate(rate: Rate, log: Callable[[Rate], Rate], log1p: Callable[[Rate], Rate]) -> Rate:
    """Return ``base_entropy`` of a base rate, or of an array of them: with the logarithms of ``math`` or of NumPy."""
    return -(rate * log(rate) + (1 - rate) * log1p(-rate))


def sigmoid(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the probability of a click for each logit, without overflow."""
    small = np.exp(-np.abs(logits.astype(np.float64)))
    return np.where(logits >= 0, 1.0, small) / (1.0 + small)


def _sum_blocks(function: Callable[[NDArray[np.float64]], NDArray[np.float64]], values: NDArray[np.floating]) -> float:
    # Sum pairwise inside a block of the sorted values, and exactly (fsum) over the blocks.
    sums = []
    for start in range(0, len(values), BLOCK_ROWS):
        block = values[start : start + BLOCK_ROWS].astype(np.float64)
        sums.append(float(function(block).sum()))
    return math.fsum(sums)


def _weighted(
    clicked: NDArray[np.bool_], logits: NDArray[np.floating], weights: NDArray[np.floating]
) -> dict[str, float]:
    # Rows equal in all three are interchangeable, so any order of the rows gives the same three arrays.
    order = np.lexsort((weights, clicked, logits))
    y, x, w = clicked[order], logits[order].astype(np.float64), weights[order].astype(np.float64)
    total, clicks = math.fsum(w), math.fsum(w[y])
    losses = np.logaddexp(0.0, np.where(y, -x, x))
    loss = math.fsum(w * losses) / total
    entropy = float(entropy_of_rate(clicks / total, math.log, math.log1p))
    # The AUC is the weight of pairs in which the clicked row scores above the other one, ties counting one half.
    first = np.flatnonzero(np.append(True, x[1:] != x[:-1]))
    clicked_weight, other_weight = np.add.reduceat(w * y, first), np.add.reduceat(w * ~y, first)
    below = np.cumsum(other_weight) - other_weight
    pairs = (clicked_weight * (below + 0.5 * other_weight)).sum()
    return {
        "ne": loss / entropy,
        "auc": float(pairs / (clicked_weight.sum() * other_weight.sum())),
        "logloss": loss,
        "calibration": math.fsum(w * sigmoid(x)) / clicks,
    }


def reliability(
    labels: ArrayLike, logits: ArrayLike, bins: int = 20, weights: NDArray[np.floating] | None = None
) -> Curve:
    """Return a calibration plot: predicted and observed click rate of each bin of rows, by rising prediction.

    Args:
        labels: 0 or 1, [n].
        logits: The logits of the same rows, [n].
        bins: How many, of about n / ``bins`` rows each; fewer where rows have the same logit, for these share a bin.
        weights: How many rows each row counts as, [n]: means are weighted, and rows without weight are left out.

    Raises:
        DataError: For the same reasons as ``evaluate``.
    """
    if bins < 1:
        raise ValueError(f"bins is {bins}, expected at least 1")
    clicked = check_labels(labels)
    values = check_logits(logits, len(clicked))
    if weights is not None:
        return _weighted_curve(clicked[weights > 0], values[weights > 0], weights[weights > 0].astype(np.float64), bins)
    ordered, of_clicks = np.sort(values), np.sort(values[clicked])
    starts = _bin_starts(ordered, bins)
    rows = np.diff(np.append(starts, len(ordered)))
    predicted = np.add.reduceat(sigmoid(ordered), starts) / rows
    # Equal logits share a bin, so a bin has the clicks from its first logit to that of the next one.
    clicks_before = np.searchsorted(of_clicks, ordered[starts], side="left")
    observed = np.diff(np.append(clicks_before, len(of_clicks))) / rows
    return Curve(predicted=predicted.tolist(), observed=observed.tolist(), rows=rows.tolist())


def _weighted_curve(
    clicked: NDArray[np.bool_], values: NDArray[np.floating], weights: NDArray[np.float64], bins: int
) -> Curve:
    order = np.lexsort((weights, clicked, values))
    values, clicked, weights = values[order], clicked[order], weights[order]
    starts = _bin_starts(values, bins)
    totals = np.add.reduceat(weights, starts)
    predicted = np.add.reduceat(weights * sigmoid(values), starts) / totals
    observed = np.add.reduceat(weights * clicked, starts) / totals
    rows = np.diff(np.append(starts, len(values)))
    return Curve(predicted=predicted.tolist(), observed=observed.tolist(), rows=rows.tolist())


def _bin_starts(values: np.ndarray, bins: int) -> np.ndarray:
    # Return the first index of each bin of sorted ``values``. Bins are equal, except that their starts move back to the
    # first of a run of equal values.
    count = min(bins, len(values))
    cuts = np.arange(count) * len(values) // count
    return np.unique(np.searchsorted(values, values[cuts], side="left"))


def evaluate_numbers(labels: Floats, predictions: Floats, weights: Floats | None = None) -> dict[str, float]:
    """Return the figures of numbers: counts, or values.

    Args:
        labels: The numbers, [n].
        predictions: The predictions of the same rows, [n].
        weights: How many rows each row counts as, [n]; None: one.

    Returns:
        ``samples``, ``rmse``, ``calibration`` (sum of predictions / sum of labels; NaN where the labels add up to 0)
        and ``unexplained``: the mean square error over the variance of the labels, 1 for always predicting their mean;
        below it is better, as with NE. NaN where all labels are equal.

    Raises:
        DataError: Predictions are not finite.
    """
    not_finite = int((~np.isfinite(predictions)).sum())
    if not_finite:
        raise DataError(
            f"{not_finite:,} of {len(labels):,} predictions are not finite: the model diverged",
            hint="train again with lower rates (train.lr=0.0005 train.sparse_lr=0.01) or train.precision=fp32",
        )
    y, p, w = labels.astype(np.float64), predictions.astype(np.float64), fill_weights(labels, weights)
    # ``fsum`` rounds only once, so the order of the rows does not matter, and they need not be sorted.
    total = math.fsum(w)
    mean = math.fsum(w * y) / total
    square, variance = math.fsum(w * (p - y) ** 2) / total, math.fsum(w * (y - mean) ** 2) / total
    figures = {"samples": len(y), "rmse": math.sqrt(square), "calibration": math.nan, "unexplained": math.nan}
    if mean:
        figures["calibration"] = math.fsum(w * p) / (mean * total)
    if variance:
        figures["unexplained"] = square / variance
    return figures


def known_rows(labels: Floats, kind: str, weights: Floats | None = None) -> NDArray[np.bool_]:
    """Mark the rows [n] with a label; none if those with a weight allow no figures: a single class, or no label."""
    known = ~np.isnan(labels)
    counted = known
    if weights is not None:
        counted = known & (weights > 0)
    values = labels[counted]
    if not len(values) or (LABEL_KINDS.get(kind).classes and values.min() == values.max()):
        return np.zeros(len(labels), bool)
    # Rows of weight 0 stay marked: they add nothing to sums, but ``samples`` counts rows.
    return known


def evaluate_tasks(
    tasks: Sequence[TaskColumn], labels: Mapping[str, Floats], logits: Floats, weights: Floats | None = None
) -> dict[str, TaskFigures]:
    """Return the figures of each further task; of one without rows that allow some, ``samples`` alone.

    Args:
        tasks: The further tasks, in the order of their logits.
        labels: The labels of each task, [n]; NaN if missing.
        logits: The logits of all tasks, [n, T]; the main task's come first.
        weights: How many rows each row counts as, [n]; None: one.
    """
    figures = {}
    for place, task in enumerate(tasks, start=1):
        known = known_rows(labels[task.name], task.kind, weights)
        if not known.any():
            figures[task.name] = TaskFigures(kind=task.kind, samples=0)
            continue
        row_weights = weights[known] if weights is not None else None
        measured = LABEL_KINDS.get(task.kind).figures(labels[task.name][known], logits[known, place], row_weights)
        # JSON has no NaN, so leave out undefined figures.
        defined = {name: value for name, value in measured.items() if not math.isnan(value)}
        figures[task.name] = TaskFigures(kind=task.kind, **defined)  # type: ignore[arg-type]
    return figures


def counted_for(
    weights: NDArray[np.floating], labels: NDArray[np.floating], rates: NDArray[np.floating]
) -> NDArray[np.float32]:
    """Return how many rows of the whole log each row stands for, [n].

    Args:
        weights: The rows' weights, [n].
        labels: 0 or 1, [n].
        rates: Share of the rows without a click that were kept, [n]; those with a click were all kept.
    """
    return np.where(labels > 0, weights, weights / rates).astype(np.float32)


BINS = 10
HISTOGRAM_BINS = 24


def population_stability(expected: NDArray[np.floating], actual: NDArray[np.floating], bins: int = BINS) -> float:
    """Return the PSI: the sum of (f - e) * ln(f / e) over bins that hold equal shares of ``expected``.

    Args:
        expected: Predictions [n], or logits: any rising function of them gives the same bins.
        actual: Predictions [m] of the same kind.
        bins: How many; fewer where values repeat.

    Returns:
        0 for equal shares; 0.25 is called a major shift.
    """
    edges = np.unique(np.quantile(expected, np.linspace(0, 1, bins + 1)[1:-1]))
    shares = []
    for values in (expected, actual):
        # Add half a row to each bin, so that an empty one costs much, but not infinity.
        counts = np.bincount(np.searchsorted(edges, values, "right"), minlength=len(edges) + 1) + 0.5
        shares.append(counts / counts.sum())
    e, f = shares
    return float(((f - e) * np.log(f / e)).sum())


def kolmogorov_smirnov(one: NDArray[np.floating], other: NDArray[np.floating]) -> float:
    """Return the largest gap between the distribution functions of two samples, in [0, 1]."""
    first, second = np.sort(one), np.sort(other)
    points = np.concatenate([first, second])
    gaps = np.searchsorted(first, points, "right") / len(first) - np.searchsorted(second, points, "right") / len(second)
    return float(np.abs(gaps).max())


def histogram(logits: Mapping[str, NDArray[np.floating]], bins: int = HISTOGRAM_BINS) -> Histogram:
    """Return shares of rows by predicted probability, in ``bins`` equal steps up to the largest of all models."""
    probabilities = {name: sigmoid(values) for name, values in logits.items()}
    # Click rates are small: with steps up to 1, nearly all rows would lie in the first bins.
    top = max(float(values.max()) for values in probabilities.values()) or 1.0
    edges = np.linspace(0, top, bins + 1)
    shares = {}
    for name, values in probabilities.items():
        shares[name] = (np.histogram(values, edges)[0] / len(values)).tolist()
    return Histogram(edges=edges.tolist(), **shares)


def calibration_by_prediction(curve: Curve) -> tuple[float, float]:
    """Return how far bins of predictions are off their observed clicks, and the standard error of that.

    Labels that were mixed up show here while predicted and observed clicks still agree in total.

    Args:
        curve: What ``reliability`` returns.

    Returns:
        Shares of all clicks: 0 is as good as calibrated. Both are NaN without clicks.
    """
    predicted, observed = np.asarray(curve.predicted, np.float64), np.asarray(curve.observed, np.float64)
    rows = np.asarray(curve.rows, np.float64)
    clicks = float((observed * rows).sum())
    if not clicks:
        return math.nan, math.nan
    gaps = float((np.abs(predicted - observed) * rows).sum())
    # Subtract the gap that chance alone leaves, each bin being binomial.
    chance = float(np.sqrt(2 / math.pi * rows * predicted * (1 - predicted)).sum())
    # Use the observed or the predicted rate, whichever varies more: a bin without clicks has chance errors, too.
    variance = rows * np.maximum(predicted * (1 - predicted), observed * (1 - observed))
    return max(0.0, gaps - chance) / clicks, float(np.sqrt(variance.sum())) / clicks


def compute_ne(logits: Floats, labels: Floats, weights: Floats | None = None) -> float:
    """Compute NE of ``logits`` [n] for ``labels`` [n] of both classes that count ``weights`` [n] times (None: once)."""
    exact, counted = logits.astype(np.float64), fill_weights(labels, weights)
    loss = (np.logaddexp(0.0, exact) - labels * exact) @ counted / counted.sum()
    rate = float(labels @ counted / counted.sum())
    return float(loss / entropy_of_rate(rate, np.log, np.log1p))


def fill_weights(labels: Floats, weights: Floats | None) -> NDArray[np.float64]:
    """Return how many rows each of ``labels`` [n] counts as: ``weights`` in float64, or ones."""
    if weights is None:
        return np.ones(len(labels))
    return weights.astype(np.float64)


def compute_member_shares(weights: Floats, tasks: int) -> NDArray[np.float64]:
    """Compute what the logits of members with fitted ``weights`` count.

    Args:
        weights: Fitted to the main task, [m].
        tasks: Further tasks, in which members count as in the main one.

    Returns:
        [m], or [m, 1 + tasks] with ``tasks``.
    """
    own = np.asarray(weights, np.float64)
    if not tasks:
        return own
    return np.column_stack([own, np.full((len(own), tasks), 1.0 / len(own))])
