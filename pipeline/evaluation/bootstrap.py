"""Paired bootstrap of NE, AUC and calibration: Poisson weights on blocks of rows, all replicates as one product.

The rows are cut into blocks that follow each other, so that rows which belong together (a session, an hour) are drawn
together. Of every block only six sums are kept; a replicate weighs the blocks with Poisson(1) draws (Chamandy et al.,
"Estimating Uncertainty for Massive Data Streams", 2012). Models and slices share the draws, so differences are paired.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipeline.evaluation.metrics import entropy_of_rate, fill_weights, sigmoid
from pipeline.records.gate import Interval

FIGURES = ("ne", "auc", "calibration")
# Columns of a block's sums.
SUMS = ("rows", "clicks", "loss", "predicted", "above", "below")
# The intervals of an evaluation use the gate's defaults.
CONFIDENCE, REPLICATES, BLOCKS = 0.95, 400, 1000
# The least number of blocks with rows of the rarer class. With fewer, replicates often draw none of them, and their
# spread says little.
FEWEST = 30
# The number of blocks of ``loss_parts``.
LOSS_PARTS = 100


@dataclass(frozen=True)
class Resampled:
    """A figure of all rows (``point``) and of each replicate, float64 [R]."""

    point: float
    replicates: NDArray[np.float64]

    def interval(self, confidence: float, tests: int = 1) -> Interval:
        """Return point -+ z * standard error of the replicates; ``tests`` intervals hold together (Bonferroni)."""
        z = NormalDist().inv_cdf(1 - (1 - confidence) / (2 * tests))
        spread, drawn = np.nan, self.replicates[~np.isnan(self.replicates)]
        # If no replicate has the figure, or one is infinite, nothing is known of the spread, and NumPy would warn.
        if len(drawn) and np.isfinite(drawn).all():
            spread = z * float(np.nanstd(self.replicates))
        return Interval(self.point, self.point - spread, self.point + spread)


def block_of_rows(rows: int, blocks: int) -> NDArray[np.int64]:
    """Return the block of each row, [rows]: ``blocks`` of them (fewer if there are fewer rows), equal, in order."""
    return np.arange(rows, dtype=np.int64) * min(blocks, rows) // max(rows, 1)


def poisson_weights(replicates: int, blocks: int, seed: int) -> NDArray[np.float64]:
    """Return how often each replicate draws each block, [replicates, blocks]."""
    return np.random.Generator(np.random.PCG64(seed)).poisson(1.0, (replicates, blocks)).astype(np.float64)


def block_sums(
    clicked: NDArray[np.bool_],
    logits: NDArray[np.floating],
    blocks: NDArray[np.int64],
    count: int,
    row_weights: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Sum up the rows of each block: all that a replicate needs of them.

    Args:
        clicked: Whether each row was clicked, [n].
        logits: The logits of the same rows, [n].
        blocks: The block of each row, [n].
        count: The number of blocks.
        row_weights: How many rows each row counts as, [n]; None: one.

    Returns:
        The columns ``SUMS`` of each block, [count, 6]. ``above``: summed over clicked rows, the share of other rows
        that score lower, ties one half; ``below``: summed over other rows, the share of clicked rows that score
        higher. The means of both are the AUC (DeLong et al. 1988).
    """
    values = logits.astype(np.float64, copy=False)

    def add_up(column: NDArray[np.float64]) -> NDArray[Any]:
        if row_weights is not None:
            column = row_weights * column
        return np.bincount(blocks, column, minlength=count)

    # Add one column at a time, since each is as large as the logits.
    totals = [add_up(np.ones(len(values))), add_up(clicked.astype(np.float64))]
    totals.append(add_up(np.logaddexp(0.0, np.where(clicked, -values, values))))
    totals.append(add_up(sigmoid(values)))
    totals += map(add_up, placements(clicked, values, row_weights))
    return np.stack(totals, axis=1)


