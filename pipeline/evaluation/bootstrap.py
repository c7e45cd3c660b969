"""Paired bootstrap of NE, AUC and calibration: Poisson weights on blocks of rows, all replicates as one product.

The rows are cut into blocks that follow each other, so that rows which belong together (a session, an hour) are drawn
together. Of every block only six sums are kept; a replicate weighs the blocks with Poisson(1) draws (Chamandy et al.,
"Estimating Uncertainty for Massive Data Streams", 2012). Models and slices share the draws, so differences are paired.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipeline.evaluation.metrics import entropy_of_rate, sigmoid, split_by_class
from pipeline.records.gate import Interval

FIGURES = ("ne", "auc", "calibration")
# Columns of a block's sums.
SUMS = ("rows", "clicks", "loss", "predicted", "above", "below")
# Of the intervals of an evaluation: what the gate's are by default.
CONFIDENCE, REPLICATES, BLOCKS = 0.95, 400, 1000
# Blocks with rows of the rarer class: with fewer, replicates often draw none of them, and their spread says little.
FEWEST = 30
LOSS_PARTS = 100  # blocks of ``loss_parts``


@dataclass(frozen=True)
class Resampled:
    """A figure of all rows (``point``) and of each replicate, float64 [R]."""

    point: float
    replicates: NDArray[np.float64]

    def interval(self, confidence: float, tests: int = 1) -> Interval:
        """point -+ z * standard error of the replicates; ``tests``: intervals that shall hold together (Bonferroni)."""
        z = NormalDist().inv_cdf(1 - (1 - confidence) / (2 * tests))
        spread = z * float(np.nanstd(self.replicates))
        return Interval(self.point, self.point - spread, self.point + spread)


def block_of_rows(rows: int, blocks: int) -> NDArray[np.int64]:
    """The block [rows] of every row: ``blocks`` of them (fewer where there are fewer rows), equal and in order."""
    return np.arange(rows, dtype=np.int64) * min(blocks, rows) // max(rows, 1)


def poisson_weights(replicates: int, blocks: int, seed: int) -> NDArray[np.float64]:
    """How often each replicate draws each block: [replicates, blocks]."""
    return np.random.Generator(np.random.PCG64(seed)).poisson(1.0, (replicates, blocks)).astype(np.float64)


def block_sums(
    clicked: NDArray[np.bool_],
    logits: NDArray[np.floating],
    blocks: NDArray[np.int64],
    count: int,
    own: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Sums (``SUMS``) of the rows of each of ``count`` blocks: [count, 6]; each row times its weight in ``own``.

    ``above``: of the clicked rows the share of other rows that score lower, ties one half; ``below``: of the other rows
    the share of clicked ones that score higher. Their means are both the AUC (DeLong et al. 1988).
    """
    values = logits.astype(np.float64)
    loss = np.logaddexp(0.0, np.where(clicked, -values, values))
    above, below = placements(clicked, values, own)
    columns = (np.ones(len(values)), clicked.astype(np.float64), loss, sigmoid(values), above, below)
    if own is not None:
        columns = tuple(own * column for column in columns)  # type: ignore[assignment]
    return np.stack([np.bincount(blocks, column, minlength=count) for column in columns], axis=1)


def placements(
    clicked: NDArray[np.bool_], values: NDArray[np.float64], own: NDArray[np.float64] | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of each clicked row the share of others below it, and of each other row the share of clicked ones above it.

    [n] each, 0 for the rows of the other class; both 0 where a class is empty. ``own``: weights of the rows that are
    shared out.
    """
    if own is not None:
        return _weighted_placements(clicked, values, own)
    scores = split_by_class(clicked, values)
    above, below = np.zeros(len(values)), np.zeros(len(values))
    if len(scores.clicked) and len(scores.other):
        above[clicked] = _lower_share(scores.other, values[clicked])
        below[~clicked] = 1 - _lower_share(scores.clicked, values[~clicked])
    return above, below


def _weighted_placements(
    clicked: NDArray[np.bool_], values: NDArray[np.float64], own: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    above, below = np.zeros(len(values)), np.zeros(len(values))
    if own[clicked].sum() and own[~clicked].sum():
        above[clicked] = _lower_weight(values[~clicked], own[~clicked], values[clicked])
        below[~clicked] = 1 - _lower_weight(values[clicked], own[clicked], values[~clicked])
    return above, below


def _lower_weight(
    ranked: NDArray[np.float64], own: NDArray[np.float64], values: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The share of the weight of ``ranked`` below each of ``values``, ties one half."""
    order = np.argsort(ranked, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(own[order])])
    lower, ties = (np.searchsorted(ranked[order], values, side) for side in ("left", "right"))  # type: ignore[call-overload]
    return np.asarray((sums[lower] + sums[ties]) / (2.0 * sums[-1]))


