"""Builds the histories of a log's rows: which events belong to which row, in a temporary file, in a pass of its own."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date

import numpy as np
import polars as pl

from pipeline.config.data import DataConfig
from pipeline.config.sequences import EVENT_TIME
from pipeline.errors import DataError
from pipeline.ingest.days import day_number
from pipeline.ingest.engines import IngestEngine
from pipeline.ingest.find_repeats import of_named_days
from pipeline.ingest.histories.event_store import Keeper, events_before
from pipeline.ingest.histories.events import ReadEvents, event_schema, narrow, value_columns
from pipeline.ingest.histories.plan import DAY_US, MINUTE_US, HistoryPlan
from pipeline.ingest.ids import as_lists
from pipeline.ingest.schema import DataSpec
from pipeline.ingest.sources import Block, RawBlock, Source, WrappedSource
from pipeline.ingest.spill import KeyPartitions, Spill
from pipeline.store.artifacts import Draft

_ELEMENTS = 1 << 21  # of lists that are made at a time


@dataclass(frozen=True)
class EventRanges:
    """Of each row, its events: those from ``first`` to before ``last`` in the order of events."""

    first: np.ndarray
    last: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """How many events each row has."""
        return self.last - self.first


def event_ranges(
    users: np.ndarray, times: np.ndarray, row_users: np.ndarray, row_times: np.ndarray, plan: HistoryPlan
) -> EventRanges:
    """The events of each row: of its user, strictly before its time less the lag, within the days, the newest ones.

    ``users`` (int64, from 0) and ``times`` (int64, microseconds): of events, ordered by both.
    """
    lag = round(plan.lag_minutes * MINUTE_US)
    ranks, width = np.unique(times), len(np.unique(times)) + 1
    ordered = users * width + np.searchsorted(ranks, times)

    def before(limit: np.ndarray) -> np.ndarray:
        return np.searchsorted(ordered, row_users * width + np.searchsorted(ranks, limit))

    last = before(row_times - lag)
    oldest = np.full_like(row_times, ranks[0] if len(ranks) else 0)
    first = np.maximum(before(oldest if plan.days is None else row_times - plan.days * DAY_US), last - plan.most)
    return EventRanges(np.minimum(first, last), last)


def cut_histories(events: pl.DataFrame, plan: HistoryPlan) -> Iterator[pl.DataFrame]:
    """``place`` and the history (column ``plan.name``) of the rows that have one, some rows at a time.

    ``events``: all that users did (``event_schema``) with ``place``, negative where the row is none of this dataset.
    Events at the same time are ordered by what they are of, so that the order of the log plays no part.
    """
    values = value_columns(plan)
    whole = events.sort("key", "check", "time", *values)
    other = pl.any_horizontal(pl.col("key", "check") != pl.col("key", "check").shift()).fill_null(False)
    users = whole.select(other.cast(pl.Int64).cum_sum()).to_series().to_numpy()
    counting, rows = whole["counts"].to_numpy(), (whole["place"] >= 0).to_numpy()
    times, kept = whole["time"].to_numpy(), _as_fields(whole.filter("counts"), plan)
    own = event_ranges(users[counting], times[counting], users[rows], times[rows], plan)
    places = whole["place"].to_numpy()[rows]
    order = np.argsort(places)
    order = order[own.lengths[order] > 0]
    ends = np.cumsum(own.lengths[order])
    cuts = np.searchsorted(ends, np.arange(_ELEMENTS, (ends[-1] if len(ends) else 0) + _ELEMENTS, _ELEMENTS))
    for some in np.split(order, np.unique(cuts)):
        if len(some):
            yield _lists(places[some], EventRanges(own.first[some], own.last[some]), kept, plan)


def _as_fields(events: pl.DataFrame, plan: HistoryPlan) -> pl.Series:
    time = pl.from_epoch("time", time_unit="us").dt.replace_time_zone("UTC").alias(EVENT_TIME)
    fields = [pl.col(own).alias(name) for own, name in zip(value_columns(plan), plan.of, strict=True)]
    return events.select(*fields, time).to_struct(plan.name)


def _lists(places: np.ndarray, own: EventRanges, kept: pl.Series, plan: HistoryPlan) -> pl.DataFrame:
    offsets = np.concatenate([[0], np.cumsum(own.lengths)])
    index = np.arange(offsets[-1]) + np.repeat(own.first - offsets[:-1], own.lengths)
    return pl.DataFrame([pl.Series("place", places), as_lists(kept.gather(index), offsets)])


_LINE_BITS = 40  # of a place: the number of a line, behind that of its part
_PIECE_BITS = 16  # of a place: rows that are kept together
_WAITING_EVENTS = 1 << 22  # of lists in memory before they are written
NO_PLACE = -1


class HistoryBuilder:
    """Takes in the events of this log and of the days before, then gives every row its history."""

    def __init__(self, plan: HistoryPlan) -> None:
        self.plan = plan
        self._users = KeyPartitions()

    def add(self, events: pl.DataFrame, part: int | None = None) -> None:
        """Take in ``events``: of a ``part`` of this log with their lines, or (None) of days before."""
        place = pl.lit(NO_PLACE, pl.Int64) if part is None else pl.col("line") + (part << _LINE_BITS)
        self._users.add(events.select(*event_schema(self.plan), place.alias("place")))

    def build(self) -> RowHistories:
        """The histories of all rows of this log, once all events are there."""
        built = RowHistories(self.plan)
        for events in self._users:
            for rows in cut_histories(events, self.plan):
                built.add(rows)
        built.flush()
        return built


class RowHistories:
    """The histories of a log's rows, in pieces of rows that lie together."""

    def __init__(self, plan: HistoryPlan) -> None:
        self.plan = plan
        self._spill = Spill()
        self._pieces: dict[int, list[int]] = {}
        self._waiting: list[pl.DataFrame] = []
        self._events = 0  # that wait

    def add(self, rows: pl.DataFrame) -> None:
        """Take in rows: ``place`` and history."""
        self._waiting.append(rows)
        self._events += int(rows[self.plan.name].list.len().sum())
        if self._events >= _WAITING_EVENTS:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if not self._waiting:
            return
        rows, self._waiting, self._events = pl.concat(self._waiting).sort("place"), [], 0
        places = rows["place"].to_numpy() >> _PIECE_BITS
        pieces, starts = np.unique(places, return_index=True)
        for piece, start, stop in zip(pieces.tolist(), starts, [*starts[1:], rows.height], strict=True):
            block = rows.slice(int(start), int(stop - start)).rechunk().write_ipc(None, compression="lz4").getvalue()
            self._pieces.setdefault(piece, []).append(self._spill.write(block))

    def of(self, part: int, lines: np.ndarray) -> pl.Series:
        """The histories of the rows at ``lines`` of ``part``: lists of structs, null where there is none."""
        places = pl.Series("place", lines.astype(np.int64) + (part << _LINE_BITS))
        near = pl.concat([self._no_rows(), *self._near(places)])
        return places.to_frame().join(near, on="place", how="left", maintain_order="left")[self.plan.name]

    def _near(self, places: pl.Series) -> Iterator[pl.DataFrame]:
        for piece in np.unique(places.to_numpy() >> _PIECE_BITS).tolist():
            for number in self._pieces.get(piece, []):
                yield pl.read_ipc(io.BytesIO(self._spill.block(number)))

    def _no_rows(self) -> pl.DataFrame:
        event = pl.Struct({**dict.fromkeys(self.plan.of, pl.String), EVENT_TIME: pl.Datetime("us", "UTC")})
        return pl.DataFrame(schema={"place": pl.Int64, self.plan.name: pl.List(event)})


