"""Hit rates of LFU and LRU caches, and distinct rows of a batch, from access frequencies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeline.records.dataset import FeatureProfile

# The Zipf mass of this many ranks is summed one by one; beyond, the midpoint integral is exact to 1e-7.
EXACT_RANKS = 1000
KNOTS_PER_DECADE = 8
# The number of log-spaced popularity bins of a segment.
BINS = 16
# The power-law exponent that stands for an immediate drop.
STEEPEST = 64.0
# A row with this many lookups has its true rank in the sample.
SURE_COUNT = 10.0


@dataclass(frozen=True, kw_only=True, eq=False)
class HitCurve:
    """The share of a table's lookups that its hottest k rows serve, for every k from 0 to ``rows``.

    ``knots`` are values of k in rising order from 0 to ``rows``, and ``served`` is the share at each. Between two knots
    popularity falls as a power of the row's rank, so the curve is monotone, concave and exact at the knots.
    """

    rows: int
    knots: np.ndarray
    served: np.ndarray

    @staticmethod
    def from_profile(profile: FeatureProfile, *, lookups: float = 0.0) -> HitCurve:
        """Build the curve of a feature's measured access histogram.

        Args:
            profile: The profile with the histogram.
            lookups: The lookups of the histogram (train rows x ``pooling``, including those that ``data.sampling``
                leaves out of training). A sample overrates its own tail, because it calls rows hot that were lucky;
                ``lookups`` above 0 correct that.
        """
        knots = np.concatenate([[0.0], np.asarray(profile.hot_rows, np.float64)])
        served = np.concatenate([[0.0], np.asarray(profile.hot_share, np.float64)])
        if served[-1] <= 0:
            # In a log without lookups no row is hotter than another.
            return HitCurve.zipf(int(knots[-1]), 0.0)
        served = served / served[-1]
        if lookups > 0:
            knots, served = _true_tail(knots, served, profile.distinct, lookups)
        return HitCurve(rows=int(knots[-1]), knots=knots, served=served)

    @staticmethod
    def zipf(rows: int, exponent: float) -> HitCurve:
        """Build the curve of a table whose r-th hottest row is read in proportion to r^-exponent; 0: all rows alike."""
        # Where ranks are not summed one by one, rank r stands for [r - 1/2, r + 1/2].
        points = int(np.ceil(np.log10(max(rows, 2)) * KNOTS_PER_DECADE)) + 1
        knots = np.unique(np.concatenate([[0], np.geomspace(1, rows, points).round()]))
        first = min(rows, EXACT_RANKS)
        exact = np.concatenate([[0.0], np.cumsum(np.arange(1, first + 1) ** -float(exponent))])
        beyond = _power_integral(first + 0.5, np.maximum(knots, first) + 0.5, np.asarray(float(exponent)))
        mass = exact[np.minimum(knots, first).astype(np.int64)] + beyond * (first + 0.5) ** -float(exponent)
        return HitCurve(rows=rows, knots=knots, served=mass / mass[-1])

    def share(self, cache_rows: float) -> float:
        """Return the share of lookups served by a cache of the ``cache_rows`` most read rows (perfect LFU), 0 to 1."""
        k = min(max(float(cache_rows), 0.0), float(self.rows))
        at = int(np.clip(np.searchsorted(self.knots, k, side="left") - 1, 0, len(self.knots) - 2))
        start, end, steep = self.knots[at] + 0.5, self.knots[at + 1] + 0.5, self._steepness[at]
        part = _power_integral(start, k + 0.5, steep) / _power_integral(start, end, steep)
        return float(self.served[at] + (self.served[at + 1] - self.served[at]) * part)

    def lru_share(self, cache_rows: float) -> float:
        """Return the share of lookups served by a warm LRU cache of ``cache_rows`` rows, for independent lookups."""
        # By Che, Tung, Wang, "Hierarchical Web caching systems", 2002, section III, a row stays for a time T that is
        # common to all rows, with sum(1 - exp(-p T)) = cache_rows.
        if cache_rows >= self.rows:
            return 1.0
        occupied, hit = self._che
        return float(np.interp(max(float(cache_rows), 0.0), occupied, hit))

    def distinct(self, lookups: float) -> float:
        """Return the expected number of distinct rows among ``lookups`` independent lookups."""
        rows, popularity = self._bins
        return float(-(rows * np.expm1(max(float(lookups), 0.0) * np.log1p(-popularity))).sum())

    def within(self, row: int, rows: int) -> HitCurve:
        """Return the curve of the lookups of ``rows`` rows from ``row`` on, where the hottest rows come first."""
        # Knots of this curve are kept, so the new curve is as exact as this one.
        inner = self.knots[(self.knots > row) & (self.knots < row + rows)]
        knots = np.concatenate([[row], inner, [row + rows]])
        served = np.array(list(map(self.share, knots)))
        total = served[-1] - served[0]
        if total <= 0:
            return HitCurve.zipf(rows, 0.0)
        return HitCurve(rows=rows, knots=knots - row, served=(served - served[0]) / total)

    @cached_property
    def _steepness(self) -> np.ndarray:
        """The power-law exponent of each segment, the steepest that keeps popularity falling across the knots."""
        widths = np.diff(self.knots)
        density = np.maximum(np.diff(self.served), 0.0) / widths
        # Popularity at each knot joins the means of the neighbouring segments by a power law of the rank.
        centres = np.log(np.sqrt((self.knots[:-1] + 0.5) * (self.knots[1:] + 0.5)))
        logs = np.log(np.maximum(density, 1e-300))
        inner = np.exp(np.interp(np.log(self.knots[1:-1] + 0.5), centres, logs))
        inner = np.where(density[1:] > 0, inner, 0.0)
        ends = np.concatenate([[np.inf], inner, [0.0]])
        start, end = self.knots[:-1] + 0.5, self.knots[1:] + 0.5
        low, high = np.zeros(len(widths)), np.full(len(widths), STEEPEST)
        for _ in range(40):
            middle = (low + high) / 2
            # The mean of (x / start) ** -middle over the segment.
            mean = _power_integral(start, end, middle) / widths
            head = density / mean
            tail = head * (end / start) ** -middle
            fits = (head <= ends[:-1] * (1 + 1e-9)) & (tail >= ends[1:] * (1 - 1e-9))
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        return np.where(widths > 1, low, 0.0)

    @cached_property
    def _bins(self) -> tuple[np.ndarray, np.ndarray]:
        """(rows, popularity of one of them) of log-spaced groups of rows that are read about as often."""
        # A segment of ranks k + 1 to l covers [k + 1/2, l + 1/2].
        start, end = self.knots[:-1, None] + 0.5, self.knots[1:, None] + 0.5
        edges = start * (end / start) ** np.linspace(0, 1, BINS + 1)
        steep = self._steepness[:, None]
        parts = _power_integral(start, edges, steep)
        mass = np.diff(parts, axis=1) / parts[:, -1:] * np.diff(self.served)[:, None]
        rows = np.diff(edges, axis=1)
        return rows.ravel(), np.clip(mass / rows, 0.0, 1 - 1e-12).ravel()

    @cached_property
    def _che(self) -> tuple[np.ndarray, np.ndarray]:
        """(rows held, share served) of LRU caches over a log-spaced grid of characteristic times, in lookups."""
        rows, popularity = self._bins
        read = popularity[popularity > 0]
        times = np.concatenate([[0.0], np.geomspace(1e-3, 50 / read.min(), 600)])
        present = -np.expm1(-np.outer(times, popularity))
        occupied, hit = present @ rows, present @ (rows * popularity)
        # Interpolation needs rising points, and rounding may make some equal.
        grows = np.concatenate([[True], np.diff(occupied) > 0])
        return occupied[grows], hit[grows]


def _power_integral(start: np.ndarray | float, end: np.ndarray | float, steep: np.ndarray) -> np.ndarray:
    """Return the integral of (x / start) ** -steep from start to end."""
    span = np.log(np.asarray(end) / start)
    power = 1 - steep
    flat = np.abs(power) < 1e-9
    return start * np.where(flat, span, np.expm1(power * span) / np.where(flat, 1.0, power))


def _true_tail(knots: np.ndarray, served: np.ndarray, distinct: int, lookups: float) -> tuple[np.ndarray, np.ndarray]:
    """Replace the rarely seen rows of the curve by a power law that would have given this sample."""
    # 1. Let the law begin at the last segment of rows that were seen at least SURE_COUNT times.
    density = np.diff(served) / np.diff(knots)
    unsure = np.flatnonzero(density * lookups < SURE_COUNT)
    at = max(int(unsure[0]), 1) if len(unsure) else len(density)
    if at >= len(density) or served[at] >= 1:
        return knots, served
    anchor, head = np.sqrt((knots[at - 1] + 0.5) * (knots[at] + 0.5)), density[at - 1]
    start, mass = knots[at] + 0.5, 1 - served[at]

    # 2. Choose the exponent that keeps the measured share of the rows beyond: (x / anchor) ** -exponent holds mass /
    # head between the start and each possible end of the law. The last row seen lies in the segment that ends at
    # ``full``.
    full = int(np.argmax(served >= 1 - 1e-12))
    seen = float(np.clip(distinct, knots[full - 1], knots[full]))
    ends = np.geomspace(max(seen, knots[at] + 1), max(knots[-1], seen), 64) + 0.5
    low, high = np.zeros(len(ends)), np.full(len(ends), STEEPEST)
    for _ in range(40):
        middle = (low + high) / 2
        flatter = _power_integral(start, ends, middle) * (start / anchor) ** -middle > mass / head
        low, high = np.where(flatter, middle, low), np.where(flatter, high, middle)
    steep = low

    # 3. Choose the end that gives as many distinct rows in ``lookups`` lookups as were seen.
    edges = start * (ends[:, None] / start) ** np.linspace(0, 1, 8 * BINS + 1)
    parts = _power_integral(start, edges, steep[:, None])
    rows, shares = np.diff(edges, axis=1), np.diff(parts, axis=1) / parts[:, -1:] * mass
    shown = knots[at] - (rows * np.expm1(-lookups * shares / rows)).sum(axis=1)
    best = int(np.abs(shown - seen).argmin())

    # Round the end: a knot that differs from another only in its last bits would end a segment without rows.
    tail = np.union1d(knots[at + 1 :], np.round(ends[best] - 0.5, 6))
    law = _power_integral(start, np.minimum(tail + 0.5, ends[best]), steep[best])
    tail_served = served[at] + mass * law / law[-1]
    return np.concatenate([knots[: at + 1], tail]), np.concatenate([served[: at + 1], tail_served])
