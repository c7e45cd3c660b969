"""A quantile sketch that merges exactly: counts of values by bucket, the first 16 bits of a float32.

That is 128 buckets an octave (values within 0.8 %, whole numbers up to 256 apart), 65,536 in all, so adding a block is
one pass without sorting, and what comes out depends neither on the order of rows nor on how they were cut. Rows of
the positive class are counted too: they tell how well a value alone predicts the label.
"""

from __future__ import annotations

import numpy as np

BUCKETS = 1 << 16
_HALF = 1 << 15


def lower_edges() -> np.ndarray:
    """The lowest value of every bucket: float64 [BUCKETS]; those of no number are NaN or infinite."""
    order = np.arange(BUCKETS, dtype=np.int64)
    negative = order < _HALF
    keys = np.where(negative, BUCKETS - 1 - order, order - _HALF).astype(np.uint32) << np.uint32(16)
    # Of negative values the bucket's lowest has the largest magnitude.
    edges = np.where(negative, keys | np.uint32(0xFFFF), keys).astype(np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        return edges.astype(np.float64)


class Sketch:
    """Counts of finite values by bucket; ``positives``: of those with label 1."""

    def __init__(self) -> None:
        self.counts = np.zeros(BUCKETS, np.int64)
        self.positives = np.zeros(BUCKETS, np.int64)

    def add(self, values: np.ndarray, labels: np.ndarray) -> None:
        """Count ``values`` (NaN: missing, not counted) with their ``labels``."""
        keep = np.isfinite(values)
        if not keep.all():
            values, labels = values[keep], labels[keep]
        bits = (values.astype(np.float32) + np.float32(0.0)).view(np.uint32) >> np.uint32(16)  # -0 counts as 0
        bits += (labels > 0).astype(np.uint32) << np.uint32(16)
        found = np.bincount(bits, minlength=2 * BUCKETS).reshape(2, BUCKETS)
        # Buckets rise with the value: of negative ones the larger bits come first.
        for half, bucket in ((found[:, :_HALF], slice(_HALF, None)), (found[:, : _HALF - 1 : -1], slice(_HALF))):
            self.counts[bucket] += half[0] + half[1]
            self.positives[bucket] += half[1]

    def merge(self, other: Sketch) -> None:
        """Take in what ``other`` counted."""
        self.counts += other.counts
        self.positives += other.positives

    def bounds(self, bins: int) -> np.ndarray:
        """Where to cut the values into at most ``bins`` bins of equal counts: float64, rising, none twice.

        A value's bin is the number of bounds that are not above it. Bounds are edges of buckets, so bins are as even
        as the buckets let them be.
        """
        used = np.flatnonzero(self.counts)
        if len(used) < 2:
            return np.zeros(0)
        below = np.cumsum(self.counts[used])
        wanted = below[-1] * np.arange(1, bins) / bins
        # The used bucket that follows the one in which the quantile lies, or that one where it begins nearer to it.
        first = np.searchsorted(below, wanted, side="left")
        before = np.concatenate([[0], below])
        nearer = (wanted - before[first]) < (below[first] - wanted)
        cut = np.unique(np.where(nearer, first, first + 1))
        cut = cut[(cut > 0) & (cut < len(used))]
        return lower_edges()[used[cut]]

    def shares(self, bounds: np.ndarray) -> np.ndarray:
        """Share of the values in each bin of ``bounds``: float64 [len(bounds) + 1]; zeros where nothing was counted."""
        used = np.flatnonzero(self.counts)
        bins = np.searchsorted(bounds, lower_edges()[used], side="right")
        counts = np.bincount(bins, self.counts[used], minlength=len(bounds) + 1)
        return counts / max(counts.sum(), 1.0)


def bin_of(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Bin of each value, int64: how many of ``bounds`` are not above it."""
    return np.searchsorted(bounds, values, side="right")


def auc(counts: np.ndarray, positives: np.ndarray) -> float:
    """Area under the ROC curve of rows in groups of rising score, ties counted half; 0.5 where one class is absent."""
    negatives = counts - positives
    total = float(positives.sum()) * float(negatives.sum())
    if not total:
        return 0.5
    below = np.cumsum(negatives) - negatives
    return float((positives * (below + 0.5 * negatives)).sum() / total)
