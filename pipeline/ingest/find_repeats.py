"""The pass before the first one where rows have events: which rows are repetitions, and which were clicked later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date

import polars as pl

from pipeline.config.data import DataConfig
from pipeline.config.ingest import SplitConfig
from pipeline.core.errors import DataError
from pipeline.ingest import days, history
from pipeline.ingest.engines import IngestEngine
from pipeline.ingest.events import FindClicks, FindEvents, MarkedRows, narrow
from pipeline.ingest.file_source import file_sources
from pipeline.ingest.rawfiles import find_files
from pipeline.ingest.repeats import CLICK, ROW, RepeatedRows, Repeats
from pipeline.ingest.schema import DataSpec
from pipeline.ingest.sources import Source, wrap_sources
from pipeline.store.artifacts import Store

# MiB of a block of a log of clicks.
CLICKS_MIB = 4
LogSources = Callable[[date | None, DataSpec], tuple[list[Source], int]]


@dataclass(frozen=True)
class FoundRepeats:
    """``judged``, and the marks of the sources' parts: of a day, or (None) of the whole log."""

    judged: RepeatedRows
    marks: dict[date | None, list[list[MarkedRows]]]

    def marked(self, day: date | None, sources: Sequence[Source]) -> list[Source]:
        """Return the ``sources`` of ``day`` without the rows that are dropped. DataError if there are others now."""
        return wrap_sources(day, sources, self.marks)


def find_repeats(
    engine: IngestEngine, data: DataConfig, store: Store, spec: DataSpec, logs: LogSources
) -> FoundRepeats:
    """Read the events of the logs of ``data``, and judge them with those of the days around."""
    wanted, count = narrow(spec), 0
    repeats = Repeats(data.dedupe.days, data.label.window_days)
    groups: list[date | None] = list(data.days) if data.has_file_per_day else [None]
    # The parts of all sources are numbered in one row; of each source the range of its parts.
    ranges: dict[date | None, list[range]] = {}
    for day in groups:
        file_day = None if day is None else days.day_number(day)
        first, parts, ranges[day] = count, list[Source](), []
        sources, _ = logs(day or next(iter(data.days), None), wanted)
        for source in sources:
            of_source = engine.parts(source)
            ranges[day].append(range(count, count + len(of_source)))
            parts += of_source
            count += len(of_source)
        for number, events in engine.map_blocks(parts, FindEvents(wanted, file_day or 0)):
            repeats.add(of_named_days(events, data, spec, file_day), ROW, part=first + number, own_day=file_day)
    for clicks_day in data.days:
        _add_clicks(engine, repeats, data, wanted, clicks_day)
    history.add_other_days(repeats, data, store)
    judged = repeats.judge()
    marks: dict[date | None, list[list[MarkedRows]]] = {}
    for day, sources_ranges in ranges.items():
        marks[day] = [[judged.marks(number) for number in numbers] for numbers in sources_ranges]
    return FoundRepeats(judged, marks)


def of_named_days(events: pl.DataFrame, data: DataConfig, spec: DataSpec, file_day: int | None) -> pl.DataFrame:
    """Return the events of rows that this dataset takes in: of the days that are named, or of all."""
    if not data.days or not spec.has_day:
        return events
    if file_day is not None and data.late != "own_day":
        return events.filter(pl.col("day") == file_day)
    first, last = days.day_number(data.days[0]), days.day_number(data.days[-1])
    events = events.filter(pl.col("day").is_between(first, last))
    if file_day is None:
        return events
    return events.filter((pl.col("day") - file_day).abs() <= data.late_days)


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
