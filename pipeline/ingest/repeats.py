"""Decides which rows of an event stay, and which labels later clicks correct: exact, in bounded memory.

Events are in a temporary file, partitioned by the hash of their key, so that all rows of an event are in one partition.
Each partition is judged by itself. What stays in memory is 8 bytes for each row that is dropped or corrected.

A dataset with ``data.dedupe`` keeps the events of its rows (``events/``), as they came. Where clicks of its logs
belong to rows of days before, it keeps their events in ``corrected/<day>.parquet``: its own training sees these rows
again, and the next ingestion of that day corrects their labels.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import partial
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq

from pipeline.config.data import DataConfig
from pipeline.config.ingest import SplitConfig
from pipeline.core.errors import DataError
from pipeline.ingest.days import day_datasets, day_number, day_of, filled, incomplete, settings_of
from pipeline.ingest.engines import IngestEngine
from pipeline.ingest.events import LogSources, MarkedRows, day_parts, find_clicks, find_events, narrow_to_key
from pipeline.ingest.file_source import file_sources
from pipeline.ingest.rawfiles import find_files, fingerprint
from pipeline.ingest.schema import DataSpec
from pipeline.ingest.sources import LINE_BITS
from pipeline.ingest.spill import KeyPartitions
from pipeline.records.dataset import EVENTS, dataset_path
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

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
        # The high bits of a place are its part, the low ones its line, so in sorted places a part is one range.
        first, behind = part << LINE_BITS, (part + 1) << LINE_BITS
        lines = []
        for places in (self.dropped, self.clicked, self.later):
            low, high = np.searchsorted(places, [first, behind])
            lines.append(places[low:high] - first)
        return MarkedRows(*lines)


class Repeats:
    """Events of rows and clicks. The first of rows at most ``days`` apart stays; a click counts for ``window``."""

    def __init__(self, days: int, window: int) -> None:
        self.days, self.window = max(days, window), window
        self._partitions = KeyPartitions()
        self._dropped: list[int] = []
        self._clicked: list[int] = []
        self._later: list[int] = []
        self._late: dict[int, list[tuple[int, int]]] = {}
        self._repeated, self._corrected = Counter[int](), Counter[int]()

    def add(self, events: pl.DataFrame, kind: int, *, part: int = 0, own_day: int | None = None) -> None:
        """Add ``events`` (of ``find_events``, or without lines) of a ``part`` of the logs with files of ``own_day``."""
        line = pl.col("line") if "line" in events.columns else pl.lit(0, pl.Int64)
        # If an event has two rows on one day, the row from the files of that day is sorted first and stays.
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
        for events in self._partitions:
            # Most events have a single row, so nothing has to be decided: the slow loop below sees only the others.
            shared = events.filter(pl.len().over("key", "check") > 1)
            self._decide(shared.sort("key", "check", "day", "kind", "away", "place"))
        late = {}
        for day, of_day in sorted(self._late.items()):
            frame = pl.DataFrame(of_day, schema={"key": pl.UInt64, "check": pl.UInt64}, orient="row")
            late[day] = frame.sort("key", "check")
        return RepeatedRows(
            np.sort(np.array(self._dropped, np.int64)),
            np.sort(np.array(self._clicked, np.int64)),
            np.sort(np.array(self._later, np.int64)),
            late,
            dict(sorted(self._repeated.items())),
            dict(sorted(self._corrected.items())),
        )

    def _decide(self, events: pl.DataFrame) -> None:
        # Goes through events in order: by key, day, kind, place.
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
                self._dropped.append(place)
                self._repeated[day] += 1
            if not clicked or first is None or click_known or not self.window:
                continue
            first_day, first_kind, first_place = first
            if not 0 <= day - first_day <= self.window:
                continue
            # A click corrects, once, the label of the first row if that came without one. A KNOWN click has done so in
            # an earlier dataset: it only keeps further clicks from doing it again.
            click_known = True
            if kind in (ROW, CLICK) and first_kind == FORMER:
                self._late.setdefault(first_day, []).append((key, check))
            elif kind in (ROW, CLICK):
                self._clicked.append(first_place)
                self._corrected[first_day] += 1
            elif kind == LATER and first_kind == ROW:
                self._later.append(first_place)
                self._corrected[first_day] += 1


_CORRECTED = re.compile(r"corrected/(\d{4}-\d\d-\d\d)\.parquet")
_SPAN = re.compile(r"(\d{4}-\d\d-\d\d)(?:\.\.(\d{4}-\d\d-\d\d))?")


def reach(data: DataConfig) -> int:
    """Return the number of days before a row's own whose events matter to it."""
    if data.dedupe.key is None:
        return 0
    return max(data.dedupe.days, data.label.window_days)


def keeps_events(data: DataConfig) -> bool:
    """Whether later days ask for the events of a dataset."""
    return bool(data.days) and reach(data) > 0


def corrected_name(day: date) -> str:
    """Return the file of a dataset with the events of ``day`` whose clicks it brought."""
    return f"corrected/{day}.parquet"


