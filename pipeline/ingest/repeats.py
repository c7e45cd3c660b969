"""Which rows of an event stay, and which labels clicks that came later correct: exact, in bounded memory.

Events lie in a temporary file, in partitions by the hash of their key, so that those of an event meet in one of them. A
partition is judged by itself. What stays in memory is 8 bytes for each row that is dropped or corrected.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from pipeline.ingest.events import MarkedRows
from pipeline.ingest.spill import KeyPartitions

# A row of an earlier dataset, a row of this one, a click without a row, a click that an earlier dataset has corrected,
# and one that a later dataset brought.
FORMER, ROW, CLICK, KNOWN, LATER = 0, 1, 2, 3, 4
LINE_BITS = 40  # of a place: the number of a line, behind that of its part


@dataclass
class RepeatedRows:
    """What was found. ``dropped``, ``clicked``, ``later``: places of rows that are repetitions, or clicked by these
    logs or by those of later datasets. ``late``: events (key, check) of former days' rows.

    ``repeated``, ``corrected``: rows that are dropped, and rows of these logs whose label changes, by day.
    """

    dropped: np.ndarray
    clicked: np.ndarray
    later: np.ndarray
    late: dict[int, pl.DataFrame] = field(default_factory=dict)
    repeated: dict[int, int] = field(default_factory=dict)
    corrected: dict[int, int] = field(default_factory=dict)

    def marks(self, part: int) -> MarkedRows:
        """Those of a part of the logs."""
        return MarkedRows(*(_of_part(places, part) for places in (self.dropped, self.clicked, self.later)))


def _of_part(places: np.ndarray, part: int) -> np.ndarray:
    low, high = np.searchsorted(places, [part << LINE_BITS, (part + 1) << LINE_BITS])
    lines: np.ndarray = places[low:high] - (part << LINE_BITS)
    return lines


class Repeats:
    """Events of rows and clicks; of rows at most ``days`` apart the first stays, a click counts within ``window``."""

    def __init__(self, days: int, window: int) -> None:
        self.days, self.window = max(days, window), window
        self._partitions = KeyPartitions()

    def add(self, events: pl.DataFrame, kind: int, *, part: int = 0, own_day: int | None = None) -> None:
        """Take in ``events`` (``FOUND``, or without lines) of a ``part`` of the logs whose files are of ``own_day``."""
        line = pl.col("line") if "line" in events.columns else pl.lit(0, pl.Int64)
        away = pl.lit(False) if own_day is None else pl.col("day") != own_day
        self._partitions.add(
            events.select(
                "key",
                "check",
                "day",
                pl.lit(kind, pl.Int8).alias("kind"),
                away.alias("away"),
                (line + (part << LINE_BITS)).alias("place"),
                "clicked",
            )
        )

    def judge(self) -> RepeatedRows:
        """Which rows stay, once all events are there."""
        verdict = _Verdict(self.days, self.window)
        for events in self._partitions:
            more = events.filter(pl.len().over("key", "check") > 1)
            verdict.add(more.sort("key", "check", "day", "kind", "away", "place"))
        return verdict.done()


class _Verdict:
    """Goes through events in order: by key, day, kind, place."""

    def __init__(self, days: int, window: int) -> None:
        self.days, self.window = days, window
        self.dropped: list[int] = []
        self.clicked: list[int] = []
        self.later: list[int] = []
        self.repeated, self.corrected = Counter[int](), Counter[int]()
        self.late: dict[int, list[tuple[int, int]]] = {}

    def add(self, events: pl.DataFrame) -> None:
        now: tuple[int, int] | None = None
        first: tuple[int, int, int] | None = None  # day, kind, place of the row that stays
        known = False  # whether its click is known
        for key, check, day, kind, _, place, clicked in events.iter_rows():
            if (key, check) != now:
                now, first = (key, check), None
            if kind in (FORMER, ROW) and (first is None or day - first[0] > self.days):
                first, known = (day, kind, place), clicked
                continue
            if kind == ROW:
                self.dropped.append(place)
                self.repeated[day] += 1
            if clicked and first is not None and not known and 0 <= day - first[0] <= self.window and self.window:
                known = True
                if kind in (ROW, CLICK):
                    self._correct(first, key, check)
                elif kind == LATER and first[1] == ROW:
                    self.later.append(first[2])
                    self.corrected[first[0]] += 1

    def _correct(self, first: tuple[int, int, int], key: int, check: int) -> None:
        day, kind, place = first
        if kind == FORMER:
            self.late.setdefault(day, []).append((key, check))
        else:
            self.clicked.append(place)
            self.corrected[day] += 1

    def done(self) -> RepeatedRows:
        late = {
            day: pl.DataFrame(events, schema={"key": pl.UInt64, "check": pl.UInt64}, orient="row").sort("key", "check")
            for day, events in sorted(self.late.items())
        }
        return RepeatedRows(
            _sorted(self.dropped),
            _sorted(self.clicked),
            _sorted(self.later),
            late,
            dict(sorted(self.repeated.items())),
            dict(sorted(self.corrected.items())),
        )


def _sorted(places: list[int]) -> np.ndarray:
    return np.sort(np.array(places, np.int64))
