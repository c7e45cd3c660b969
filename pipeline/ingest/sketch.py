"""A quantile sketch that merges exactly: counts of values by bucket, the first 16 bits of a float32.

That is 128 buckets an octave (values within 0.8 %, whole numbers up to 256 apart), 65,536 in all, so adding a block
is one pass without sorting, and what comes out depends neither on the order of rows nor on how they were cut. Rows of
the positive class are counted too: they tell how well a value alone predicts the label.

Bounds of bins are cut by counts alone, or by what the label says of the values (``mdl``).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config.features import MDL
from pipeline.core.kernels import load_kernels

BUCKETS = 1 << 16
_HALF = 1 << 15
# Number of values below which sorting counts faster than an array of all buckets.
_FEW = 1 << 13


@cache
def lower_edges() -> np.ndarray:
    """Return the lowest value of every bucket: float64 [BUCKETS]; NaN or infinite for those of no number."""
    order = np.arange(BUCKETS, dtype=np.int64)
    negative = order < _HALF
    keys = np.where(negative, BUCKETS - 1 - order, order - _HALF).astype(np.uint32) << np.uint32(16)
    # A bucket of negative values has its lowest value at the largest magnitude.
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
        kernels = load_kernels("rows")
        if kernels is not None:
            self._take_in(*kernels.sketch(values, labels))
            return
        keep = np.isfinite(values)
        if not keep.all():
            values, labels = values[keep], labels[keep]
        if not len(values):
            return
        # -0 counts as 0.
        bits = (values.astype(np.float32) + np.float32(0.0)).view(np.uint32) >> np.uint32(16)
        # Buckets rise with the value, so the bits of negative values are reversed. A key is a bucket and a label.
        buckets = np.where(bits < _HALF, bits + np.uint32(_HALF), np.uint32(BUCKETS - 1) - bits)
        coded = buckets << np.uint32(1) | (labels > 0)
        if len(coded) < _FEW:
            distinct, seen = np.unique(coded, return_counts=True)
            keys: np.ndarray = distinct.astype(np.int64)
        else:
            counts = np.bincount(coded)
            keys = np.flatnonzero(counts)
            seen = counts[keys]
        starts = np.flatnonzero(np.diff(keys >> 1, prepend=-1))
        self._take_in(
            (keys[starts] >> 1).astype(np.uint16),
            np.add.reduceat(seen, starts),
            np.add.reduceat(seen * (keys & 1), starts),
        )

    def merge(self, other: Sketch) -> None:
        self._take_in(other.used, other.rows, other.clicks)

    def _take_in(self, used: np.ndarray, rows: np.ndarray, clicks: np.ndarray) -> None:
        kernels = load_kernels("rows")
        if not len(self.used):
            # Not copied, because arrays of sketches are replaced and never changed in place.
            self.used, self.rows, self.clicks = used, rows, clicks
        elif kernels is not None:
            sums = kernels.merge((self.used, self.rows, self.clicks), (used, rows, clicks))
            self.used, self.rows, self.clicks = sums
        else:
            self.used, self.rows, self.clicks = added_up((self.used, used), (self.rows, rows), (self.clicks, clicks))

    def bounds(self, bins: int) -> np.ndarray:
        """Cut the values into at most ``bins`` bins of equal counts: returns bounds, float64, rising, none twice.

        A value's bin is the number of bounds that are not above it. Bounds are edges of buckets, so bins are as even
        as the buckets let them be.
        """
        used = self.used
        if len(used) < 2:
            return np.zeros(0)
        below = np.cumsum(self.rows)
        wanted = below[-1] * np.arange(1, bins) / bins
        # Cut at the used bucket after the one in which the quantile lies, or at that one if it begins nearer to it.
        first = np.searchsorted(below, wanted, side="left")
        before = np.concatenate([[0], below])
        nearer = (wanted - before[first]) < (below[first] - wanted)
        cut = np.unique(np.where(nearer, first, first + 1))
        cut = cut[(cut > 0) & (cut < len(used))]
        return lower_edges()[used[cut]]

    def distribution(self, bins: int) -> dict[str, Any]:
        """Return distinct values (buckets), and ``shares`` of bins between ``bounds``, as even as values let them be.

        A single value is a bin between two others, so that another one on another day is in another bin.
        """
        bounds = lower_edges()[self.used[0] : self.used[0] + 2] if len(self.used) == 1 else self.bounds(bins)
        return {"distinct": len(self.used), "bounds": bounds.tolist(), "shares": self.shares(bounds).tolist()}

    def shares_of(self, then: Mapping[str, Any]) -> np.ndarray:
        """Return the shares of the bins of another day's ``distribution``."""
        return self.shares(np.array(then["bounds"], np.float64))

    def shares(self, bounds: np.ndarray) -> np.ndarray:
        """Return the share of values in each bin of ``bounds``: float64 [len(bounds) + 1]; zeros without values."""
        bins = np.searchsorted(bounds, lower_edges()[self.used], side="right")
        counts = np.bincount(bins, self.rows, minlength=len(bounds) + 1)
        return counts / max(counts.sum(), 1.0)


