"""One table's rows on one rank: the first stay in memory, the others are in the log until a batch needs them.

The kernel's storage is as long as the table, but only its beginning is ever touched: first the pinned rows, row r <
``pinned`` as row r, then the slots, each with a row of a batch under way or of a recent one. A map has the place of
every other row. Batches hold the rows that they need in slots. When the last one is done, a row stays until ``recent``
others came after it, so rows that become popular during a training stay like pinned ones. Then it goes to the log and
its slot is free. All methods but ``part`` run in the store's worker thread. ``cached.CachedShard`` has a fixed number
of slots instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from pipeline.core.errors import PlanError
from pipeline.embeddings.initial import INIT_BLOCK_ROWS, initial_rows, rows_at
from pipeline.embeddings.ssd.aio import I64
from pipeline.embeddings.ssd.log import F32, I8, MOST_ROWS, LogReads, RowLog, WriteCounts, place_type
from pipeline.embeddings.ssd.slots import HostSlots, Recency, Slots
from pipeline.embeddings.tables import TableSpec
from pipeline.records.plan import ShardPlan
from pipeline.records.scratch import LOG_SPARE

_NONE: I64 = np.empty(0, np.int64)


@dataclass(eq=False)
class ShardRequest:
    """A batch's needs of a shard: the number of ``lookups``, and the rows ``asked`` for that are not pinned, in order.

    Once ``ready`` is set, the distinct rows, ``rows``, are in ``slots`` of the kernel's storage, and ``each`` has the
    slot of every lookup. ``missing`` of ``rows`` were in no slot before, and ``hosted`` of them in host memory.
    """

    lookups: int
    asked: NDArray[Any]
    ready: Event
    slots: I64 = field(default_factory=lambda: _NONE)
    each: NDArray[Any] = field(default_factory=lambda: _NONE)
    missing: int = 0
    hosted: int = 0
    era: int = -1
    _distinct: tuple[I64, I64] | None = None

    @property
    def rows(self) -> I64:
        """The distinct rows, ascending. Sorts at the first access, which may be in the store's worker thread."""
        return self._find_distinct()[0]

    def _find_distinct(self) -> tuple[I64, I64]:
        # Returns the distinct rows, and which of them each lookup asked for.
        distinct = self._distinct
        if distinct is None:
            # Without the inverse NumPy 2.4 would build a hash table, at six times the cost.
            rows, places = np.unique(self.asked, return_inverse=True)
            distinct = self._distinct = rows.astype(np.int64), places
        return distinct

    def place(self, slots: I64, kind: DTypeLike) -> None:
        """Record that the ``rows`` are in ``slots``, numbers of type ``kind``."""
        rows, places = self._find_distinct()
        self.slots, self.each = slots, slots.astype(kind)[places]
        # The places are as long as the lookups, and no longer needed.
        self._distinct = rows, _NONE

    def find(self, rows: NDArray[Any]) -> I64 | None:
        """Return the places of ``rows`` among the part's rows; None if one is missing."""
        places = np.searchsorted(self.rows, rows)
        if not len(self.rows) or places.max(initial=0) >= len(self.rows) or (self.rows[places] != rows).any():
            return None
        return places


