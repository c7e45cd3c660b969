"""How a table's rows grow from night to night: its history in the store, a robust trend, and a band around it.

A night adds a *step* of rows. Medians of pairwise slopes (Theil 1950, Sen 1968) fit the steps, so that single odd
nights hardly count; Kendall's test decides whether the steps change at all. Days without a night do not count: rows
grow with the days of logs that were learned.

Each dataset names the one whose id mappings it continues. So a night that was held or rolled back does not count,
because no later night continues it.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta

import numpy as np

from pipeline.core import units
from pipeline.core.errors import ArtifactError, ConfigError
from pipeline.records.dataset import DatasetSchema
from pipeline.records.record import read
from pipeline.store.artifacts import Store

MOST_NIGHTS = 30
LEAST_NIGHTS = 3
STEADY, RISING, SLOWING, SATURATING = "steady", "rising", "slowing", "saturating"
STOPPED, FULL, FIXED, SHORT = "stopped", "full", "fixed", "short"
BAND = 0.8
# 90 % quantile of the normal distribution: the ends of the band are this many standard deviations from the trend.
Z90 = 1.2816
DRAWS = 400
# Without a trend, Kendall's S exceeds this many standard deviations by chance in 5 % of all cases.
SURE = 1.645
# The smallest step whose logarithm is taken: a night without new rows counts as this many rows.
LEAST_STEP = 0.5
# The fewest nights without a new row after which growth may have ended.
QUIET_NIGHTS = 3
# A shape whose growth ends is chosen only if its error is less than this share of the other shape's error.
CLEARER = 0.8


@dataclass(frozen=True, kw_only=True, eq=False)
class History:
    """A table's ``rows`` after each of its nights, oldest first, and the ``days`` of logs learned by then."""

    days: np.ndarray
    rows: np.ndarray

    @staticmethod
    def of(days: Sequence[int], rows: Sequence[int]) -> History:
        return History(days=np.asarray(days, np.float64), rows=np.asarray(rows, np.float64))

    @property
    def steps(self) -> np.ndarray:
        """New rows a day of logs, for each night after the first."""
        return np.maximum(np.diff(self.rows), 0.0) / np.diff(self.days)


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A table's limit of ``rows``, set by ``setting``; ``when_full``: replace or keep; ``grows``: by new ids."""

    rows: int
    setting: str
    when_full: str
    grows: bool


@dataclass(frozen=True, kw_only=True)
class NightDataset:
    """The ``dataset`` of a night (its path), and its ``first`` and ``last`` day; None if it has no days."""

    dataset: str
    first: date | None
    last: date | None
    schema: DatasetSchema

    @property
    def days(self) -> int:
        """Return the number of days of logs that it adds."""
        if self.first is None or self.last is None:
            return 1
        # The first and the last day both count.
        return (self.last - self.first).days + 1

    @property
    def name(self) -> str:
        """The night's last day, or its dataset if it has no days."""
        return str(self.last or self.dataset)


@dataclass(frozen=True, kw_only=True)
class Nights:
    """The newest ``nights``, oldest first; ``gone``: the dataset that they continue, if it no longer exists."""

    nights: tuple[NightDataset, ...]
    gone: str = ""

    @property
    def newest(self) -> NightDataset:
        return self.nights[-1]

    @property
    def missing(self) -> tuple[str, ...]:
        """Days between the first night and the last that no night has."""
        missing = []
        for former, later in itertools.pairwise(self.nights):
            if former.last and later.first:
                for days in range(1, (later.first - former.last).days):
                    missing.append(str(former.last + timedelta(days=days)))
        return tuple(missing)

    def history(self, table: str) -> History:
        """Return the rows of ``table`` in the latest run of nights that have it without a break, oldest first."""
        days, rows = list[int](), list[int]()
        learned = 0
        for night in self.nights:
            learned += night.days
            sizes = {known.name: known.rows for known in night.schema.tables}
            if table in sizes:
                days.append(learned)
                rows.append(sizes[table])
            else:
                # A table that is missing from a night starts over after it.
                days, rows = [], []
        return History.of(days, rows)


