"""Histories of the rows of a log, built in a temporary file: by user, then by the place of the row."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl

from pipeline.config.sequences import EVENT_TIME
from pipeline.ingest.histories.events import event_schema
from pipeline.ingest.histories.plan import HistoryPlan
from pipeline.ingest.histories.windows import histories
from pipeline.ingest.key_partitions import KeyPartitions
from pipeline.ingest.sources import Block, RawBlock, Source, WrappedSource
from pipeline.ingest.spill import Spill

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
            for rows in histories(events, self.plan):
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
