"""How a table's rows grow from night to night: a robust trend, its projection, and a band around it. NumPy only.

A night adds a *step* of rows. Medians of pairwise slopes (Theil 1950, Sen 1968) fit the steps, so that single odd
nights hardly count; Kendall's test decides whether the steps change at all. Days without a night do not count: rows
grow with the days of logs that were learned.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_NIGHTS = 3
STEADY, RISING, SLOWING, SATURATING = "steady", "rising", "slowing", "saturating"
STOPPED, FULL, FIXED, SHORT = "stopped", "full", "fixed", "short"
BAND = 0.8
Z90 = 1.2816  # ends of the band in standard deviations
DRAWS = 400
SURE = 1.645  # standard deviations that Kendall's S lies from 0 by chance in 5 % of all cases, on one side
LEAST_STEP = 0.5  # stands for a night without new rows where logarithms are taken
QUIET_NIGHTS = 3  # nights without a new row that may mean the end of growth
CLEARER = 0.8  # of the slower shape's error: below, growth is taken to come to an end


@dataclass(frozen=True, kw_only=True, eq=False)
class History:
    """A table's ``rows`` after each of its nights, oldest first; ``days`` of logs learned so far, rising."""

    days: np.ndarray
    rows: np.ndarray

    @staticmethod
    def of(days: Sequence[int], rows: Sequence[int]) -> History:
        """From plain numbers."""
        return History(days=np.asarray(days, np.float64), rows=np.asarray(rows, np.float64))

    @property
    def steps(self) -> np.ndarray:
        """New rows a day of logs, for each night after the first."""
        return np.maximum(np.diff(self.rows), 0.0) / np.diff(self.days)


@dataclass(frozen=True, kw_only=True, eq=False)
class Projection:
    """Rows after nights 0 (the last one in the store) to N: the trend, and the ends of the band around it.

    ``kind``: steady, rising (steps grow by the same number a night), slowing (steps fall as a power of the rows, as by
    Heaps' law), saturating (steps fall by the same share a night), or without growth: stopped, full, fixed, short (too
    few nights). ``limit``: of the table's rows, which bounds all three.
    """

    kind: str
    low: np.ndarray
    rows: np.ndarray
    high: np.ndarray
    limit: int

    def full(self) -> tuple[int | None, int | None, int | None]:
        """The nights on which the table reaches its limit: by the trend, at the earliest, at the latest."""
        return _first(self.rows, self.limit), _first(self.high, self.limit), _first(self.low, self.limit)


def _first(rows: np.ndarray, limit: int) -> int | None:
    reached = np.flatnonzero(rows >= limit)
    return int(reached[0]) if len(reached) else None


def project(history: History, limit: int, nights: int, *, fixed: bool = False, name: str = "") -> Projection:
    """The rows of a table over the next ``nights``, each of one day of logs, at most ``limit``.

    ``fixed``: the mapping decides the rows, and no log changes them. ``name``: draws of the band depend on it alone.
    """
    still = _without_growth(history, limit, fixed)
    if still:
        rows = np.full(nights + 1, history.rows[-1])
        return Projection(kind=still, low=rows, rows=rows, high=rows, limit=limit)
    shape = _shape(history)
    centre = shape.path(nights, limit)
    draws = _draws(shape, nights, limit, np.random.default_rng(zlib.crc32(name.encode())))
    low, high = np.quantile(draws, [(1 - BAND) / 2, (1 + BAND) / 2], axis=0)
    rows, wider = centre[0], _wider(len(shape.noise) - shape.fitted)
    low = np.maximum(rows - wider * np.maximum(rows - low, 0.0), history.rows[-1])
    high = np.minimum(rows + wider * np.maximum(high - rows, 0.0), limit)
    return Projection(kind=shape.kind, low=np.round(low), rows=np.round(rows), high=np.round(high), limit=limit)


def _wider(free: int) -> float:
    """How much wider than the normal distribution's Student's is at 10 and 90 %, with ``free`` degrees of freedom.

    Source: Fisher and Cornish 1960, the first two terms.
    """
    z, free = Z90, max(free, 1)
    return 1 + (z**2 + 1) / (4 * free) + (5 * z**4 + 16 * z**2 + 3) / (96 * free**2)


def _without_growth(history: History, limit: int, fixed: bool) -> str:
    """Why the table keeps its rows; "" where it grows."""
    if fixed:
        return FIXED
    if history.rows[-1] >= limit:
        return FULL
    if len(history.rows) < LEAST_NIGHTS:
        return SHORT
    quiet = _quiet_runs(history.steps)
    return (
        STOPPED if quiet[-1] >= max(QUIET_NIGHTS, 2 * max(quiet[:-1], default=0) + 1) or not any(history.steps) else ""
    )


def _quiet_runs(steps: np.ndarray) -> list[int]:
    """Lengths of the runs of nights without a new row; the last number is that of the newest nights, 0 if they grew."""
    runs = [0]
    for step in steps:
        if step > 0:
            runs.append(0)
        else:
            runs[-1] += 1
    return runs