def read_nights(store: Store, dataset: str, model: str, least: int = LEAST_NIGHTS) -> Nights:
    """Read the night whose dataset has path ``dataset``, and the nights before it that it continues.

    They are MOST_NIGHTS at most.

    Raises:
        ArtifactError: The store has fewer than ``least`` of them.
    """
    newest_first: list[NightDataset] = []
    path: str | None = dataset
    while path and len(newest_first) < MOST_NIGHTS:
        artifact = store.find(path)
        if artifact is None:
            break
        # Paths are datasets/NAME/DAY/KEY or datasets/NAME/FIRST..LAST/KEY, and datasets/NAME/KEY for data without days.
        parts = path.split("/")
        first = last = None
        if len(parts) > 3:
            start, _, end = parts[2].partition("..")
            first, last = date.fromisoformat(start), date.fromisoformat(end or start)
        schema = read(DatasetSchema, store, f"{path}/schema.json")
        newest_first.append(NightDataset(dataset=path, first=first, last=last, schema=schema))
        # Go on to the night whose id mappings, and hence tables, this one continues.
        path = artifact.config.get("data", {}).get("mapping_from")
    gone = path if path and len(newest_first) < MOST_NIGHTS else ""
    nights = Nights(nights=tuple(reversed(newest_first)), gone=gone)
    if len(newest_first) >= least:
        return nights
    count = units.plural(len(newest_first), "night")
    if newest_first:
        count += f" ({', '.join(night.name for night in nights.nights)})"
    message = f"model {model!r} has {count} in store {store.url}, expected at least {least} for a trend"
    hint = "nightjar nightly adds one, nightjar backfill from=<day> to=<day> several"
    if gone:
        message += f"; the dataset before them, {gone}, is gone"
        hint += "; nightjar store gc --keep-days 60 keeps them longer"
    raise ArtifactError(message, hint=hint)


def check_tables(night: NightDataset, limits: Sequence[str]) -> None:
    """Raise ConfigError if the settings' tables (``limits``) are not those of the last ``night``."""
    of_night = {table.name for table in night.schema.tables}
    new, old = sorted(set(limits) - of_night), sorted(of_night - set(limits))
    parts = []
    if new:
        verb = "is" if len(new) == 1 else "are"
        parts.append(f"{', '.join(new)} of the settings {verb} not in it")
    if old:
        verb = "is" if len(old) == 1 else "are"
        parts.append(f"its {', '.join(old)} {verb} not in the settings")
    if not parts:
        return
    raise ConfigError(
        f"the tables of the night {night.name} are not those of the settings: {'; '.join(parts)}; a table that is "
        "new or was renamed has no rows yet to project",
        hint="the settings of that night, or run a night with these settings first",
    )


# The trend of a table and its projection.


@dataclass(frozen=True, kw_only=True, eq=False)
class Projection:
    """Rows after nights 0 (the last one in the store) to N: the trend, and the ends of the band around it.

    ``kind``: steady, rising (steps grow by the same number a night), slowing (steps fall as a power of the rows, as by
    Heaps' law), saturating (steps fall by the same share a night), or without growth: stopped, full, fixed, short (too
    few nights). ``limit``: the limit of the table's rows, which bounds all three.
    """

    kind: str
    low: np.ndarray
    rows: np.ndarray
    high: np.ndarray
    limit: int

    def full(self) -> tuple[int | None, int | None, int | None]:
        """Return the nights on which the table reaches its limit: by the trend, at the earliest, at the latest."""
        nights: list[int | None] = []
        for rows in (self.rows, self.high, self.low):
            reached = np.flatnonzero(rows >= self.limit)
            nights.append(int(reached[0]) if len(reached) else None)
        trend, earliest, latest = nights
        return trend, earliest, latest