@dataclass(frozen=True)
class HistoryBlock:
    """A block of ``part`` whose rows have their histories, a column each; ``before``: as of ``WrappedSource``."""

    block: Block
    part: int
    built: Sequence[RowHistories]
    before: int = 0

    @property
    def file(self) -> str:
        """As of the block."""
        return self.block.file

    def read(self) -> RawBlock:
        """The rows with their histories."""
        raw = self.block.read()
        lines = raw.lines - self.before
        return replace(raw, frame=raw.frame.hstack([each.of(self.part, lines) for each in self.built]))


@dataclass(frozen=True)
class HistorySource(WrappedSource):
    """A source of this process whose rows have their histories; ``numbers``: of its parts, or of all its rows."""

    numbers: Sequence[int]
    built: Sequence[RowHistories] = field(repr=False)

    def parts(self) -> list[Source]:
        """The source's parts, each with its number."""
        parts = zip(self.source.parts(), self.numbers, strict=True)
        return [HistorySource(part, [number], self.built) for part, number in parts]

    def blocks(self) -> Iterator[Block]:
        """The rows in order."""
        for block in self.source.blocks():
            yield HistoryBlock(block, self.numbers[0], self.built, self.before)


Sources = Callable[[date | None, DataSpec], Sequence[Source]]


@dataclass(frozen=True)
class BuiltHistories:
    """The histories of a log's rows, and the numbers of each source's parts: of a day, or (None) of the whole log."""

    histories: Sequence[RowHistories]
    numbers: Mapping[date | None, list[list[int]]]

    def added(self, day: date | None, sources: Sequence[Source]) -> list[Source]:
        """The ``sources`` of ``day``, whose rows have their histories. DataError where there are others by now."""
        known = self.numbers[day if day in self.numbers else None]
        if len(known) != len(sources):
            raise DataError(
                f"the logs of {day} changed while they were read: {len(known)} files, then {len(sources)}",
                hint="run the same command once all of them are delivered",
            )
        return [HistorySource(source, own, self.histories) for own, source in zip(known, sources, strict=True)]


def build_histories(
    engine: IngestEngine, data: DataConfig, draft: Draft, spec: DataSpec, sources: Sources, compression: str
) -> BuiltHistories:
    """Read the events of the logs of ``data``, keep those of its days, and build histories with those of days before.

    ``sources``: of a day, or of the whole log, as pass 1 reads them.
    """
    by_day = (data.has_file_per_day or data.format == "synthetic") and data.days
    groups: list[date | None] = [*data.days] if by_day else [None]
    histories, numbers = [], dict[date | None, list[list[int]]]()
    for plan in spec.histories:
        builder, keeper = HistoryBuilder(plan), Keeper(draft, plan, compression, active=bool(data.days))
        wanted, count = narrow(spec, plan), itertools.count()
        for day in groups:
            own_day = None if day is None else day_number(day)
            parts = [engine.parts(source) for source in sources(day or next(iter(data.days), None), wanted)]
            numbers[day] = [[next(count) for _ in own] for own in parts]
            flat = [*zip(itertools.chain(*numbers[day]), itertools.chain(*parts), strict=True)]
            read = ReadEvents(wanted, plan, own_day or 0)
            for place, events in engine.map_blocks([part for _, part in flat], read):
                taken = of_named_days(events, data, spec, own_day)
                builder.add(taken, flat[place][0])
                keeper.add(taken)
        keeper.flush()
        for events in events_before(draft.store, data, plan):
            builder.add(events)
        histories.append(builder.build())
    return BuiltHistories(histories, numbers)
