"""The rows of one table on one rank: the first ones stay in memory, the others are in the log until a batch needs them.

The kernel's storage is as long as the table, but only its beginning is ever touched: first the pinned rows, row r <
``pinned`` as row r, then the slots, each with a row of a batch under way. A map has the place of every other row.
Batches hold the rows that they need in slots; when the last one is done, the row goes to the log and its slot is free.
All methods but ``part`` run in the store's worker thread. ``cached.CachedShard`` has a fixed number of slots instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import numpy as np
from torch import Tensor

from pipeline.embeddings.initial import INIT_BLOCK_ROWS, initial_rows, rows_at
from pipeline.embeddings.ssd.aio import I64
from pipeline.embeddings.ssd.log import F32, MOST_ROWS, Reads, RowLog, place_type
from pipeline.embeddings.ssd.slots import HostSlots, Slots
from pipeline.embeddings.tables import TableSpec
from pipeline.errors import PlanError
from pipeline.records import ShardPlan

_NONE: I64 = np.empty(0, np.int64)


@dataclass(eq=False)
class Part:
    """A batch's needs of a shard: the number of ``lookups``, and their distinct rows that are not pinned, ascending.

    Once ``ready`` is set, the ``rows`` are in ``slots`` of the kernel's storage; ``missing`` of them were not before.
    """

    lookups: int
    rows: I64
    ready: Event
    slots: I64 = field(default_factory=lambda: _NONE)
    missing: int = 0
    era: int = -1

    def find(self, rows: I64) -> I64 | None:
        """Places of ``rows`` among the part's rows; None where one is missing."""
        places = np.searchsorted(self.rows, rows)
        if not len(self.rows) or places.max(initial=0) >= len(self.rows) or (self.rows[places] != rows).any():
            return None
        return places