def around(
    store: Store, data: DataConfig, first: date, last: date, prefer: Callable[[Artifact], bool]
) -> dict[date, list[Artifact]]:
    """Return the datasets of the days from ``first`` to ``last``: those that ``prefer`` accepts first, newest first.

    Those that have one of the days of ``data.day`` are left out.
    """
    datasets: dict[date, list[Artifact]] = {}
    for entry in store.names(dataset_path(data.name, "", "")):
        match = _SPAN.fullmatch(entry)
        if match is None:
            continue
        begin, end = date.fromisoformat(match[1]), date.fromisoformat(match[2] or match[1])
        if end < first or begin > last or (begin <= data.days[-1] and end >= data.days[0]):
            continue
        found = day_datasets(store, data.name, entry, prefer)
        if not found:
            continue
        for shift in range((max(begin, first) - min(end, last)).days, 1):
            datasets.setdefault(min(end, last) + timedelta(days=shift), []).extend(found)
    for of_day in datasets.values():
        of_day.sort(key=lambda dataset: (prefer(dataset), dataset.created), reverse=True)
    return dict(sorted(datasets.items()))


def _with_events(store: Store, data: DataConfig, first: date, last: date) -> dict[date, list[Artifact]]:
    # Returns what `around` does: datasets that keep events of the same key and label go first, since another model of
    # this log may keep none.
    def keeps(dataset: Artifact) -> bool:
        settings = settings_of(dataset)
        dedupe, label = settings.get("dedupe", {}), settings.get("label", {})
        same = (dedupe.get("key"), label.get("column"), label.get("positive"))
        if same != (data.dedupe.key, data.label.column, data.label.positive):
            return False
        return max(dedupe.get("days", 0), label.get("window_days", 0)) > 0

    return around(store, data, first, last, keeps)


def all_before(store: Store, data: DataConfig) -> dict[date, list[Artifact]]:
    """Return the datasets of the days before ``data.day`` whose events matter to it, for each day the best first."""
    first = data.days[0]
    return _with_events(store, data, first - timedelta(days=reach(data)), first - timedelta(days=1))


def datasets_before(store: Store, data: DataConfig) -> dict[date, Artifact]:
    """Return the dataset of each day before ``data.day`` whose events matter to it."""
    return {day: datasets[0] for day, datasets in all_before(store, data).items()}


def _after(store: Store, data: DataConfig) -> list[tuple[Artifact, date]]:
    # Returns datasets of later days, each once, with the days of `data.day` that they have clicks of.
    last, window = data.days[-1], data.label.window_days
    if not window:
        return []
    later = _with_events(store, data, last + timedelta(days=1), last + timedelta(days=window))
    # Keyed by path, because a dataset of several days is found for each of them.
    artifacts = {datasets[0].path: datasets[0] for datasets in later.values()}
    corrections = []
    for _, artifact in sorted(artifacts.items()):
        for day in data.days:
            if corrected_name(day) in artifact.files:
                corrections.append((artifact, day))
    return corrections


def _corrections(dataset: Artifact, first: date) -> list[tuple[date, str]]:
    # Returns the days from `first` on that a dataset has corrections of, with their files.
    corrections = []
    for name in dataset.files:
        match = _CORRECTED.fullmatch(name)
        if match is None:
            continue
        day = date.fromisoformat(match[1])
        if day >= first:
            corrections.append((day, name))
    return sorted(corrections)


def event_marks(data: DataConfig, store: Store | None) -> list[str]:
    """Return what of other days decides the dataset of ``data.day``, for its fingerprint.

    Events count as they came, so a day that is ingested again with corrected labels changes no later day.
    """
    if data.dedupe.key is None or not data.days:
        return []
    words = list[str]()
    if data.label.late_path:
        for day in data.days:
            words.append(fingerprint(filled(data.label.late_path, day)) or "none")
    if store is None or not reach(data):
        return words
    earliest = data.days[0] - timedelta(days=reach(data))
    for day, dataset in datasets_before(store, data).items():
        words.append(str(dataset.summary.get("events", "")))
        for corrected, name in _corrections(dataset, earliest):
            if corrected < day:
                words.append(dataset.files[name].checksum)
    for artifact, day in _after(store, data):
        words.append(artifact.files[corrected_name(day)].checksum)
    return words


def add_other_days(repeats: Repeats, data: DataConfig, store: Store) -> None:
    """Add the events of the days around ``data.day``."""
    if not keeps_events(data):
        return
    former = datasets_before(store, data)
    for day, dataset in former.items():
        for events in events_of(store, dataset):
            repeats.add(events.filter(pl.col("day") == day_number(day)), FORMER)
    earliest = data.days[0] - timedelta(days=reach(data))
    for day, dataset in former.items():
        for _, name in _corrections(dataset, earliest):
            repeats.add(_clicks(store, dataset, name, day), KNOWN)
    for dataset, day in _after(store, data):
        # Sort them behind all clicks of these logs, so that a click that the logs have themselves comes first.
        last = day + timedelta(days=data.label.window_days)
        repeats.add(_clicks(store, dataset, corrected_name(day), last), LATER)


