"""The pass before the first one where rows have events: which rows are repetitions, and which were clicked later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date

import polars as pl

from pipeline.config.data import DataConfig
from pipeline.config.ingest import SplitConfig
from pipeline.errors import DataError
from pipeline.ingest import days, history
from pipeline.ingest.engines import IngestEngine
from pipeline.ingest.events import FindClicks, FindEvents, MarkedRows, MarkedSource, narrow
from pipeline.ingest.file_source import file_sources
from pipeline.ingest.rawfiles import find_files
from pipeline.ingest.repeats import CLICK, ROW, RepeatedRows, Repeats
from pipeline.ingest.schema import DataSpec
from pipeline.ingest.sources import Source
from pipeline.store.artifacts import Store

CLICKS_MIB = 4  # of a block of a log of clicks
LogSources = Callable[[date | None, DataSpec], tuple[list[Source], int]]


@dataclass(frozen=True)
class FoundRepeats:
    """``judged``, and the marks of the sources of each group of files: of a day, or (None) of the whole log."""

    judged: RepeatedRows
    marks: dict[date | None, list[list[MarkedRows]]]

    def marked(self, day: date | None, sources: Sequence[Source]) -> list[Source]:
        """The ``sources`` of ``day`` without the rows that are dropped. DataError where there are others by now."""
        known = self.marks[day if day in self.marks else None]
        if len(known) != len(sources):
            raise DataError(
                f"the logs of {day} changed while they were read: {len(known)} files, then {len(sources)}",
                hint="run the same command once all of them are delivered",
            )
        return [MarkedSource(source, marks) for source, marks in zip(sources, known, strict=True)]


def find_repeats(
    engine: IngestEngine, data: DataConfig, store: Store, spec: DataSpec, logs: LogSources
) -> FoundRepeats:
    """Read the events of the logs of ``data``, and judge them with those of the days around."""
    wanted, count = narrow(spec), 0
    repeats = Repeats(data.dedupe.days, data.label.window_days)
    groups: list[date | None] = [*data.days] if data.has_file_per_day else [None]
    numbers: dict[date | None, list[list[int]]] = {}
    for day in groups:
        own_day = None if day is None else days.day_number(day)
        parts = [list(engine.parts(source)) for source in logs(day or next(iter(data.days), None), wanted)[0]]
        first, numbers[day] = count, []
        for own in parts:
            numbers[day].append([*range(count, count + len(own))])
            count += len(own)
        flat = [part for own in parts for part in own]
        for number, events in engine.map_blocks(flat, FindEvents(wanted, own_day or 0)):
            repeats.add(of_named_days(events, data, spec, own_day), ROW, part=first + number, own_day=own_day)
    for clicks_day in data.days:
        _add_clicks(engine, repeats, data, wanted, clicks_day)
    history.add_other_days(repeats, data, store)
    judged = repeats.judge()
    marks = {day: [[judged.marks(number) for number in own] for own in each] for day, each in numbers.items()}
    return FoundRepeats(judged, marks)


def of_named_days(events: pl.DataFrame, data: DataConfig, spec: DataSpec, own_day: int | None) -> pl.DataFrame:
    """The events of rows that this dataset takes in: of the days that are named, or of all."""
    if not data.days or not spec.has_day:
        return events
    if own_day is not None and data.late != "own_day":
        return events.filter(pl.col("day") == own_day)
    named = [days.day_number(day) for day in data.days]
    events = events.filter(pl.col("day").is_between(named[0], named[-1]))
    return events if own_day is None else events.filter((pl.col("day") - own_day).abs() <= data.late_days)


def _add_clicks(engine: IngestEngine, repeats: Repeats, data: DataConfig, spec: DataSpec, day: date) -> None:
    if data.label.late_path is None:
        return
    path, column = days.filled(data.label.late_path, day), spec.event_key or ""
    try:
        files = find_files(path)
    except DataError:
        raise days.incomplete(day, [f"there are no files at {path} (data.label.late_path)"]) from None
    keys = DataSpec(
        label=column,
        positive=spec.positive,
        negative=spec.negative,
        dense=(),
        sparse=(),
        day_column=None,
        timestamp=None,
        true_probability=False,
        missing=spec.missing,
        strip=spec.strip,
        split=SplitConfig(),
        columns={column: "data.dedupe.key"},
        event_key=column,
    )
    sources = file_sources(data, keys, files, CLICKS_MIB)
    for _, events in engine.map_blocks(sources, FindClicks(keys, days.day_number(day))):
        repeats.add(events, CLICK)