def added_up(keys: tuple[np.ndarray, ...], *counts: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """Add up the ``counts`` of several parts by key.

    Returns:
        The distinct ``keys``, rising, and the sum of each one's counts, int64 below 2^53.
    """
    distinct, place = np.unique(np.concatenate(keys), return_inverse=True)
    sums = [distinct]
    for parts in counts:
        # With weights, bincount adds in float64, which is exact for whole numbers below 2^53.
        sums.append(np.bincount(place, np.concatenate(parts)).astype(np.int64))
    return tuple(sums)


def bin_of(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Return the bin of each value, int64: how many of ``bounds`` are not above it."""
    return np.searchsorted(bounds, values, side="right")


Counts = NDArray[np.int64]


def bin_bounds(sketch: Sketch, by: str, bins: int) -> NDArray[np.float64]:
    """Choose the bounds of at most ``bins`` bins of the values that ``sketch`` counted.

    Args:
        by: ``mdl`` or ``percentile``.

    Returns:
        float64, rising, none twice. A value's bin is the number of bounds that are not above it.
    """
    if by == MDL:
        return mdl_bounds(sketch, bins)
    return sketch.bounds(bins)


@dataclass(frozen=True)
class _BucketSplit:
    """Buckets [start, end) cut before ``at``; ``saved``: bits that the cut saves in the description of the labels."""

    start: int
    end: int
    at: int
    saved: float


def mdl_bounds(sketch: Sketch, bins: int) -> NDArray[np.float64]:
    """Return bounds between which the click rate differs by more than chance (Fayyad and Irani 1993, "Multi-Interval
    Discretization of Continuous-Valued Attributes for Classification Learning", sections 3 and 5).

    Values are cut in two where the entropy of the labels falls most, and the parts again, as long as a cut shortens the
    description of the labels (the minimum description length principle). The cut that saves most comes first, so
    ``bins`` keeps the best ones. Cuts lie between buckets of the sketch: exact where values differ by more than 0.8 %,
    as whole numbers up to 256 do. There are no bounds if the values alone tell nothing about the label.
    """
    rows = np.concatenate([[0], np.cumsum(sketch.rows)])
    clicks = np.concatenate([[0], np.cumsum(sketch.clicks)])
    waiting = [*_ranked(rows, clicks, 0, len(sketch.used))]
    cuts = list[int]()
    while waiting and len(cuts) < bins - 1:
        _, _, cut = heapq.heappop(waiting)
        cuts.append(cut.at)
        for part in ((cut.start, cut.at), (cut.at, cut.end)):
            for ranked in _ranked(rows, clicks, *part):
                heapq.heappush(waiting, ranked)
    return lower_edges()[sketch.used[np.sort(np.array(cuts, np.int64))]]


def _ranked(rows: Counts, clicks: Counts, start: int, end: int) -> list[tuple[float, int, _BucketSplit]]:
    # Returns the best cut of buckets [start, end), to be sorted by falling savings; nothing if none is worth its bits.
    if end - start < 2:
        return []
    places = np.arange(start + 1, end)
    low = _bits(rows[places] - rows[start], clicks[places] - clicks[start])
    high = _bits(rows[end] - rows[places], clicks[end] - clicks[places])
    best = int(np.argmin(low + high))
    at, count, clicked = int(places[best]), int(rows[end] - rows[start]), int(clicks[end] - clicks[start])
    whole = float(_bits(np.array([count]), np.array([clicked]))[0])
    # The number of classes that occur and the entropy of the labels, for the whole and for both parts.
    classes, entropies = list[int](), list[float]()
    for first, last, bits in ((start, end, whole), (start, at, low[best]), (at, end, high[best])):
        size, of_part = int(rows[last] - rows[first]), int(clicks[last] - clicks[first])
        classes.append((of_part > 0) + (of_part < size))
        entropies.append(float(bits) / size)
    # A cut costs the bits that tell its place, one of count - 1, and `delta` for the classes of the parts (section 5).
    delta = np.log2(3.0 ** classes[0] - 2) - (
        classes[0] * entropies[0] - classes[1] * entropies[1] - classes[2] * entropies[2]
    )
    saved = whole - float(low[best] + high[best]) - float(np.log2(count - 1) + delta)
    if saved <= 0:
        return []
    return [(-saved, at, _BucketSplit(start, end, at, saved))]


def _bits(rows: Counts, clicks: Counts) -> NDArray[np.float64]:
    # Returns bits of the labels of parts [n] with so many `rows` and `clicks`: rows times the entropy of their labels.
    total = np.zeros(len(rows))
    for part in (clicks, rows - clicks):
        share = part / rows
        total -= part * np.log2(share, out=np.zeros(len(rows)), where=part > 0)
    return total