@dataclass(frozen=True, kw_only=True, eq=False)
class _Shape:
    """Steps as a function of the day or of the rows: ``kind``, and the line's ``start`` and ``slope`` [draws].

    ``noise``: what the line leaves of the measured steps, widened for the fitted numbers.
    """

    kind: str
    history: History
    start: np.ndarray
    slope: np.ndarray
    noise: np.ndarray

    @property
    def logarithmic(self) -> bool:
        """Whether the line is one of the steps' logarithms."""
        return self.kind in (SLOWING, SATURATING)

    @property
    def fitted(self) -> int:
        """The numbers that were fitted."""
        return 1 if self.kind == STEADY else 2

    def path(self, nights: int, limit: int, noise: np.ndarray | None = None) -> np.ndarray:
        """Rows [draws, nights + 1]; ``noise`` [draws, nights] is added to the steps, or to their logarithms."""
        rows = np.empty((len(self.start), nights + 1))
        rows[:, 0] = self.history.rows[-1]
        last = self.history.days[-1]
        for night in range(1, nights + 1):
            before = rows[:, night - 1]
            x = np.log(before) if self.kind == SLOWING else np.full_like(before, last + night)
            step = self.start + self.slope * x + (0.0 if noise is None else noise[:, night - 1])
            rows[:, night] = before + (np.exp(np.minimum(step, 50.0)) if self.logarithmic else np.maximum(step, 0.0))
        return np.minimum(rows, limit)


def _shape(history: History) -> _Shape:
    """Steady steps, unless Kendall's test is sure that they rise or fall; falling ones as a power of rows, or faster.

    Of the two falling shapes the one that never ends is taken, unless the other explains the steps clearly better:
    memory that was not planned for costs more than memory that stays free.
    """
    steps, days = history.steps, history.days[1:]
    sure = _kendall(steps)
    if sure > SURE:
        return _line(RISING, history, days, steps)
    if sure < -SURE:
        slowing = _line(SLOWING, history, np.log(history.rows[:-1]), _logs(steps))
        saturating = _line(SATURATING, history, days, _logs(steps))
        return saturating if _error(saturating) < CLEARER * _error(slowing) else slowing
    pace = _slopes(history.days, history.rows[None])
    noise = _widened(steps - pace, 1)
    return _Shape(kind=STEADY, history=history, start=pace, slope=np.zeros(1), noise=noise)


def _line(kind: str, history: History, x: np.ndarray, y: np.ndarray) -> _Shape:
    slope = _signed(kind, _slopes(x, y[None]))
    start = np.median(y - slope[:, None] * x, axis=1)
    return _Shape(kind=kind, history=history, start=start, slope=slope, noise=_widened(y - start - slope * x, 2))


def _signed(kind: str, slope: np.ndarray) -> np.ndarray:
    return np.maximum(slope, 0.0) if kind == RISING else np.minimum(slope, 0.0)


def _logs(steps: np.ndarray) -> np.ndarray:
    logs: np.ndarray = np.log(np.maximum(steps, LEAST_STEP))
    return logs


def _error(shape: _Shape) -> float:
    return float(np.median(np.abs(shape.noise)))


def _widened(left: np.ndarray, fitted: int) -> np.ndarray:
    """What a fit of so many numbers leaves, as large as it would be without the fit."""
    return left * math.sqrt(len(left) / max(len(left) - fitted, 1))


def _slopes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Theil and Sen's slope of each row of ``y`` [draws, n] on ``x`` [n]: the median of the slopes of all pairs."""
    first, second = np.triu_indices(len(x), 1)
    apart = x[second] - x[first]
    first, second, apart = first[apart != 0], second[apart != 0], apart[apart != 0]
    slopes: np.ndarray = np.median((y[:, second] - y[:, first]) / apart, axis=1)
    return slopes


def _kendall(steps: np.ndarray) -> float:
    """How far the steps rise (above 0) or fall, in standard deviations of Kendall's S without a trend (Mann 1945)."""
    count = len(steps)
    first, second = np.triu_indices(count, 1)
    rising = float(np.sign(steps[second] - steps[first]).sum())
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    return math.copysign(max(abs(rising) - 1, 0.0), rising) / max(deviation, 1e-12)


def _draws(shape: _Shape, nights: int, limit: int, rng: np.random.Generator) -> np.ndarray:
    """Rows [DRAWS, nights + 1] of trends fitted to the line plus resampled noise, with noise in the nights to come."""
    history, count = shape.history, len(shape.noise)
    noise = rng.choice(shape.noise, (DRAWS, count))
    future = rng.choice(shape.noise, (DRAWS, nights))
    if shape.kind == STEADY:
        grown = np.cumsum(np.maximum(shape.start + noise, 0.0) * np.diff(history.days), axis=1)
        start = _slopes(history.days, np.concatenate([np.zeros((DRAWS, 1)), grown], axis=1))
        drawn = _Shape(kind=STEADY, history=history, start=start, slope=np.zeros(DRAWS), noise=shape.noise)
        return drawn.path(nights, limit, future)
    x = np.log(history.rows[:-1]) if shape.kind == SLOWING else history.days[1:]
    y = shape.start + shape.slope * x + noise
    slope = _signed(shape.kind, _slopes(x, y))
    start = np.median(y - slope[:, None] * x, axis=1)
    drawn = _Shape(kind=shape.kind, history=history, start=start, slope=slope, noise=shape.noise)
    return drawn.path(nights, limit, future)