def project(history: History, limit: int, nights: int, *, fixed: bool = False, name: str = "") -> Projection:
    """Project the rows of a table over the next ``nights``, each of one day of logs, at most ``limit``.

    ``fixed``: the mapping decides the rows, and no log changes them. ``name``: draws of the band depend on it alone.
    """
    reason = _find_why_still(history, limit, fixed)
    if reason:
        rows = np.full(nights + 1, history.rows[-1])
        return Projection(kind=reason, low=rows, rows=rows, high=rows, limit=limit)
    trend = _fit_trend(history)
    rows = trend.path(nights, limit)[0]
    # The band comes from trends that are fitted to resampled steps. The table's name is the seed, so the band does not
    # depend on which other tables there are.
    paths = _draw_paths(trend, nights, limit, np.random.default_rng(zlib.crc32(name.encode())))
    low, high = np.quantile(paths, [(1 - BAND) / 2, (1 + BAND) / 2], axis=0)
    # Widen the band as Student's distribution is wider than the normal one at 10 and 90 %, given its degrees of freedom
    # (the first two terms of Fisher and Cornish 1960).
    fitted = 1 if trend.kind == STEADY else 2
    z, free = Z90, max(len(trend.noise) - fitted, 1)
    wider = 1 + (z**2 + 1) / (4 * free) + (5 * z**4 + 16 * z**2 + 3) / (96 * free**2)
    low = np.maximum(rows - wider * np.maximum(rows - low, 0.0), history.rows[-1])
    high = np.minimum(rows + wider * np.maximum(high - rows, 0.0), limit)
    return Projection(kind=trend.kind, low=np.round(low), rows=np.round(rows), high=np.round(high), limit=limit)


def _find_why_still(history: History, limit: int, fixed: bool) -> str:
    # Return why the table keeps its rows, or "" if it grows.
    if fixed:
        return FIXED
    if history.rows[-1] >= limit:
        return FULL
    if len(history.rows) < LEAST_NIGHTS:
        return SHORT
    # Count the runs of nights without a new row. The last run is that of the newest nights, 0 if they grew.
    runs = [0]
    for step in history.steps:
        if step > 0:
            runs.append(0)
        else:
            runs[-1] += 1
    longest_before = max(runs[:-1], default=0)
    # A table whose rows come in bursts pauses between them: its growth has ended only if this pause is more than twice
    # as long as any before.
    if runs[-1] >= max(QUIET_NIGHTS, 2 * longest_before + 1) or not any(history.steps):
        return STOPPED
    return ""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Trend:
    """Steps as a function of the day or of the rows: ``kind``, and the line's ``start`` and ``slope`` [draws].

    ``noise``: residuals of the measured steps, widened for the fitted numbers.
    """

    kind: str
    history: History
    start: np.ndarray
    slope: np.ndarray
    noise: np.ndarray

    def path(self, nights: int, limit: int, noise: np.ndarray | None = None) -> np.ndarray:
        """Return rows [draws, nights + 1]; ``noise`` [draws, nights] is added to the steps, or to their logarithms."""
        rows = np.empty((len(self.start), nights + 1))
        rows[:, 0] = self.history.rows[-1]
        last = self.history.days[-1]
        for night in range(1, nights + 1):
            before = rows[:, night - 1]
            x = np.log(before) if self.kind == SLOWING else np.full_like(before, last + night)
            step = self.start + self.slope * x
            if noise is not None:
                step = step + noise[:, night - 1]
            if self.kind in (SLOWING, SATURATING):
                # The line is fitted to the logarithms of the steps. Cut off steep draws: e^50 is far beyond any limit,
                # but does not overflow.
                step = np.exp(np.minimum(step, 50.0))
            rows[:, night] = before + np.maximum(step, 0.0)
        return np.minimum(rows, limit)