def label_dates(store: Store, data: DataConfig) -> dict[str, str]:
    """Return for a dataset's summary how far its labels reach and when they are final; {} if they are as they come."""
    if not data.label.window_days:
        return {}
    # The labels have the clicks of the day itself, and of later days without a gap.
    one = timedelta(days=1)
    last = data.days[-1]
    final = last + timedelta(days=data.label.window_days)
    later = _with_events(store, data, last + one, final)
    while last < final and last + one in later:
        last += one
    return {"labels_until": str(last), "labels_final": str(final)}


def _clicks(store: Store, dataset: Artifact, name: str, day: date) -> pl.DataFrame:
    store.verify(dataset, name)
    with store.open(f"{dataset.path}/{name}") as source:
        events = pl.read_parquet(source.read())
    return events.with_columns(day=pl.lit(day_number(day), pl.Int32), clicked=pl.lit(True))


def events_of(store: Store, dataset: Artifact) -> Iterator[pl.DataFrame]:
    """Yield the events of a dataset's rows, in the order of the rows of each split, a row group at a time."""
    for name in sorted(file for file in dataset.files if file.startswith(f"{EVENTS}/")):
        store.verify(dataset, name)
        with store.open(f"{dataset.path}/{name}") as source, pq.ParquetFile(source) as file:
            for group in range(file.num_row_groups):
                yield pl.DataFrame(pl.from_arrow(file.read_row_group(group)))


class EventDigest:
    """A checksum of events that does not depend on their order."""

    def __init__(self) -> None:
        self.rows = self.total = 0

    def add(self, events: pl.DataFrame) -> None:
        # The sum of a hash of each event does not depend on their order. All numbers wrap at 64 bits.
        mixed = events["key"].to_numpy() * np.uint64(0x9E3779B97F4A7C15) ^ events["check"].to_numpy()
        mixed = (mixed ^ events["day"].to_numpy().astype(np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= events["clicked"].to_numpy().astype(np.uint64) * np.uint64(0x94D049BB133111EB)
        self.rows += events.height
        self.total = (self.total + int(mixed.sum(dtype=np.uint64))) % (1 << 64)

    def __str__(self) -> str:
        return f"{self.rows}-{self.total:016x}"


def figures_by_day(days: Mapping[int, Any]) -> dict[str, Any]:
    """Return figures by day, days since 1970, as JSON holds them."""
    return {str(day_of(day)): figure for day, figure in sorted(days.items())}


# MiB of a block of a log of clicks.
CLICKS_MIB = 4


@dataclass(frozen=True)
class FoundRepeats:
    """``judged``, and the marks of the sources' parts for ``wrap_sources``."""

    judged: RepeatedRows
    marks: dict[date | None, list[list[MarkedRows]]]


def find_repeats(
    engine: IngestEngine, data: DataConfig, store: Store, spec: DataSpec, sources: LogSources
) -> FoundRepeats:
    """Read the events of the logs of ``data``, and judge them with those of the days around."""
    wanted, numbers = narrow_to_key(spec), dict[date | None, list[range]]()
    repeats = Repeats(data.dedupe.days, data.label.window_days)
    for logs in day_parts(engine, data, wanted, sources):
        numbers[logs.day] = logs.numbers
        file_day = None if logs.day is None else day_number(logs.day)
        for at, events in engine.map_blocks(logs.parts, partial(find_events, wanted, file_day or 0)):
            repeats.add(of_named_days(events, data, spec, file_day), ROW, part=logs.first + at, own_day=file_day)
    for clicks_day in data.days:
        _add_clicks(engine, repeats, data, wanted, clicks_day)
    add_other_days(repeats, data, store)
    judged = repeats.judge()
    marks: dict[date | None, list[list[MarkedRows]]] = {}
    for day, of_sources in numbers.items():
        marks[day] = [list(map(judged.marks, of_source)) for of_source in of_sources]
    return FoundRepeats(judged, marks)


def of_named_days(events: pl.DataFrame, data: DataConfig, spec: DataSpec, file_day: int | None) -> pl.DataFrame:
    """Return the events of rows that this dataset takes in: of the days that are named, or of all."""
    if not data.days or not spec.has_day:
        return events
    if file_day is not None and not (data.has_file_per_day and data.late == "own_day"):
        return events.filter(pl.col("day") == file_day)
    first, last = day_number(data.days[0]), day_number(data.days[-1])
    events = events.filter(pl.col("day").is_between(first, last))
    if file_day is None:
        return events
    return events.filter((pl.col("day") - file_day).abs() <= data.late_days)


def _add_clicks(engine: IngestEngine, repeats: Repeats, data: DataConfig, spec: DataSpec, day: date) -> None:
    if data.label.late_path is None:
        return
    path, column = filled(data.label.late_path, day), spec.event_key or ""
    try:
        files = find_files(path)
    except DataError:
        raise incomplete(day, [f"there are no files at {path} (data.label.late_path)"]) from None
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
    for _, events in engine.map_blocks(sources, partial(find_clicks, keys, day_number(day))):
        repeats.add(events, CLICK)
