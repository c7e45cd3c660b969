"""The rows of one table on one rank, in memory or on SSD: what checkpoints and row access read and write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.embeddings.tables import TableSpec

if TYPE_CHECKING:
    from pipeline.embeddings.ssd.store import SsdStore

Places = slice | Tensor


@dataclass(frozen=True)
class LocalShard:
    """Rows [row, row + rows) and columns [column, column + columns) of ``table`` on this rank.

    ``weight`` [rows, columns] and ``state``, by name [rows] or [rows, columns], are float32 views of the live storage.
    ``owner``: false on all ranks but one that hold a data-parallel replica. ``Places`` are row numbers relative to the
    shard.
    """

    table: str
    row: int
    rows: int
    column: int
    columns: int
    owner: bool
    weight: Tensor
    state: dict[str, Tensor]

    def copy(self, places: Places, weight: Tensor, state: Mapping[str, Tensor]) -> None:
        """Copy the rows at ``places`` into ``weight`` [n, columns] and ``state`` by name [n] or [n, columns]."""
        _copy(self.weight, places, weight)
        for name, into in state.items():
            _copy(self.state[name], places, into)

    def scratch(self) -> Tensor | None:
        """float32 on disk with room for a copy of all rows and states; None where copies go to memory.

        GuardError where the disk has no room.
        """
        return None

    def put(
        self, places: Places, weight: Tensor, state: Mapping[str, Tensor], column: int = 0, *, add: bool = False
    ) -> None:
        """Overwrite columns from ``column`` on of the rows at ``places``, each once, and the states that are given.

        ``add``: add to the states of rows instead; those of values belong to their columns.
        """
        part = slice(column, column + weight.shape[1])
        self.weight[places, part] = weight.to(self.weight)
        for name, values in state.items():
            kept = self.state[name]
            if values.dim() > 1:
                kept[places, part] = values.to(kept)
            else:
                kept[places] = kept[places] + values.to(kept) if add else values.to(kept)

    @property
    def device(self) -> torch.device:
        """Where the rows are when they are looked up."""
        return self.weight.device

    def state_shapes(self, rows: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the states of so many rows by name: (rows,) or (rows, columns)."""
        return {name: (rows, *values.shape[1:]) for name, values in self.state.items()}

    def zero_state(self) -> None:
        """Set the optimizer state of all rows to zero."""
        for state in self.state.values():
            state.zero_()


def columns_of(state: Mapping[str, Tensor], columns: slice) -> dict[str, Tensor]:
    """``state`` by name, [n] or [n, k], of some ``columns`` alone: what belongs to a whole row stays."""
    return {name: values[:, columns] if values.dim() > 1 else values for name, values in state.items()}


def _copy(source: Tensor, places: Places, into: Tensor) -> None:
    if isinstance(places, Tensor) and source.device.type == "cpu" and into.is_contiguous():
        torch.index_select(source, 0, places, out=into)
    else:
        into.copy_(source[places])


class DiskShard(LocalShard):
    """A shard on tier ssd: ``copy`` and ``put`` as of any; ``weight`` and ``state`` are copies of all its rows.

    A row that was never used has its initial value.
    """

    _store: SsdStore
    _states: list[str]

    def __init__(self, store: SsdStore, table: str, owner: bool, states: list[str]) -> None:
        shard = store.shard(table)
        place = {"table": table, "row": shard.first, "rows": shard.rows, "column": 0, "columns": shard.dim}
        for name, value in {**place, "owner": owner, "_store": store, "_states": states}.items():
            object.__setattr__(self, name, value)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """All rows: [rows, columns]. Only for tables that fit in memory."""
        return self._read(slice(0, self.rows))[:, :-2].contiguous()

    @property
    def state(self) -> dict[str, Tensor]:  # type: ignore[override]
        """The states of all rows by name: [rows]."""
        return {name: self._read(slice(0, self.rows))[:, -2].contiguous() for name in self._states}

    def _read(self, places: Places) -> Tensor:
        return torch.from_numpy(self._store.read(self.table, _numbers(places)))

    def copy(self, places: Places, weight: Tensor, state: Mapping[str, Tensor]) -> None:
        """As of any shard."""
        records = self._read(places)
        weight.copy_(records[:, :-2])
        for into in state.values():
            into.copy_(records[:, -2])

    def put(
        self, places: Places, weight: Tensor, state: Mapping[str, Tensor], column: int = 0, *, add: bool = False
    ) -> None:
        """As of any shard; rows that are not given whole are read before."""
        whole = weight.shape[1] == self.columns and not add and set(state) == set(self._states)
        records = torch.zeros(len(weight), self.columns + 2) if whole else self._read(places)
        records[:, column : column + weight.shape[1]] = weight
        for values in state.values():
            records[:, -2] = records[:, -2] + values if add else values
        self._write(places, records)

    def scratch(self) -> Tensor | None:
        """As of any shard."""
        return self._store.scratch(self.table)

    def begin(self, table: TableSpec, seed: int) -> None:
        """Give all rows their initial values, and zeros as state, at once."""
        self._store.begin(table, seed)

    @property
    def device(self) -> torch.device:
        """As of any shard."""
        return torch.device("cpu")

    def state_shapes(self, rows: int) -> dict[str, tuple[int, ...]]:
        """As of any shard; none of values."""
        return dict.fromkeys(self._states, (rows,))

    def zero_state(self) -> None:
        """Set the optimizer state of all rows to zero."""
        if self._states:
            self._store.zero_state(self.table)

    def _write(self, places: Places, records: Tensor) -> None:
        values = records.numpy()
        self._store.write(self.table, _numbers(places), values[:, :-2], values[:, -2])


def _numbers(places: Places) -> NDArray[np.int64]:
    return np.arange(places.start, places.stop) if isinstance(places, slice) else places.cpu().numpy()