class SsdShard:
    """Rows [plan.row, plan.row + plan.rows) of table ``name``; ``pinned`` of them stay in memory.

    ``values``: weights and optimizer states of a row, in this order. ``live_in`` gives it the kernel's storage.
    GuardError where the disk has no room, PlanError for too many rows.
    """

    def __init__(self, directory: Path, name: str, plan: ShardPlan, pinned: int, values: int) -> None:
        self.name, self.first, self.rows, self.dim, self.pinned = name, plan.row, plan.rows, plan.columns, pinned
        self.values = values
        if self.rows > MOST_ROWS:
            raise PlanError(
                f"table {name!r} has {self.rows:,} rows on one rank, but tier ssd holds at most {MOST_ROWS:,}",
                hint=f"+plan.tables.{name}.sharding=row_wise on more ranks, or +plan.tables.{name}.tier=ddr",
            )
        self.log = RowLog(directory, self.rows - pinned, values, f"the rows of table {name!r}")
        # 0: never used, it has its initial value; p + 1: record p of the log; -(s + 1): slot s.
        self._where = np.zeros(self.rows - pinned, place_type(self.rows))
        self._held = np.zeros(0, np.int32)
        self._free: I64 = _NONE
        self._initial: tuple[TableSpec, int] | None = None
        self._era = 0

    def live_in(self, parts: Sequence[Tensor]) -> None:
        """The kernel's storage: weights [rows, dim], and the states of its optimizer, [rows] or [rows, dim]."""
        self.slots: Slots = HostSlots(parts, self.values)

    def begin(self, table: TableSpec, seed: int) -> None:
        """Give every row its initial value and take the slots of all batches away."""
        self.log.clear()
        self._era += 1
        self._where[:] = 0
        self._held[:] = 0
        self._free = np.arange(len(self._held))
        self._initial = table, seed
        for start in range(0, self.pinned, INIT_BLOCK_ROWS):
            stop = min(start + INIT_BLOCK_ROWS, self.pinned)
            values = np.zeros((stop - start, self.values), np.float32)
            values[:, : self.dim] = initial_rows(seed, table, self.first + start, self.first + stop).numpy()
            self.slots.write(slice(start, stop), values)

    def part(self, ids: I64, ready: Event) -> Part:
        """The part of a batch with the global row numbers ``ids``; rows of other ranks are left out."""
        places = ids - self.first
        places = places[(places >= 0) & (places < self.rows)]
        return Part(len(places), np.unique(places[places >= self.pinned]), ready)

    def claim(self, part: Part) -> tuple[I64, I64]:
        """Give the rows of ``part`` slots: (places in ``part`` to fill, the map's entries of their values)."""
        places = part.rows - self.pinned
        where = self._where[places].astype(np.int64)
        absent = np.flatnonzero(where >= 0)
        slots, places = -where - 1, places[absent]
        if len(absent) < len(slots):
            self._hold(slots[where < 0])
        slots[absent] = self._take(len(absent))
        where = self._where[places].astype(np.int64)  # again: taking may have moved records
        self._where[places] = -slots[absent] - 1
        self._hold(slots[absent])
        part.slots, part.missing, part.era = slots + self.pinned, len(absent), self._era
        return absent, where

    def room(self, part: Part) -> bool:
        """Whether ``claim`` has slots for it now."""
        return True

    def _hold(self, slots: I64) -> None:
        self._held[slots] += 1

    def _take(self, count: int) -> I64:
        """Free slots, low ones first; more are made where there are too few."""
        if count > len(self._free):
            old, new = len(self._held), max(count - len(self._free), len(self._held) // 4)
            self._free = np.concatenate([self._free, np.arange(old, old + new)])
            self._held = np.concatenate([self._held, np.zeros(new, np.int32)])
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def fill(self, part: Part, absent: I64, where: I64, records: F32) -> None:
        """Put ``records``, the values of the ``absent`` rows, into their slots."""
        self.slots.write(part.slots[absent], records[:, :-1])
        self.log.drop(where[where > 0] - 1)

    def find(self, rows: I64, where: I64, records: F32) -> Reads | None:
        """Write the values of ``rows``, which are in no slot, to ``records`` [n, words]; the rest must be read."""
        unused = where == 0
        if unused.any():
            records[unused] = 0
            if self._initial is not None:
                table, seed = self._initial
                records[unused, : self.dim] = rows_at(seed, table, rows[unused] + self.first)
        logged = np.flatnonzero(~unused)
        waiting = self.log.waiting(where[logged] - 1)
        recent, far = logged[waiting], logged[~waiting]
        records[recent] = self.log.recent(where[recent] - 1)
        return self.log.reads(where[far] - 1, far) if len(far) else None

    def release(self, part: Part) -> None:
        """End a batch: rows that no other batch holds go to the log."""
        if part.era != self._era:
            return
        slots = part.slots - self.pinned
        self._held[slots] -= 1
        gone = self._held[slots] == 0
        self._store(part.rows[gone], self.slots.read(part.slots[gone]))
        self._free = np.concatenate([slots[gone], self._free])

    def _store(self, rows: I64, values: F32) -> None:
        """Add ``rows``, of which the log has no live record, to it."""
        step = self.log.per_segment
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            while self.log.crowded:
                self._tidy()
            self._where[rows[part] - self.pinned] = self.log.add(rows[part], values[part]) + 1

    def _tidy(self) -> None:
        """Move the live rows of a segment to the open one."""
        rows, records, places = self.log.empty()
        live = np.flatnonzero(self._where[rows - self.pinned] == places + 1)
        new = self.log.add(rows[live], records[live, :-1])
        self._where[rows[live] - self.pinned] = new + 1

    def look_up(self, places: I64) -> tuple[I64, I64]:
        """Find rows ``places``: (kernel rows, -1 for those in no slot; the map's entries of these)."""
        rows = places.copy()
        cold = np.flatnonzero(places >= self.pinned)
        where = self._where[places[cold] - self.pinned].astype(np.int64)
        rows[cold] = np.where(where < 0, self.pinned - 1 - where, -1)
        return rows, where[where >= 0]

    def used(self, places: I64) -> I64:
        """Those of ``places`` whose rows may differ from a new table's."""
        cold = places >= self.pinned
        kept: I64 = np.concatenate([places[~cold], places[cold][self._where[places[cold] - self.pinned] != 0]])
        return kept

    def gather(self, rows: I64, into: F32) -> None:
        """Records ``into`` [n, words] of kernel ``rows`` [n]; those of rows -1 are left as they are."""
        here = np.flatnonzero(rows >= 0)
        into[here, :-1] = self.slots.read(rows[here])

    def put(self, places: I64, values: F32) -> None:
        """Overwrite rows ``places``, each once, in memory and on disk; ``values`` [n, values]."""
        rows, where = self.look_up(places)
        here = rows >= 0
        self.slots.write(rows[here], values[here])
        self.log.drop(where[where > 0] - 1)
        self._where[places[~here] - self.pinned] = 0
        self._store(places[~here], values[~here])