class SsdShard:
    """Rows [plan.row, plan.row + plan.rows) of table ``name``; ``pinned`` of them stay in memory.

    ``values`` counts the weights and optimizer states of a row, in this order; ``recent`` is the number of rows that
    stay in slots without a batch. ``spare`` and ``written`` are the log's, which has room for all rows. ``live_in``
    gives the shard its storage. Raises GuardError if the disk has no room, PlanError for too many rows.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        plan: ShardPlan,
        pinned: int,
        values: int,
        spare: float = LOG_SPARE,
        written: WriteCounts | None = None,
        recent: int = 0,
    ) -> None:
        self.name, self.first, self.rows, self.dim, self.pinned = name, plan.row, plan.rows, plan.columns, pinned
        self.values = values
        if self.rows > MOST_ROWS:
            raise PlanError(
                f"table {name!r} has {self.rows:,} rows on one rank, but tier ssd holds at most {MOST_ROWS:,}",
                hint=f"+plan.tables.{name}.sharding=row_wise on more ranks, or +plan.tables.{name}.tier=ddr",
            )
        self.log = RowLog(directory, self.rows, values, f"the rows of table {name!r}", spare, written)
        # 0: the row was never used and has its initial value; p + 1: record p of the log; -(s + 1): slot s.
        self._where = np.zeros(self.rows - pinned, place_type(self.rows))
        # For each slot, how many batches hold it, its row, and how long that row stays on the disk.
        self._held = np.zeros(0, np.int32)
        self._row = np.zeros(0, np.int64)
        self._kind = np.zeros(0, np.int8)
        self.recent, self._idle = recent, 0
        self._recency = Recency()
        self._free: I64 = _NONE
        self._initial: tuple[TableSpec, int] | None = None
        self._era = 0

    def live_in(self, parts: Sequence[Tensor]) -> None:
        """Take the kernel's storage: weights [rows, dim], and the states of its optimizer, [rows] or [rows, dim]."""
        self.slots: Slots = HostSlots(parts, self.values)

    def begin(self, table: TableSpec, seed: int) -> None:
        """Set every row to its initial value and take away the slots of all batches."""
        self.log.clear()
        self._era += 1
        self._where[:] = 0
        self._held[:] = 0
        self._free = np.arange(len(self._held))
        self._recency, self._idle = Recency(len(self._held)), 0
        self._initial = table, seed
        for start in range(0, self.pinned, INIT_BLOCK_ROWS):
            stop = min(start + INIT_BLOCK_ROWS, self.pinned)
            values = np.zeros((stop - start, self.values), np.float32)
            values[:, : self.dim] = initial_rows(seed, table, self.first + start, self.first + stop).numpy()
            self.slots.write(slice(start, stop), values)

    def part(self, ids: I64, ready: Event) -> ShardRequest:
        """Return the part of a batch with the global row numbers ``ids``; rows of other ranks are left out."""
        places = ids - self.first
        places = places[(places >= 0) & (places < self.rows)]
        asked = places[places >= self.pinned] if self.pinned else places
        return ShardRequest(len(places), asked.astype(self._where.dtype), ready)

    def claim(self, part: ShardRequest) -> tuple[I64, I64]:
        """Give the rows of ``part`` slots.

        Returns the places in ``part`` to fill, and the map's entries of their values.
        """
        places = part.rows - self.pinned
        where = self._where[places].astype(np.int64)
        absent = np.flatnonzero(where >= 0)
        slots, places = -where - 1, places[absent]
        if len(absent) < len(slots):
            present = slots[where < 0]
            self._idle -= int(np.count_nonzero(self._held[present] == 0))
            self._hold(present)
        slots[absent] = self._take(len(absent))
        # Read the map again, since taking slots may have moved records.
        where = self._where[places].astype(np.int64)
        self._where[places] = -slots[absent] - 1
        self._row[slots[absent]] = part.rows[absent]
        self._hold(slots[absent])
        part.place(slots + self.pinned, self._where.dtype)
        part.missing, part.era = len(absent), self._era
        return absent, where

    def room(self, part: ShardRequest) -> bool:
        """Return whether ``claim`` has slots for ``part`` now."""
        return True

    def _hold(self, slots: I64) -> None:
        self._held[slots] += 1

    def _take(self, count: int) -> I64:
        # Returns free slots, low ones first.
        missing = count - len(self._free)
        if missing > 0:
            old = len(self._held)
            new = max(missing, old // 4)
            self._free = np.concatenate([self._free, np.arange(old, old + new)])
            self._held = np.concatenate([self._held, np.zeros(new, np.int32)])
            self._row = np.concatenate([self._row, np.zeros(new, np.int64)])
            self._kind = np.concatenate([self._kind, np.zeros(new, np.int8)])
            self._recency.grow(new)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def fill(self, part: ShardRequest, absent: I64, where: I64, records: F32) -> None:
        """Put ``records``, the values of the ``absent`` rows, into their slots."""
        self.slots.write(part.slots[absent], records[:, :-1])
        self._kind[part.slots[absent] - self.pinned] = self._drop(where)

    def find(self, rows: I64, where: I64, records: F32) -> LogReads | None:
        """Write values of ``rows``, which are in no slot, to ``records`` [n, words]; returns reads for the rest."""
        unused = where == 0
        if unused.any():
            records[unused] = 0
            if self._initial is not None:
                table, seed = self._initial
                records[unused, : self.dim] = rows_at(seed, table, rows[unused] + self.first)
        logged = self._logged(where, records)
        waiting, values = self.log.unwritten(where[logged] - 1)
        records[logged[waiting]] = values
        on_disk = logged[~waiting]
        if not len(on_disk):
            return None
        return self.log.reads(where[on_disk] - 1, on_disk)

    def _logged(self, where: I64, records: F32) -> I64:
        # Returns which map entries are places in the log, and writes what other memory has to ``records``.
        return np.flatnonzero(where)

    def _drop(self, where: I64) -> I8:
        # Drops the values behind the map's entries ``where``, of rows in no slot, and returns the rows' kinds.
        kinds = self.log.kinds(where - 1)
        self.log.drop(where[where > 0] - 1)
        return kinds

    def release(self, part: ShardRequest) -> None:
        """End a batch and move the longest unused of the rows that no other batch holds to the log."""
        if part.era != self._era:
            return
        slots = part.slots - self.pinned
        self._held[slots] -= 1
        leaving = slots[self._held[slots] == 0]
        if self.recent:
            self._recency.add(leaving, self._held)
            self._idle += len(leaving)
            leaving = self._recency.take(max(0, self._idle - self.recent), self._held)
            self._idle -= len(leaving)
        self._store(self._row[leaving], self.slots.read(leaving + self.pinned), self._kind[leaving])
        self._free = np.concatenate([leaving, self._free])

    def _store(self, rows: I64, values: F32, kinds: I8) -> None:
        # Adds ``rows``, of which the log has no live record, to it, a segment at a time, which is the most it takes at
        # once.
        step = self.log.per_segment
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            # Segments with many live records yield little room, so one round may not be enough.
            while self.log.crowded:
                self.tidy()
            # An entry of 0 stands for a row that was never used, so record p is p + 1.
            self._where[rows[part] - self.pinned] = self.log.add(rows[part], values[part], kinds[part]) + 1

    def tidy(self) -> None:
        """Empty some segments, whose live rows move to those being filled."""
        # Find all live rows before the first is added again, since that may fill a segment that was just emptied.
        moving = []
        for rows, records, places, born in self.log.empty():
            # A record is dead if the map has another place for its row.
            live = np.flatnonzero(self._where[rows - self.pinned] == places + 1)
            moving.append((rows[live], records[live, :-1], born))
        for rows, values, born in moving:
            self._where[rows - self.pinned] = self.log.again(rows, values, born) + 1

    def look_up(self, places: I64) -> tuple[I64, I64]:
        """Return the kernel rows of ``places``, -1 for those in no slot, and the map's entries of the latter."""
        rows = places.copy()
        cold = np.flatnonzero(places >= self.pinned)
        where = self._where[places[cold] - self.pinned].astype(np.int64)
        rows[cold] = np.where(where < 0, self.pinned - 1 - where, -1)
        return rows, where[where >= 0]

    def used(self, places: I64) -> I64:
        """Return those of ``places`` whose rows may differ from a new table's."""
        pinned, cold = places[places < self.pinned], places[places >= self.pinned]
        used: I64 = np.concatenate([pinned, cold[self._where[cold - self.pinned] != 0]])
        return used

    def gather(self, rows: I64, into: F32) -> None:
        """Copy the records of kernel ``rows`` [n] to ``into`` [n, words], leaving those of rows -1 as they are."""
        here = np.flatnonzero(rows >= 0)
        into[here, :-1] = self.slots.read(rows[here])

    def put(self, places: I64, values: F32) -> None:
        """Overwrite rows ``places``, each given once, in memory and on disk; ``values`` [n, values]."""
        rows, where = self.look_up(places)
        # Pinned rows and rows with a slot are overwritten in memory; all others go to the log.
        here = rows >= 0
        self.slots.write(rows[here], values[here])
        kinds = self._drop(where)
        # Storing may empty segments, which must not find the dropped records alive.
        self._where[places[~here] - self.pinned] = 0
        self._store(places[~here], values[~here], kinds)