def _fit_trend(history: History) -> _Trend:
    steps, days = history.steps, history.days[1:]
    # Fit steady steps, unless Kendall's test is sure that they rise or fall. The test's statistic is the distance of
    # Kendall's S from 0, in the standard deviations that S has without a trend (Mann 1945).
    count = len(steps)
    first, second = np.triu_indices(count, 1)
    rising = float(np.sign(steps[second] - steps[first]).sum())
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    sure = math.copysign(max(abs(rising) - 1, 0.0), rising) / max(deviation, 1e-12)
    if sure > SURE:
        return _fit_line(RISING, history, days, steps)
    if sure < -SURE:
        # Take the falling shape that never ends, unless the other one explains the steps clearly better: memory that
        # was not planned for costs more than memory that stays free.
        logs = np.log(np.maximum(steps, LEAST_STEP))
        slowing = _fit_line(SLOWING, history, np.log(history.rows[:-1]), logs)
        saturating = _fit_line(SATURATING, history, days, logs)
        error, slower_error = np.median(np.abs(saturating.noise)), np.median(np.abs(slowing.noise))
        return saturating if error < CLEARER * slower_error else slowing
    pace = theil_sen_slopes(history.days, history.rows[None])
    return _Trend(kind=STEADY, history=history, start=pace, slope=np.zeros(1), noise=_widen(steps - pace, 1))


def _fit_line(kind: str, history: History, x: np.ndarray, y: np.ndarray) -> _Trend:
    slope = _clip_sign(kind, theil_sen_slopes(x, y[None]))
    start = np.median(y - slope[:, None] * x, axis=1)
    return _Trend(kind=kind, history=history, start=start, slope=slope, noise=_widen(y - start - slope * x, 2))


def _clip_sign(kind: str, slope: np.ndarray) -> np.ndarray:
    # Resampled noise may change the sign of a slope, which would make slowing growth explode in that draw.
    if kind == RISING:
        return np.maximum(slope, 0.0)
    return np.minimum(slope, 0.0)


def _widen(residual: np.ndarray, fitted: int) -> np.ndarray:
    # A fit of ``fitted`` numbers takes as many degrees of freedom, which makes its residuals too small.
    return residual * math.sqrt(len(residual) / max(len(residual) - fitted, 1))


def theil_sen_slopes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the median of the slopes of all pairs (Theil and Sen), of each row of y [draws, n] on x [n]."""
    # Compute all pairs at once: MOST_NIGHTS nights have 435 pairs in each of DRAWS draws.
    first, second = np.triu_indices(len(x), 1)
    distance = x[second] - x[first]
    # x may be the logarithm of the rows, which does not change on nights without a new row. Such a pair has no slope.
    apart = distance != 0
    first, second, distance = first[apart], second[apart], distance[apart]
    slopes: np.ndarray = np.median((y[:, second] - y[:, first]) / distance, axis=1)
    return slopes


def _draw_paths(trend: _Trend, nights: int, limit: int, rng: np.random.Generator) -> np.ndarray:
    """Return rows [DRAWS, nights + 1] of trends fitted to the line plus resampled noise.

    Noise is added to the coming nights, too.
    """
    history, count = trend.history, len(trend.noise)
    noise = rng.choice(trend.noise, (DRAWS, count))
    future = rng.choice(trend.noise, (DRAWS, nights))
    if trend.kind == STEADY:
        # Fit to the rows, as ``_fit_trend`` does. Here the rows are the sums of the drawn steps.
        grown = np.cumsum(np.maximum(trend.start + noise, 0.0) * np.diff(history.days), axis=1)
        start = theil_sen_slopes(history.days, np.concatenate([np.zeros((DRAWS, 1)), grown], axis=1))
        slope = np.zeros(DRAWS)
    else:
        x = np.log(history.rows[:-1]) if trend.kind == SLOWING else history.days[1:]
        y = trend.start + trend.slope * x + noise
        slope = _clip_sign(trend.kind, theil_sen_slopes(x, y))
        start = np.median(y - slope[:, None] * x, axis=1)
    drawn = _Trend(kind=trend.kind, history=history, start=start, slope=slope, noise=trend.noise)
    return drawn.path(nights, limit, future)
