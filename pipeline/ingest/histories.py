"""Histories that a log does not have: for every row, what its user did before, in the log and the days before.

A pass of its own finds which events belong to which row, and keeps them in a temporary file. Each dataset keeps the
events of its own days (``histories/<name>/part-*.parquet``), and a night reads those of the days before that its
histories reach. Their checksums are part of the night's key, so a day that is ingested again with other events makes
the next days again.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from functools import partial

import numpy as np
import polars as pl

from pipeline.config.data import DataConfig
from pipeline.config.sequences import EVENT_TIME
from pipeline.ingest.days import day_number, settings_of
from pipeline.ingest.engines import IngestEngine
from pipeline.ingest.events import LogSources, day_parts, event_schema, narrow_to_history, read_events, value_columns
from pipeline.ingest.ids import as_lists
from pipeline.ingest.output import write_frame
from pipeline.ingest.repeats import around, of_named_days
from pipeline.ingest.schema import DAY_US, MINUTE_US, DataSpec, HistoryPlan
from pipeline.ingest.schema_of_config import data_spec
from pipeline.ingest.sources import LINE_BITS, RawBlock
from pipeline.ingest.spill import KeyPartitions, Spill
from pipeline.records.dataset import HISTORIES
from pipeline.store.artifacts import Draft, Store
from pipeline.store.manifest import Artifact

_PART_ROWS = 1 << 20
log = logging.getLogger(__name__)


def folder(plan: HistoryPlan) -> str:
    """Return the folder of a dataset with the events of a history."""
    return f"{HISTORIES}/{plan.name}"


class Keeper:
    """Writes the events that count of a dataset's days, for later days; nothing asks for those of a whole log."""

    def __init__(self, draft: Draft, plan: HistoryPlan, compression: str, *, active: bool) -> None:
        self.draft, self.plan, self.compression, self.active = draft, plan, compression, active
        self._waiting: list[pl.DataFrame] = []
        self._parts = 0

    def add(self, events: pl.DataFrame) -> None:
        if self.active:
            self._waiting.append(events.filter("counts").select(*event_schema(self.plan)))
        if sum(frame.height for frame in self._waiting) >= _PART_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write the waiting events; a dataset without events has a file without rows."""
        if self._waiting and (self._parts == 0 or any(frame.height for frame in self._waiting)):
            events, self._waiting = pl.concat(self._waiting), []
            named = events.rename(_file_columns(self.plan))
            write_frame(self.draft, f"{folder(self.plan)}/part-{self._parts:05d}.parquet", named, self.compression)
            self._parts += 1


def _file_columns(plan: HistoryPlan) -> dict[str, str]:
    # Maps columns of events to those in files, whose names say what the values are of.
    columns = {}
    for value, (name, column) in zip(value_columns(plan), plan.of.items(), strict=True):
        columns[value] = f"of:{name}={column}"
    return columns


def datasets_before(store: Store, data: DataConfig, plan: HistoryPlan) -> dict[date, Artifact]:
    """Return the datasets of the days before those of ``data.day`` that histories reach, by day.

    Those that keep the events of ``plan`` go first: another model of this log may keep others, or none.
    """
    if not data.days:
        return {}
    first = data.days[0]
    found = around(
        store,
        data,
        first - timedelta(days=plan.reach),
        first - timedelta(days=1),
        lambda dataset: _has_same_events(dataset, plan),
    )
    return {day: datasets[0] for day, datasets in found.items()}


def _has_same_events(dataset: Artifact, plan: HistoryPlan) -> bool:
    # Whether a dataset keeps the events that `plan` asks for: of the same users, rows and columns.
    settings = settings_of(dataset)
    sequence = settings.get("sequences", {}).get(plan.name, {})
    history, columns = sequence.get("history", {}), dict[str, str]()
    for name, event in sequence.get("features", {}).items():
        table = event.get("table")
        # As in `schema_of_config`: its own column, else that of the feature whose table it shares, else its name.
        of_table = settings.get("sparse", {}).get(table, {}).get("column") or table
        columns[name] = event.get("column") or of_table or name
    same = (history.get("by"), history.get("where")) == (plan.by, plan.where)
    return same and plan.of.items() <= columns.items()


def _files(dataset: Artifact, plan: HistoryPlan) -> list[str]:
    return sorted(name for name in dataset.files if name.startswith(f"{folder(plan)}/"))


def history_marks(store: Store | None, data: DataConfig) -> list[str]:
    """Return what of the days before decides the histories of ``data.day``, for its fingerprint."""
    if store is None:
        return []
    checksums = []
    for plan in data_spec(data).histories:
        for dataset in datasets_before(store, data, plan).values():
            if not _has_same_events(dataset, plan):
                continue
            for name in _files(dataset, plan):
                checksums.append(dataset.files[name].checksum)
    return checksums


def events_before(store: Store, data: DataConfig, plan: HistoryPlan) -> Iterator[pl.DataFrame]:
    """Yield the events of the days before, a file at a time; log which days have none."""
    datasets = datasets_before(store, data, plan)
    known = set()
    for day, dataset in datasets.items():
        if not _files(dataset, plan):
            continue
        known.add(day)
        if not _has_same_events(dataset, plan):
            log.warning(
                "%s keeps events of other columns, or by another data.sequences.%s.history: its rows are in no history",
                dataset.path,
                plan.name,
            )
            continue
        for events in _read_events(store, dataset, plan):
            yield events.filter(pl.col("day") == day_number(day))
    if not data.days:
        return
    first = data.days[0]
    wanted = [first - timedelta(days=back) for back in range(1, plan.reach)]
    missing = sorted(set(wanted) - known)
    if missing:
        log.info(
            "data.sequences.%s: of %d days before %s, %d have no events kept, first %s: histories begin later",
            plan.name,
            len(wanted),
            first,
            len(missing),
            missing[0],
        )


def _read_events(store: Store, dataset: Artifact, plan: HistoryPlan) -> Iterator[pl.DataFrame]:
    columns = _file_columns(plan)
    for name in _files(dataset, plan):
        store.verify(dataset, name)
        with store.open(f"{dataset.path}/{name}") as source:
            events = pl.read_parquet(source.read())
        names = {in_file: column for column, in_file in columns.items()}
        yield events.rename(names).select(*event_schema(plan))


# Elements of lists that are built at a time.
_ELEMENTS = 1 << 21
# Low bits of a row's place; rows that differ only in these are stored together.
_PIECE_BITS = 16
# Maximum number of events of histories in memory before they are written.
_WAITING_EVENTS = 1 << 22
NO_PLACE = -1


@dataclass(frozen=True)
class EventRanges:
    """The events of each row: those from ``first`` to before ``last`` in the order of events."""

    first: np.ndarray
    last: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return self.last - self.first


def event_ranges(
    users: np.ndarray, times: np.ndarray, row_users: np.ndarray, row_times: np.ndarray, plan: HistoryPlan
) -> EventRanges:
    """Find the events of each row: of its user, strictly before its time less the lag, within the days, the newest.

    ``users`` (int64, from 0) and ``times`` (int64, microseconds): of events, ordered by both.
    """
    lag = round(plan.lag_minutes * MINUTE_US)
    # One number for each user and time, in their order, so that one binary search finds a user's events before a time.
    ranks = np.unique(times)
    width = len(ranks) + 1
    ordered = users * width + np.searchsorted(ranks, times)
    last = np.searchsorted(ordered, row_users * width + np.searchsorted(ranks, row_times - lag))
    if plan.days is not None:
        oldest = row_times - plan.days * DAY_US
    else:
        oldest = np.full_like(row_times, ranks[0] if len(ranks) else 0)
    first = np.searchsorted(ordered, row_users * width + np.searchsorted(ranks, oldest))
    first = np.maximum(first, last - plan.most)
    # A lag longer than `days` leaves no event: the range is then empty, not negative.
    return EventRanges(np.minimum(first, last), last)


def cut_histories(events: pl.DataFrame, plan: HistoryPlan) -> Iterator[pl.DataFrame]:
    """Yield ``place`` and the history (column ``plan.name``) of the rows that have one, some rows at a time.

    ``events``: all that users did (``event_schema``) with ``place``, negative if the row is not of this dataset.
    Events at the same time are ordered by what they are of, so that the order of the log plays no part.
    """
    whole = events.sort("key", "check", "time", *value_columns(plan))
    new_user = pl.any_horizontal(pl.col("key", "check") != pl.col("key", "check").shift()).fill_null(False)
    users = whole.select(new_user.cast(pl.Int64).cum_sum()).to_series().to_numpy()
    times = whole["time"].to_numpy()
    counts, is_row = whole["counts"].to_numpy(), (whole["place"] >= 0).to_numpy()
    ranges = event_ranges(users[counts], times[counts], users[is_row], times[is_row], plan)

    # An event is a struct of its values, as text, and its time.
    fields = []
    for column, name in zip(value_columns(plan), plan.of, strict=True):
        fields.append(pl.col(column).alias(name))
    fields.append(pl.from_epoch("time", time_unit="us").dt.replace_time_zone("UTC").alias(EVENT_TIME))
    structs = whole.filter("counts").select(fields).to_struct(plan.name)

    # Sort the rows by place, and cut them where about _ELEMENTS events are together.
    places = whole["place"].to_numpy()[is_row]
    order = np.argsort(places)
    order = order[ranges.lengths[order] > 0]
    ends = np.cumsum(ranges.lengths[order])
    total = ends[-1] if len(ends) else 0
    cuts = np.searchsorted(ends, np.arange(_ELEMENTS, total + _ELEMENTS, _ELEMENTS))
    for rows in np.split(order, np.unique(cuts)):
        if not len(rows):
            continue
        first, lengths = ranges.first[rows], ranges.lengths[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        index = np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], lengths)
        yield pl.DataFrame([pl.Series("place", places[rows]), as_lists(structs.gather(index), lengths)])


class HistoryBuilder:
    """Takes in the events of this log and of the days before, then gives every row its history."""

    def __init__(self, plan: HistoryPlan) -> None:
        self.plan = plan
        self._users = KeyPartitions()

    def add(self, events: pl.DataFrame, part: int | None = None) -> None:
        """Add ``events``: of a ``part`` of this log with their lines, or (None) of days before."""
        place = pl.lit(NO_PLACE, pl.Int64)
        if part is not None:
            # Part and line in one number, so that rows of a block lie together in the order of places.
            place = pl.col("line") + (part << LINE_BITS)
        self._users.add(events.select(*event_schema(self.plan), place.alias("place")))

    def build(self) -> RowHistories:
        """Build the histories of all rows of this log, once all events were added."""
        built = RowHistories(self.plan)
        for events in self._users:
            # A partition has all events of its users, so it is cut by itself.
            for rows in cut_histories(events, self.plan):
                built.add(rows)
        # Lookups read only pieces that were written to the file.
        built.flush()
        return built


class RowHistories:
    """The histories of a log's rows, in pieces of rows that lie together."""

    def __init__(self, plan: HistoryPlan) -> None:
        self.plan = plan
        self._spill = Spill()
        self._pieces: dict[int, list[int]] = {}
        self._waiting: list[pl.DataFrame] = []
        self._waiting_events = 0

    def add(self, rows: pl.DataFrame) -> None:
        self._waiting.append(rows)
        self._waiting_events += int(rows[self.plan.name].list.len().sum())
        if self._waiting_events >= _WAITING_EVENTS:
            self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        rows = pl.concat(self._waiting).sort("place")
        self._waiting, self._waiting_events = [], 0
        places = rows["place"].to_numpy() >> _PIECE_BITS
        pieces, starts = np.unique(places, return_index=True)
        for piece, start, stop in zip(pieces.tolist(), starts, [*starts[1:], rows.height], strict=True):
            block = rows.slice(int(start), int(stop - start)).rechunk().write_ipc(None, compression="lz4").getvalue()
            self._pieces.setdefault(piece, []).append(self._spill.write(block))

    def of(self, part: int, lines: np.ndarray) -> pl.Series:
        """Return the histories of the rows at ``lines`` of ``part``: lists of structs, null where there is none."""
        places = pl.Series("place", lines.astype(np.int64) + (part << LINE_BITS))
        event = pl.Struct({**dict.fromkeys(self.plan.of, pl.String), EVENT_TIME: pl.Datetime("us", "UTC")})
        # The empty piece gives the column its type where none of these rows has a history.
        near = [pl.DataFrame(schema={"place": pl.Int64, self.plan.name: pl.List(event)})]
        for piece in np.unique(places.to_numpy() >> _PIECE_BITS).tolist():
            for number in self._pieces.get(piece, []):
                near.append(pl.read_ipc(io.BytesIO(self._spill.block(number))))
        return places.to_frame().join(pl.concat(near), on="place", how="left", maintain_order="left")[self.plan.name]


