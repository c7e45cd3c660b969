"""A quantile sketch that merges exactly: counts of values by bucket, the first 16 bits of a float32.

That is 128 buckets an octave (values within 0.8 %, whole numbers up to 256 apart), 65,536 in all, so adding a block is
one pass without sorting, and what comes out depends neither on the order of rows nor on how they were cut. Rows of
the positive class are counted too: they tell how well a value alone predicts the label.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from pipeline.native.column_kernels import merged, sketched

BUCKETS = 1 << 16
_HALF = 1 << 15
# Values that are counted sooner by sorting than by an array of all buckets.
_FEW = 1 << 13


@cache
def lower_edges() -> np.ndarray:
    """The lowest value of every bucket: float64 [BUCKETS]; those of no number are NaN or infinite."""
    order = np.arange(BUCKETS, dtype=np.int64)
    negative = order < _HALF
    keys = np.where(negative, BUCKETS - 1 - order, order - _HALF).astype(np.uint32) << np.uint32(16)
    # Of negative values the bucket's lowest has the largest magnitude.
    edges = np.where(negative, keys | np.uint32(0xFFFF), keys).astype(np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        lowest = edges.astype(np.float64)
    lowest.flags.writeable = False
    return lowest


class Sketch:
    """Counts of finite values by bucket, and of those with label 1.

    Only the buckets that hold values are kept, in rising order: a column fills a few thousand of the 65,536, and a
    block of a wide log has a sketch for each of its columns.
    """

    def __init__(self) -> None:
        self.used = np.zeros(0, np.uint16)
        self.rows = np.zeros(0, np.int64)
        self.clicks = np.zeros(0, np.int64)

    @property
    def total(self) -> int:
        """Values in all buckets."""
        return int(self.rows.sum())

    def add(self, values: np.ndarray, labels: np.ndarray) -> None:
        """Count ``values`` (NaN: missing, not counted) with their ``labels``."""
        if (counts := sketched(values, labels)) is not None:
            self._take_in(*counts)
            return
        keep = np.isfinite(values)
        if not keep.all():
            values, labels = values[keep], labels[keep]
        if not len(values):
            return
        # -0 counts as 0.
        bits = (values.astype(np.float32) + np.float32(0.0)).view(np.uint32) >> np.uint32(16)
        # Buckets rise with the value: of negative ones the larger bits come first.
        buckets = np.where(bits < _HALF, bits + np.uint32(_HALF), np.uint32(BUCKETS - 1) - bits)
        keys, seen = _counted(buckets << np.uint32(1) | (labels > 0))
        starts = np.flatnonzero(np.diff(keys >> 1, prepend=-1))
        self._take_in(
            (keys[starts] >> 1).astype(np.uint16),
            np.add.reduceat(seen, starts),
            np.add.reduceat(seen * (keys & 1), starts),
        )

    def merge(self, other: Sketch) -> None:
        """Take in what ``other`` counted."""
        self._take_in(other.used, other.rows, other.clicks)

    def _take_in(self, used: np.ndarray, rows: np.ndarray, clicks: np.ndarray) -> None:
        if not len(self.used):
            self.used, self.rows, self.clicks = used, rows, clicks
        elif (sums := merged((self.used, self.rows, self.clicks), (used, rows, clicks))) is not None:
            self.used, self.rows, self.clicks = sums
        else:
            self.used, self.rows, self.clicks = added_up((self.used, used), (self.rows, rows), (self.clicks, clicks))

    def bounds(self, bins: int) -> np.ndarray:
        """Where to cut the values into at most ``bins`` bins of equal counts: float64, rising, none twice.

        A value's bin is the number of bounds that are not above it. Bounds are edges of buckets, so bins are as even
        as the buckets let them be.
        """
        used = self.used
        if len(used) < 2:
            return np.zeros(0)
        below = np.cumsum(self.rows)
        wanted = below[-1] * np.arange(1, bins) / bins
        # The used bucket that follows the one in which the quantile lies, or that one where it begins nearer to it.
        first = np.searchsorted(below, wanted, side="left")
        before = np.concatenate([[0], below])
        nearer = (wanted - before[first]) < (below[first] - wanted)
        cut = np.unique(np.where(nearer, first, first + 1))
        cut = cut[(cut > 0) & (cut < len(used))]
        return lower_edges()[used[cut]]

    def distribution(self, bins: int) -> dict[str, Any]:
        """Distinct values (buckets), and ``shares`` of bins between ``bounds``, as even as the values let them be.

        A single value is a bin between two others, so that another one on another day is in another bin.
        """
        bounds = lower_edges()[self.used[0] : self.used[0] + 2] if len(self.used) == 1 else self.bounds(bins)
        return {"distinct": len(self.used), "bounds": bounds.tolist(), "shares": self.shares(bounds).tolist()}

    def shares_of(self, then: Mapping[str, Any]) -> np.ndarray:
        """Shares of the bins of another day's ``distribution``."""
        return self.shares(np.array(then["bounds"], np.float64))

    def shares(self, bounds: np.ndarray) -> np.ndarray:
        """Share of the values in each bin of ``bounds``: float64 [len(bounds) + 1]; zeros where nothing was counted."""
        bins = np.searchsorted(bounds, lower_edges()[self.used], side="right")
        counts = np.bincount(bins, self.rows, minlength=len(bounds) + 1)
        return counts / max(counts.sum(), 1.0)


def added_up(keys: tuple[np.ndarray, ...], *counts: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """The distinct ``keys`` of several parts, rising, and the sums (int64, below 2^53) of each of their ``counts``."""
    distinct, place = np.unique(np.concatenate(keys), return_inverse=True)
    return distinct, *(np.bincount(place, np.concatenate(each)).astype(np.int64) for each in counts)


def _counted(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # The distinct `keys` (below 2 * BUCKETS) in rising order, and how often each is there: int64.
    if len(keys) < _FEW:
        distinct, seen = np.unique(keys, return_counts=True)
        return distinct.astype(np.int64), seen
    counts = np.bincount(keys)
    distinct = np.flatnonzero(counts)
    return distinct, counts[distinct]


def bin_of(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Bin of each value, int64: how many of ``bounds`` are not above it."""
    return np.searchsorted(bounds, values, side="right")
