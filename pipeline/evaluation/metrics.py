"""NE, AUC, log loss and calibration over all evaluated rows, in float64, exact and independent of row order.

Every figure is computed from two sorted arrays, the logits of the clicked rows and those of the others. Two
orders of the same rows give the same two arrays, so they give the same bits, whatever the world size was.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipeline.errors import DataError

# Rows worked on at a time: keeps the float64 temporaries at 8 MiB each however many rows there are.
BLOCK_ROWS = 1 << 20
# float32 cannot tell a probability closer to one than this from certainty.
NEAREST_TO_ONE = 1.0 - 2.0**-25
NEAREST_TO_ZERO = float(np.finfo(np.float32).tiny)
Rate = TypeVar("Rate", float, NDArray[np.float64])


@dataclass(frozen=True)
class ByClass:
    """Values of the rows, ascending, split by label: ``clicked`` has label 1, ``other`` label 0."""

    clicked: NDArray[np.floating]
    other: NDArray[np.floating]

    @property
    def rows(self) -> int:
        """Rows of both classes."""
        return len(self.clicked) + len(self.other)


def evaluate(
    labels: ArrayLike,
    logits: ArrayLike,
    true_probability: ArrayLike | None = None,
    weights: NDArray[np.floating] | None = None,
) -> dict[str, float]:
    """The figures of ``result.json``'s ``eval`` part.

    ``labels`` [n] of 0 and 1, ``logits`` [n], ``true_probability`` [n] in [0, 1] or None. Returns ``samples``,
    ``ne`` (log loss / entropy of these rows' base rate; He et al. 2014, section 2), ``auc`` (Mann-Whitney, a tie
    counts one half), ``logloss`` (nats per row), ``calibration`` (sum of predicted / sum of observed clicks) and,
    with ``true_probability``, ``bayes_ne``: the NE of a model that knows it. With ``weights`` [n] a row counts as that
    many, and there is no ``bayes_ne``. Raises DataError where there are no rows, one class only (rows of weight 0
    apart), labels other than 0 and 1, or logits that are not finite.
    """
    clicked = check_labels(labels)
    values = check_logits(logits, len(clicked))
    if weights is not None:
        _check_weights(clicked, weights)
        return {"samples": len(clicked), **_weighted(clicked, values, weights)}
    scores = split_by_class(clicked, values)
    entropy, loss = base_entropy(len(scores.clicked), len(scores.other)), mean_log_loss(scores)
    figures: dict[str, float] = {
        "samples": scores.rows,
        "ne": loss / entropy,
        "auc": exact_auc(scores),
        "logloss": loss,
        "calibration": calibration(scores),
    }
    if true_probability is not None:
        truth = split_by_class(clicked, _check_probabilities(true_probability, len(clicked)))
        figures["bayes_ne"] = _mean_loss_of_probabilities(truth) / entropy
    return figures


def check_labels(labels: ArrayLike) -> NDArray[np.bool_]:
    """``labels`` as booleans; DataError for no rows, values other than 0 and 1, or a single class."""
    values = np.asarray(labels)
    if values.ndim != 1:
        raise ValueError(f"labels have shape {values.shape}, expected one dimension")
    if not len(values):
        raise DataError("there are no rows to evaluate", hint="data.split.test_share=0.2 keeps one row in five for it")
    clicked = values == 1
    wrong = ~(clicked | (values == 0))
    if wrong.any():
        raise DataError(
            f"{_of(wrong.sum(), len(values))} labels are neither 0 nor 1, the first is {values[wrong][0]}",
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
    kept = clicked[weights > 0]
    clicks = int(kept.sum())
    if clicks in (0, len(kept)):
        labels = f", and all of these have label {int(clicks > 0)}" if len(kept) else ""
        raise DataError(
            f"{_of(len(kept), len(clicked))} evaluated rows have a weight above 0{labels}, expected both classes: NE "
            "and AUC are not defined for one class only",
            hint="logs in which the column of data.weight is above 0 for rows of both classes, or data.weight=null",
        )


def check_logits(logits: ArrayLike, rows: int) -> NDArray[np.floating]:
    """``logits`` as float32 or float64 of ``rows`` finite values; DataError says how many are not."""
    values = _as_floats(logits)
    if values.shape != (rows,):
        raise ValueError(f"logits have shape {values.shape}, expected ({rows},) as the labels")
    finite = np.isfinite(values)
    if not finite.all():
        nan = int(np.isnan(values).sum())
        bad = rows - int(finite.sum())
        raise DataError(
            f"{_of(bad, rows)} logits are not finite ({nan:,} NaN, {bad - nan:,} infinite): the model diverged",
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
            f"{_of(wrong.sum(), rows)} true probabilities lie outside [0, 1], the first is {values[wrong][0]}",
            hint="force=true stages=[ingest] writes the dataset again",
        )
    return values


def _as_floats(values: ArrayLike) -> NDArray[np.floating]:
    """float32 stays as it is (sorting it is twice as fast, and float64 of it is exact); all else becomes float64."""
    array = np.asarray(values)
    return array if array.dtype == np.float32 else array.astype(np.float64)


def _of(some: int, rows: int) -> str:
    return f"{some:,} of {rows:,}"


def split_by_class(clicked: NDArray[np.bool_], values: NDArray[np.floating]) -> ByClass:
    """``values`` [n] of the clicked rows and of the others, each sorted."""
    return ByClass(np.sort(values[clicked]), np.sort(values[~clicked]))


def exact_auc(scores: ByClass) -> float:
    """Probability that a clicked row scores above another one, ties counting one half: an integer count, divided."""
    twice = 0
    for start in range(0, len(scores.clicked), BLOCK_ROWS):
        block = scores.clicked[start : start + BLOCK_ROWS]
        below = np.searchsorted(scores.other, block, side="left")
        below_or_tied = np.searchsorted(scores.other, block, side="right")
        twice += int(below.sum(dtype=np.int64)) + int(below_or_tied.sum(dtype=np.int64))
    return twice / (2 * len(scores.clicked) * len(scores.other))


def mean_log_loss(scores: ByClass) -> float:
    """Mean of log(1 + exp(-x)) over clicked and log(1 + exp(x)) over other rows, in nats."""
    clicked = _sum_blocks(lambda x: np.logaddexp(0.0, -x), scores.clicked)
    other = _sum_blocks(lambda x: np.logaddexp(0.0, x), scores.other)
    return (clicked + other) / scores.rows


def calibration(scores: ByClass) -> float:
    """Sum of predicted probabilities over the number of clicks; 1 is perfect, above 1 predicts too much."""
    predicted = _sum_blocks(sigmoid, scores.clicked) + _sum_blocks(sigmoid, scores.other)
    return predicted / len(scores.clicked)


def grouped_auc(counts: NDArray[Any], clicks: NDArray[Any]) -> float:
    """``exact_auc`` of groups of ``counts`` rows by rising score, a group's rows being ties; 0.5 for a single class."""
    others = counts - clicks
    total = float(clicks.sum()) * float(others.sum())
    if not total:
        return 0.5
    below = np.cumsum(others) - others
    return float((clicks * (below + 0.5 * others)).sum() / total)


