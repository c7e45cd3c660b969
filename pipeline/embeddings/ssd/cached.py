"""A shard with a fixed number of slots: a cache of its rows in a device's memory, and one in host memory behind it.

Rows stay in their slots after their batch. When others need their slots, the least recently used ones move to host
memory (``HostRows``), many at a time, and from there to the log. Rows of a batch under way never leave: if they leave
too few slots for the next batch, that one waits until a batch is done (``SsdStore``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pipeline.core.errors import GuardError
from pipeline.embeddings.ssd.aio import I64
from pipeline.embeddings.ssd.log import F32, I8, WriteCounts, place_type
from pipeline.embeddings.ssd.shard import ShardRequest, SsdShard
from pipeline.embeddings.ssd.slots import DeviceSlots, Recency
from pipeline.embeddings.tables import TableSpec
from pipeline.records.plan import ShardPlan
from pipeline.records.scratch import LOG_SPARE

# Places and their turns in line are 32-bit numbers, and there are two turns for each place.
MOST_HOST_ROWS = 2**30
# At least this many turns are examined at a time.
_TURNS = 4096


class HostRows:
    """At most ``count`` rows of ``values`` each, in places from 0 on; the one that came first leaves first.

    A row that the device wants again leaves at once, so every row is in one place, and rows leave in the order in which
    they came: together the slots and this memory hold the most recently used rows. Its arrays are made at the start and
    never grow: each row that it has room for takes its values and ``HOST_ROW_BYTES``.

    Use it from one thread. Turns in line of rows that left before their time are skipped.
    """

    def __init__(self, count: int, values: int) -> None:
        self.count = count
        # The array takes memory only once a place is used.
        self._values: F32 = np.empty((count, values), np.float32)
        self._row = np.empty(count, np.uint32)
        self._kind = np.empty(count, np.int8)
        # The turn of a place in the line; -1: the place is free.
        self._turn = np.empty(count, np.int32)
        # The places in the order in which their rows came.
        self._line = np.empty(2 * count, np.int32)
        self._free = np.empty(count, np.int32)
        self.clear()

    @property
    def bytes(self) -> int:
        """The bytes of all arrays once every place was used."""
        arrays = self._values, self._row, self._kind, self._turn, self._line, self._free
        return sum(array.nbytes for array in arrays)

    def clear(self) -> None:
        """Forget all rows."""
        self._turn[:] = -1
        self._free[:] = np.arange(self.count)
        self._unused, self._first, self._end = self.count, 0, 0

    def add(self, rows: I64, values: F32, kinds: I8) -> tuple[I64, tuple[I64, F32, I8]]:
        """Take in ``rows``, at most ``count``, the one to leave first in front; ``kinds`` are the log's.

        Returns their places, and the rows that leave to make room, with their values and kinds.
        """
        # 1. Make room: the rows that came first leave first. Turns whose row has left already are skipped.
        found, count = [np.empty(0, np.int64)], len(rows) - self._unused
        while count > 0:
            line = self._line[self._first : min(self._end, self._first + max(count, _TURNS))]
            waiting = np.flatnonzero(self._in_turn(line, self._first))[:count]
            found.append(line[waiting].astype(np.int64))
            count -= len(waiting)
            self._first += len(line) if count else int(waiting[-1]) + 1
        leaving = np.concatenate(found)
        left = self._row[leaving].astype(np.int64), self._values[leaving], self._kind[leaving]
        self.drop(leaving)
        # 2. Put the new rows into free places with the last turns.
        self._unused -= len(rows)
        places = self._free[self._unused : self._unused + len(rows)].astype(np.int64)
        self._row[places], self._values[places], self._kind[places] = rows, values, kinds
        self.renew(places)
        return places, left

    def read(self, places: I64) -> F32:
        """Return copies of the values in ``places`` [n]: [n, values]."""
        copies: F32 = self._values[places]
        return copies

    def kinds(self, places: I64) -> I8:
        """Return the kinds that the rows in ``places`` came with."""
        kinds: I8 = self._kind[places]
        return kinds

    def drop(self, places: I64) -> None:
        """Free ``places`` [n], each given once, because their rows are somewhere else from now on."""
        self._turn[places] = -1
        self._free[self._unused : self._unused + len(places)] = places
        self._unused += len(places)

    def renew(self, places: I64) -> None:
        """Have the rows in ``places`` [n], each given once, leave after all others."""
        if self._end + len(places) > len(self._line):
            # Drop the skipped turns, so that at least half of the line is free.
            waiting = self._line[self._first : self._end]
            waiting = waiting[self._in_turn(waiting, self._first)]
            self._first, self._end = 0, len(waiting)
            self._line[: self._end], self._turn[waiting] = waiting, np.arange(self._end)
        turns = np.arange(self._end, self._end + len(places), dtype=np.int32)
        self._line[turns], self._turn[places] = places, turns
        self._end += len(places)

    def _in_turn(self, places: NDArray[np.int32], first: int) -> NDArray[np.bool_]:
        # Returns which of ``places``, which stand in line from ``first`` on, have not left or come again since.
        in_turn: NDArray[np.bool_] = self._turn[places] == np.arange(first, first + len(places))
        return in_turn


class CachedShard(SsdShard):
    """An ``SsdShard`` without pinned rows, with at most ``slots`` rows on the device and ``hosted`` in host memory.

    ``table_rows`` is the number of rows of the whole table, for messages.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        plan: ShardPlan,
        slots: int,
        table_rows: int,
        values: int,
        hosted: int = 0,
        spare: float = LOG_SPARE,
        written: WriteCounts | None = None,
    ) -> None:
        super().__init__(directory, name, plan, 0, values, spare, written)
        self.host = HostRows(min(hosted, plan.rows - slots, MOST_HOST_ROWS), values)
        # Besides the entries of ``SsdShard``, the map has entries above those of the log: ``_top`` - h is place h in
        # host memory.
        self._where = np.zeros(self.rows, place_type(self.rows + self.host.count))
        self._top = int(np.iinfo(self._where.dtype).max)
        self.count, self._table_rows = slots, table_rows
        self._held = np.zeros(slots, np.int32)
        self._kind = np.zeros(slots, np.int8)
        self._row = np.zeros(slots, np.int64)
        # All slots are free from the start, so rows of a restore need no ``begin``.
        self._free = np.arange(slots)
        self._recency = Recency(slots)
        self._unheld = slots

    def live_in(self, parts: Sequence[Tensor]) -> None:
        """See ``SsdShard.live_in``; [slots, dim] or [slots], on any device."""
        self.slots = DeviceSlots(parts, self.values)

    def begin(self, table: TableSpec, seed: int) -> None:
        super().begin(table, seed)
        self.host.clear()
        self._recency = Recency(self.count)
        self._unheld = self.count

    def room(self, part: ShardRequest) -> bool:
        """See ``SsdShard.room``; GuardError for a batch with more rows than there are slots."""
        if len(part.rows) > self.count:
            needed = -(-2 * len(part.rows) * self._table_rows // self.rows)
            raise GuardError(
                f"a batch needs {len(part.rows):,} rows of table {self.name!r} on this rank, but the plan's cache_rows "
                f"gives its device memory for {self.count:,}",
                hint=f"+plan.tables.{self.name}.cache_rows={min(needed, self._table_rows)}, or a smaller "
                "train.global_batch (evaluate.global_batch in evaluation)",
            )
        where = self._where[part.rows].astype(np.int64)
        here = -where[where < 0] - 1
        return len(part.rows) - len(here) <= self._unheld - int(np.count_nonzero(self._held[here] == 0))

    def claim(self, part: ShardRequest) -> tuple[I64, I64]:
        where = self._where[part.rows].astype(np.int64)
        hosted = self._hosted(where)
        # Renew these rows, so that others leave host memory for the rows that leave the device now.
        self.host.renew(self._top - where[hosted])
        part.hosted = len(hosted)
        return super().claim(part)

    def _hosted(self, where: I64) -> I64:
        # Returns which entries of the map are places in host memory.
        return np.flatnonzero(where > self._top - self.host.count)

    def _logged(self, where: I64, records: F32) -> I64:
        hosted = self._hosted(where)
        records[hosted, :-1] = self.host.read(self._top - where[hosted])
        return np.flatnonzero((where > 0) & (where <= self._top - self.host.count))

    def _drop(self, where: I64) -> I8:
        # A row in host memory keeps the kind that it came with.
        hosted = self._hosted(where)
        places, logged = self._top - where[hosted], where.copy()
        # For the log, an entry of 0 means a row without a record.
        logged[hosted] = 0
        kinds = super()._drop(logged)
        kinds[hosted] = self.host.kinds(places)
        self.host.drop(places)
        return kinds

    def _store(self, rows: I64, values: F32, kinds: I8) -> None:
        # Moves ``rows``, the longest unused first, to host memory; rows that leave it or find no room go to the log.
        beyond = max(0, len(rows) - self.host.count)
        super()._store(rows[:beyond], values[:beyond], kinds[:beyond])
        places, left = self.host.add(rows[beyond:], values[beyond:], kinds[beyond:])
        self._where[rows[beyond:]] = self._top - places
        super()._store(*left)

    def _hold(self, slots: I64) -> None:
        self._unheld -= int(np.count_nonzero(self._held[slots] == 0))
        self._held[slots] += 1

    def _take(self, count: int) -> I64:
        missing = count - len(self._free)
        if missing > 0:
            # The least recently used rows leave. ``room`` has checked that enough of them are held by no batch.
            slots = self._recency.take(missing, self._held)
            self._store(self._row[slots], self.slots.read(slots), self._kind[slots])
            self._free = np.concatenate([self._free, slots])
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def release(self, part: ShardRequest) -> None:
        """End a batch, so that its rows may leave."""
        if part.era != self._era:
            # ``begin`` has taken away all slots since.
            return
        # Rows that another batch also holds may not leave until that batch releases them.
        self._held[part.slots] -= 1
        idle = part.slots[self._held[part.slots] == 0]
        self._unheld += len(idle)
        self._recency.add(idle, self._held)
