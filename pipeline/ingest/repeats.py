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
from pipeline.ingest.sources import LINE_BITS
from pipeline.ingest.spill import KeyPartitions

# A row of an earlier dataset, a row of this one, a click without a row, a click that an earlier dataset has corrected,
# and one that a later dataset brought.
FORMER, ROW, CLICK, KNOWN, LATER = 0, 1, 2, 3, 4


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
        """Return the lines of part number ``part`` of the logs."""
        lines = []
        for places in (self.dropped, self.clicked, self.later):
            low, high = np.searchsorted(places, [part << LINE_BITS, (part + 1) << LINE_BITS])
            lines.append(places[low:high] - (part << LINE_BITS))
        return MarkedRows(*lines)


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
        """Decide which rows stay, once all events were added."""
        verdict = _Verdict(self.days, self.window)
        for events in self._partitions:
            shared = events.filter(pl.len().over("key", "check") > 1)
            verdict.add(shared.sort("key", "check", "day", "kind", "away", "place"))
        return verdict.rows()


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
        current: tuple[int, int] | None = None
        # Day, kind and place of the row that stays, and whether its click is known.
        first: tuple[int, int, int] | None = None
        click_known = False
        for key, check, day, kind, _, place, clicked in events.iter_rows():
            if (key, check) != current:
                current, first = (key, check), None
            if kind in (FORMER, ROW) and (first is None or day - first[0] > self.days):
                first, click_known = (day, kind, place), clicked
                continue
            if kind == ROW:
                self.dropped.append(place)
                self.repeated[day] += 1
            if not clicked or first is None or click_known or not self.window:
                continue
            first_day, first_kind, first_place = first
            if not 0 <= day - first_day <= self.window:
                continue
            # A click that the first row came without corrects that row's label, once.
            click_known = True
            if kind in (ROW, CLICK) and first_kind == FORMER:
                self.late.setdefault(first_day, []).append((key, check))
            elif kind in (ROW, CLICK):
                self.clicked.append(first_place)
                self.corrected[first_day] += 1
            elif kind == LATER and first_kind == ROW:
                self.later.append(first_place)
                self.corrected[first_day] += 1

    def rows(self) -> RepeatedRows:
        late = {}
        for day, events in sorted(self.late.items()):
            frame = pl.DataFrame(events, schema={"key": pl.UInt64, "check": pl.UInt64}, orient="row")
            late[day] = frame.sort("key", "check")
        return RepeatedRows(
            np.sort(np.array(self.dropped, np.int64)),
            np.sort(np.array(self.clicked, np.int64)),
            np.sort(np.array(self.later, np.int64)),
            late,
            dict(sorted(self.repeated.items())),
            dict(sorted(self.corrected.items())),
        )