def _lower_share(ranked: NDArray[np.floating], values: NDArray[np.float64]) -> NDArray[np.float64]:
    lower, ties = np.searchsorted(ranked, values, "left"), np.searchsorted(ranked, values, "right")
    return np.asarray((lower + ties) / (2.0 * len(ranked)))


def resample(sums: NDArray[np.float64], weights: NDArray[np.float64]) -> dict[str, Resampled]:
    """The figures of the rows behind ``sums`` [K, 6], with a replicate for each row of ``weights`` [R, K].

    The AUC's replicates are first-order (Hajek's projection): its sums weigh rows, not pairs.
    """
    total = sums.sum(0)
    auc = float(total[4] / total[1]) if total[1] else float("nan")
    points, drawn = _figures(total[None], auc), _figures(weights @ sums, auc)
    return {name: Resampled(float(points[name][0]), drawn[name]) for name in FIGURES}


def _figures(totals: NDArray[np.float64], auc: float) -> dict[str, NDArray[np.float64]]:
    rows, clicks, loss, predicted, above, below = totals.T
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "ne": loss / rows / entropy_of_rate(clicks / rows, np.log, np.log1p),
            "auc": above / clicks + below / (rows - clicks) - auc,
            "calibration": predicted / clicks,
        }


def evaluation_intervals(
    labels: ArrayLike, logits: NDArray[np.floating], weights: NDArray[np.floating] | None = None
) -> dict[str, tuple[float, float]]:
    """Return the ends of the 95 % intervals of a model's NE and AUC.

    Args:
        labels: 0 or 1 of each row, [n], in the order of the log: rows that follow each other are drawn together.
        logits: Of the same rows, [n].
        weights: How many rows each row counts as, [n]; None: one.

    Returns:
        ``ne_interval`` and ``auc_interval``; nothing where rows of one class lie in fewer than ``FEWEST``
        of the blocks that are drawn, because they are few or follow each other.
    """
    clicked = np.asarray(labels) == 1
    counted = np.ones(len(clicked), np.bool_) if weights is None else np.asarray(weights) > 0
    blocks, count = block_of_rows(len(clicked), BLOCKS), min(BLOCKS, len(clicked))
    for own in (counted & clicked, counted & ~clicked):
        if np.count_nonzero(np.bincount(blocks[own], minlength=count)) < FEWEST:
            return {}
    sums = block_sums(clicked, logits, blocks, count, None if weights is None else weights.astype(np.float64))
    drawn = resample(sums, poisson_weights(REPLICATES, count, seed=0))
    ne, auc = drawn["ne"].interval(CONFIDENCE), drawn["auc"].interval(CONFIDENCE)
    if not np.isfinite([ne.low, ne.high, auc.low, auc.high]).all():
        return {}
    return {"ne_interval": (max(ne.low, 0.0), ne.high), "auc_interval": (max(auc.low, 0.0), min(auc.high, 1.0))}


def ratio(ours: Resampled, theirs: Resampled) -> Resampled:
    """ours / theirs - 1, replicate by replicate."""
    return Resampled(ours.point / theirs.point - 1, ours.replicates / theirs.replicates - 1)


def difference(ours: Resampled, theirs: Resampled) -> Resampled:
    """ours - theirs, replicate by replicate."""
    return Resampled(ours.point - theirs.point, ours.replicates - theirs.replicates)


def loss_parts(
    labels: NDArray[np.floating], logits: NDArray[np.floating], weights: NDArray[np.floating] | None = None
) -> list[float]:
    """What each of ``LOSS_PARTS`` blocks of rows, one behind the other, adds to the mean log loss (nats per row).

    With them of two models one can tell later whether their NE differ by chance (``tuning.significance``).
    ``labels``, ``logits`` and ``weights`` (None: 1 each) [n]; fewer parts where there are fewer rows.
    """
    values, clicked = logits.astype(np.float64), labels == 1
    counted = np.ones(len(values)) if weights is None else weights.astype(np.float64)
    loss = np.logaddexp(0.0, np.where(clicked, -values, values)) * counted / counted.sum()
    parts: list[float] = np.bincount(block_of_rows(len(values), LOSS_PARTS), loss).tolist()
    return parts