def base_entropy(clicked: int, other: int) -> float:
    """Entropy (nats) of the share of clicked rows: the log loss of always predicting that share.

    Not ``entropy_of_rate(clicked / rows)``: it rounds otherwise, and both have given the last bits of recorded figures.
    """
    rows = clicked + other
    return -(clicked * math.log(clicked / rows) + other * math.log(other / rows)) / rows


def entropy_of_rate(rate: Rate, log: Callable[[Rate], Rate], log1p: Callable[[Rate], Rate]) -> Rate:
    """``base_entropy`` of a base rate, or of an array of them: with the logarithms of ``math`` or of NumPy."""
    return -(rate * log(rate) + (1 - rate) * log1p(-rate))


def sigmoid(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Probability of a click for each logit, without overflow."""
    small = np.exp(-np.abs(logits.astype(np.float64)))
    return np.where(logits >= 0, 1.0, small) / (1.0 + small)


def _mean_loss_of_probabilities(truth: ByClass) -> float:
    clicked = _sum_blocks(lambda p: -np.log(np.maximum(p, NEAREST_TO_ZERO)), truth.clicked)
    other = _sum_blocks(lambda p: -np.log1p(-np.minimum(p, NEAREST_TO_ONE)), truth.other)
    return (clicked + other) / truth.rows


def _sum_blocks(function: Callable[[NDArray[np.float64]], NDArray[np.float64]], values: NDArray[np.floating]) -> float:
    """Sum of ``function`` over sorted ``values``: pairwise inside a block, exact (fsum) over the blocks."""
    starts = range(0, len(values), BLOCK_ROWS)
    return math.fsum(float(function(values[i : i + BLOCK_ROWS].astype(np.float64)).sum()) for i in starts)


def _weighted(
    clicked: NDArray[np.bool_], logits: NDArray[np.floating], weights: NDArray[np.floating]
) -> dict[str, float]:
    """``ne``, ``auc``, ``logloss`` and ``calibration`` of rows [n], each of which counts as ``weights`` rows."""
    order = np.lexsort((weights, clicked, logits))  # rows that are equal in all three are alike
    y, x, w = clicked[order], logits[order].astype(np.float64), weights[order].astype(np.float64)
    total, clicks = math.fsum(w), math.fsum(w[y])
    losses = np.logaddexp(0.0, np.where(y, -x, x))
    loss = math.fsum(w * losses) / total
    entropy = float(entropy_of_rate(clicks / total, math.log, math.log1p))
    return {
        "ne": loss / entropy,
        "auc": _weighted_auc(y, x, w),
        "logloss": loss,
        "calibration": math.fsum(w * sigmoid(x)) / clicks,
    }


def _weighted_auc(clicked: NDArray[np.bool_], ordered: NDArray[np.floating], weights: NDArray[np.floating]) -> float:
    """The weight of pairs of a clicked row above another one, ties counting one half; rows by rising score."""
    first = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    clicks, others = (np.add.reduceat(weights * side, first) for side in (clicked, ~clicked))
    below = np.cumsum(others) - others
    return float((clicks * (below + 0.5 * others)).sum() / (clicks.sum() * others.sum()))