@dataclass(frozen=True)
class PartHistories:
    """The histories of the rows of ``part``. As a ``RowChange`` it adds them to a block, a column each.

    They lie in temporary files of this process, so only this process can read such a block.
    """

    part: int
    histories: Sequence[RowHistories] = field(repr=False)

    def __call__(self, raw: RawBlock, lines: np.ndarray) -> RawBlock:
        columns = [histories.of(self.part, lines) for histories in self.histories]
        return replace(raw, frame=raw.frame.hstack(columns))


def build_histories(
    engine: IngestEngine, data: DataConfig, draft: Draft, spec: DataSpec, sources: LogSources, compression: str
) -> dict[date | None, list[list[PartHistories]]]:
    """Read the events of the logs of ``data``, keep those of its days, and build histories with those of earlier days.

    Returns:
        The histories of the sources' parts, for ``wrap_sources``.
    """
    histories = list[RowHistories]()
    parts_of = dict[date | None, list[list[PartHistories]]]()
    for plan in spec.histories:
        builder, keeper = HistoryBuilder(plan), Keeper(draft, plan, compression, active=bool(data.days))
        wanted = narrow_to_history(spec, plan)
        for logs in day_parts(engine, data, wanted, sources):
            parts_of[logs.day] = of_day = []
            for numbers in logs.numbers:
                of_day.append([PartHistories(number, histories) for number in numbers])
            file_day = None if logs.day is None else day_number(logs.day)
            for at, events in engine.map_blocks(logs.parts, partial(read_events, wanted, plan, file_day or 0)):
                kept = of_named_days(events, data, spec, file_day)
                builder.add(kept, logs.first + at)
                keeper.add(kept)
        keeper.flush()
        for events in events_before(draft.store, data, plan):
            builder.add(events)
        histories.append(builder.build())
    return parts_of
