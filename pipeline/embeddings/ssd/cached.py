"""A shard with a fixed number of slots: a cache of its rows in the memory of a device.

Rows stay in their slots when their batch is done. The least recently used ones leave, many at a time, when others need
their slots. Rows of a batch under way never leave: where they leave too few slots for the next batch, that one waits
until a batch is done (``SsdStore``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from pipeline.embeddings.ssd.aio import I64
from pipeline.embeddings.ssd.shard import Part, SsdShard
from pipeline.embeddings.ssd.slots import DeviceSlots
from pipeline.embeddings.tables import TableSpec
from pipeline.errors import GuardError
from pipeline.records import ShardPlan


class CachedShard(SsdShard):
    """An ``SsdShard`` without pinned rows and with at most ``slots`` rows in memory.

    ``table_rows``: of the whole table, for messages.
    """

    def __init__(self, directory: Path, name: str, plan: ShardPlan, slots: int, table_rows: int, values: int) -> None:
        super().__init__(directory, name, plan, 0, values)
        self.count, self._table_rows = slots, table_rows
        self._held = np.zeros(slots, np.int32)
        self._row = np.zeros(slots, np.int64)
        self._free = np.arange(slots)  # from the first: rows that a restore brings need no ``begin``
        self._reset()

    def _reset(self) -> None:
        self._idle: deque[tuple[I64, I64]] = (
            deque()
        )  # slots of rows that no batch holds, with their times, oldest first
        self._queued = 0
        self._time = np.full(self.count, -1, np.int64)  # when a slot was last let go
        self._now = 0
        self._unheld = self.count

    def live_in(self, parts: Sequence[Tensor]) -> None:
        """See ``SsdShard.live_in``; [slots, dim] or [slots], on any device."""
        self.slots = DeviceSlots(parts, self.values)

    def begin(self, table: TableSpec, seed: int) -> None:
        """See ``SsdShard.begin``."""
        super().begin(table, seed)
        self._reset()

    def room(self, part: Part) -> bool:
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

    def claim(self, part: Part) -> tuple[I64, I64]:
        """See ``SsdShard.claim``."""
        absent, where = super().claim(part)
        self._row[part.slots[absent]] = part.rows[absent]
        return absent, where

    def _hold(self, slots: I64) -> None:
        self._unheld -= int(np.count_nonzero(self._held[slots] == 0))
        self._held[slots] += 1

    def _take(self, count: int) -> I64:
        if count > len(self._free):
            self._evict(count - len(self._free))
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def _evict(self, count: int) -> None:
        """Write the ``count`` least recently used rows back and free their slots."""
        leaving = []
        while count:
            times, slots = self._idle.popleft()
            self._queued -= len(slots)
            still = np.flatnonzero((self._time[slots] == times) & (self._held[slots] == 0))
            leaving.append(slots[still[:count]])
            if len(still) > count:
                rest = still[count:]
                self._idle.appendleft((times[rest], slots[rest]))
                self._queued += len(rest)
            count -= len(leaving[-1])
        slots = np.concatenate(leaving)
        self._time[slots] = -1
        self._store(self._row[slots], self.slots.read(slots))
        self._free = np.concatenate([self._free, slots])

    def release(self, part: Part) -> None:
        """End a batch: its rows may leave."""
        if part.era != self._era:
            return
        self._held[part.slots] -= 1
        idle = part.slots[self._held[part.slots] == 0]
        self._unheld += len(idle)
        self._now += 1
        self._time[idle] = self._now
        self._idle.append((self._time[idle], idle))
        self._queued += len(idle)
        if self._queued > 4 * self.count:
            self._compact()

    def _compact(self) -> None:
        """Drop the entries of rows that were used since they were queued."""
        slots = np.flatnonzero((self._time > 0) & (self._held == 0))
        slots = slots[np.argsort(self._time[slots], kind="stable")]
        self._idle, self._queued = deque([(self._time[slots], slots)]), len(slots)
