"""Rows of the same event: hashes of its key, which of the rows stays, and what that does to the blocks of a log.

An event's key is known by 128 bits, two xxhash64 with different seeds: the odds that any two of 10^12 keys share them
are 1 in 10^15.

Histories also need the events of users: who did what, and when.

Passes before the first one read them: ``day_parts`` says which parts of the logs there are, and an engine calls one of
the functions of a block here on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date

import numpy as np
import polars as pl

from pipeline.config.data import DataConfig
from pipeline.config.ingest import SamplingConfig, SplitConfig
from pipeline.core.errors import DataError
from pipeline.ingest.days import days_read
from pipeline.ingest.engines import IngestEngine
from pipeline.ingest.ids import hash_event_keys
from pipeline.ingest.parse import parse
from pipeline.ingest.schema import CLICKED_LATER, DAY, EVENT, EVENT_CHECK, DataSpec, HistoryPlan
from pipeline.ingest.sources import Block, RawBlock, Source
from pipeline.ingest.times import instants, standard
from pipeline.ingest.values import RejectedRows, text_of
from pipeline.records.dataset import LABEL

# The sources of a day, or (None) of the whole log, of which the columns of a schema are read.
LogSources = Callable[[date | None, DataSpec], Sequence[Source]]


@dataclass(frozen=True)
class DayParts:
    """The parts of the logs of ``day``, or (None) of all days, whose numbers go on from ``first``.

    ``numbers``: those of the parts of each source.
    """

    day: date | None
    first: int
    parts: list[Source]
    numbers: list[range]


def day_parts(engine: IngestEngine, data: DataConfig, spec: DataSpec, sources: LogSources) -> Iterator[DayParts]:
    """Yield what a pass before the first one reads, day by day, in parts that are numbered over all days.

    Args:
        engine: divides sources into the parts that it reads.
        data: the logs.
        spec: the schema of the columns that are read.
        sources: returns those of a day, or of the whole log, as pass 1 reads them.
    """
    count = 0
    for day in days_read(data):
        parts, numbers = list[Source](), list[range]()
        for source in sources(day or next(iter(data.days), None), spec):
            of_source = engine.parts(source)
            first = count + len(parts)
            numbers.append(range(first, first + len(of_source)))
            parts += of_source
        yield DayParts(day, count, parts, numbers)
        count += len(parts)


def narrow_to_key(spec: DataSpec) -> DataSpec:
    """Narrow ``spec`` to what is read of a row to find its event: label, key and day.

    Everything else is left out, so that a row whose features cannot be read still has an event.
    """
    wanted = {spec.label, spec.event_key, spec.day_column, spec.timestamp}
    columns = {name: override for name, override in spec.columns.items() if name in wanted}
    return replace(
        spec,
        dense=(),
        sparse=(),
        tasks=(),
        row_weight=None,
        sampling=SamplingConfig(),
        hour_column=None,
        true_probability=False,
        columns=columns,
        sequences=(),
        row_time=None,
        histories=(),
        split=SplitConfig(),
        split_time=None,
    )


def find_events(spec: DataSpec, day: int, block: Block) -> pl.DataFrame:
    """Return the events of the rows of ``block`` that parse; ``day``: that of rows that carry none.

    Columns: two hashes of the key, whether the row came with a click, its day and its line.
    """
    raw = block.read()
    parsed = parse(raw.frame.select(list(spec.columns)), raw.lines, spec)
    frame = parsed.frame
    own_day = frame[DAY] if DAY in frame.columns else pl.Series([day], dtype=pl.Int32).new_from_index(0, frame.height)
    return pl.DataFrame(
        {
            "key": frame[EVENT],
            "check": frame[EVENT_CHECK],
            "clicked": frame[LABEL] > 0,
            "day": own_day,
            "line": pl.Series(parsed.lines, dtype=pl.Int64),
        }
    )


def find_clicks(spec: DataSpec, day: int, block: Block) -> pl.DataFrame:
    """Return the events of a block of a log of clicks alone, with one key per row; they have no lines."""
    raw, column = block.read(), spec.event_key or ""
    # A click without a key belongs to no row, so there is no row to reject.
    text = text_of(raw.frame[column], spec, RejectedRows(raw.lines)).drop_nulls()
    text = text.filter(~text.is_in(list(spec.missing)))
    key, check = hash_event_keys(text)
    found = pl.DataFrame({"key": key, "check": check})
    return found.with_columns(clicked=pl.lit(True), day=pl.lit(day, pl.Int32))


@dataclass(frozen=True)
class MarkedRows:
    """The lines (int64) of a part of a log whose rows are dropped, and those whose rows were clicked later.

    ``clicked``: by other rows of these logs; ``later``: by those of later datasets. As a ``RowChange`` it takes the
    dropped rows out, and adds a column that says which were clicked later, and by what (1, 2, or both: 3).
    """

    dropped: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    clicked: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    later: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def __call__(self, raw: RawBlock, lines: np.ndarray) -> RawBlock:
        stay = ~np.isin(lines, self.dropped)
        clicked = np.isin(lines, self.clicked).astype(np.int8)
        clicked += 2 * np.isin(lines, self.later).astype(np.int8)
        frame = raw.frame.with_columns(pl.Series(CLICKED_LATER, clicked)).filter(pl.Series(stay))
        # Dropped rows are still lines of the file and count in its numbering.
        further = raw.further_lines + int((~stay).sum())
        return replace(raw, frame=frame, lines=raw.lines[stay], further_lines=further)


_KEPT = {"key": pl.UInt64, "check": pl.UInt64, "time": pl.Int64, "day": pl.Int32, "counts": pl.Boolean}


def value_columns(plan: HistoryPlan) -> list[str]:
    """Return the columns of events that hold their values, one for each of ``plan.of``."""
    return [f"value{number}" for number in range(len(plan.of))]


def event_schema(plan: HistoryPlan) -> Mapping[str, type[pl.DataType]]:
    """Return the columns of events, except for the lines of their rows.

    ``key``, ``check``: hashes of the user. ``time``: microseconds since 1970. ``counts``: whether it is part of
    histories. Values are text, "" where missing.
    """
    return {**_KEPT, **dict.fromkeys(value_columns(plan), pl.String)}


def narrow_to_history(spec: DataSpec, plan: HistoryPlan) -> DataSpec:
    """Narrow ``spec`` to what is read of a row to find its event: label, day, user, time, and values."""
    narrowed = replace(narrow_to_key(spec), event_key=None)
    # Leave out the key unless a history reads it, because a row without a key has an event, too.
    columns = {}
    for name, override in narrowed.columns.items():
        if name != spec.event_key or name in plan.read:
            columns[name] = override
    for name in plan.read:
        columns[name] = spec.columns[name]
    return replace(narrowed, columns=columns)


def read_events(spec: DataSpec, plan: HistoryPlan, day: int, block: Block) -> pl.DataFrame:
    """Return the events of the rows of ``block`` whose label and day parse and that have a user and a time.

    Args:
        spec: from ``narrow_to_history``.
        plan: the history whose events they are.
        day: that of rows that carry none.
        block: some rows of a log.

    Returns:
        The columns of ``event_schema``, and ``line``.
    """
    raw = block.read()
    parsed = parse(raw.frame.select(list(spec.columns)), raw.lines, spec)
    frame = raw.frame.filter(pl.Series(np.isin(raw.lines, parsed.lines)))
    rejected = RejectedRows(parsed.lines)
    text, present = {}, {}
    for name in plan.read:
        if isinstance(frame[name].dtype, pl.List):
            raise DataError(
                f"{raw.file}: column {name!r} holds lists, expected one value a row: a row is one event of one user",
                hint=f"{plan.setting_of(name)}=<a column with one value a row>",
            )
        text[name] = text_of(frame[name], spec, rejected)
        is_missing = text[name].is_in(list(spec.missing)).fill_null(False)
        present[name] = text[name].set(is_missing, None)
    user = present[plan.by]
    # Missing users are hashed as well, to keep columns aligned; their events are removed at the end.
    key, check = hash_event_keys(user.fill_null(""))
    written = standard(frame[plan.time], text[plan.time], spec.time_format)
    time = instants(frame[plan.time], written, spec.time_zone or "UTC").dt.timestamp("us")
    own_day = parsed.frame[DAY] if DAY in parsed.frame.columns else pl.Series([day]).new_from_index(0, len(user))
    values = [present[column] for column in plan.of.values()]
    # The first value is what an event is of. Without it there is no event.
    counts = values[0].is_not_null()
    if plan.where == spec.label:
        counts &= parsed.frame[LABEL] > 0
    elif plan.where is not None:
        counts &= (text[plan.where].cast(pl.Float64, strict=False) > 0).fill_null(False)
    columns = {"key": key, "check": check, "time": time, "day": own_day.cast(pl.Int32), "counts": counts}
    for name, value in zip(value_columns(plan), values, strict=True):
        columns[name] = value.fill_null("")
    columns["line"] = pl.Series(parsed.lines, dtype=pl.Int64)
    return pl.DataFrame(columns).filter(user.is_not_null() & time.is_not_null() & ~pl.Series(rejected.bad))