def placements(
    clicked: NDArray[np.bool_], values: NDArray[np.float64], row_weights: NDArray[np.float64] | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return of each clicked row the share of others below it, and of each other row the share of clicked ones above.

    [n] each, 0 for the rows of the other class; both 0 if a class is empty. With ``row_weights`` [n], shares of
    weight instead of rows.
    """
    weights = row_weights if row_weights is not None else np.ones(len(values))
    if not weights[clicked].any() or not weights[~clicked].any():
        return np.zeros(len(values)), np.zeros(len(values))
    # Use one sort and running sums: a search of each value among sorted ones would miss the cache at every step. Sums
    # of weights depend on the order of equal values, but sums of rows do not, and an unstable sort is faster.
    order = np.argsort(values, kind="quicksort" if row_weights is None else "stable")
    ranked, is_clicked = values[order], clicked[order]
    first = np.flatnonzero(np.append(True, ranked[1:] != ranked[:-1]))
    del ranked
    weights = weights[order]
    above = _lower_share(np.where(is_clicked, 0.0, weights), first)
    below = 1 - _lower_share(np.where(is_clicked, weights, 0.0), first)
    placed = np.empty(len(values))
    placed[order] = np.where(is_clicked, above, below)
    return np.where(clicked, placed, 0.0), np.where(clicked, 0.0, placed)


def _lower_share(weights: NDArray[np.float64], first: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the share of ``weights`` [n] of lower rows, ties one half; rows are ties from ``first`` to the next."""
    running = np.append(0.0, np.cumsum(weights))
    last = np.append(first[1:], len(weights))
    shares = (running[first] + running[last]) / (2.0 * running[-1])
    return np.repeat(shares, last - first)


def resample(sums: NDArray[np.float64], weights: NDArray[np.float64]) -> dict[str, Resampled]:
    """Return the figures of the rows summed in ``sums`` [K, 6], with a replicate for each row of ``weights`` [R, K]."""
    total = sums.sum(0)
    auc = float("nan")
    if total[1]:
        auc = float(total[4] / total[1])
    # The point estimates are those of a replicate that draws every block once.
    points = _figures(total[None], auc)
    drawn = _figures(weights @ sums, auc)
    return {name: Resampled(float(points[name][0]), drawn[name]) for name in FIGURES}


def _figures(totals: NDArray[np.float64], auc: float) -> dict[str, NDArray[np.float64]]:
    rows, clicks, loss, predicted, above, below = totals.T
    # The AUC's replicates are first-order (Hajek's projection), because its sums weigh rows and not pairs. Figures of a
    # replicate that draws no row, or only one class, are NaN or infinite.
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
        logits: The logits of the same rows, [n].
        weights: How many rows each row counts as, [n]; None: one.

    Returns:
        ``ne_interval`` and ``auc_interval``; nothing if rows of one class lie in fewer than ``FEWEST``
        of the blocks that are drawn, because they are few or follow each other.
    """
    clicked = np.asarray(labels) == 1
    counted = np.ones(len(clicked), np.bool_)
    row_weights = None
    if weights is not None:
        counted, row_weights = np.asarray(weights) > 0, weights.astype(np.float64)
    blocks, count = block_of_rows(len(clicked), BLOCKS), min(BLOCKS, len(clicked))
    # With clicks in too few blocks the interval would be too narrow, which is worse than none.
    for of_class in (counted & clicked, counted & ~clicked):
        if np.count_nonzero(np.bincount(blocks[of_class], minlength=count)) < FEWEST:
            return {}
    sums = block_sums(clicked, logits, blocks, count, row_weights)
    drawn = resample(sums, poisson_weights(REPLICATES, count, seed=0))
    ne, auc = drawn["ne"].interval(CONFIDENCE), drawn["auc"].interval(CONFIDENCE)
    if not np.isfinite([ne.low, ne.high, auc.low, auc.high]).all():
        return {}
    return {"ne_interval": (max(ne.low, 0.0), ne.high), "auc_interval": (max(auc.low, 0.0), min(auc.high, 1.0))}


def ratio(candidate: Resampled, other: Resampled) -> Resampled:
    """Return candidate / other - 1, replicate by replicate."""
    return Resampled(candidate.point / other.point - 1, candidate.replicates / other.replicates - 1)


def difference(candidate: Resampled, other: Resampled) -> Resampled:
    """Return candidate - other, replicate by replicate."""
    return Resampled(candidate.point - other.point, candidate.replicates - other.replicates)


def loss_parts(
    labels: NDArray[np.floating], logits: NDArray[np.floating], weights: NDArray[np.floating] | None = None
) -> list[float]:
    """Return what each block of consecutive rows adds to the mean log loss, in nats per row.

    The parts of two models tell later whether their NE differ by chance (``tuning.study_store``).

    Args:
        labels: 0 or 1, [n].
        logits: The logits of the same rows, [n].
        weights: How many rows each row counts as, [n]; None: one.

    Returns:
        ``LOSS_PARTS`` parts; fewer if there are fewer rows.
    """
    values, clicked, counted = logits.astype(np.float64), labels == 1, fill_weights(labels, weights)
    loss = np.logaddexp(0.0, np.where(clicked, -values, values)) * counted / counted.sum()
    parts: list[float] = np.bincount(block_of_rows(len(values), LOSS_PARTS), loss).tolist()
    return parts
