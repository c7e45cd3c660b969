"""A shard on tier ssd as checkpoints and row access see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.embeddings.shards import LocalShard, Places
from pipeline.embeddings.ssd.aio import I64
from pipeline.embeddings.ssd.log import F32
from pipeline.embeddings.ssd.shard import SsdShard
from pipeline.embeddings.tables import TableSpec
from pipeline.specs.table_optimizer import StateColumn


class DiskRows(Protocol):
    """What a ``DiskShard`` reads and writes through: ``SsdStore``, by table and places in the shard."""

    def read(self, table: str, places: I64) -> F32:
        """See ``SsdStore``."""
        ...

    def write(self, table: str, places: I64, values: F32) -> None:
        """See ``SsdStore``."""
        ...

    def scratch(self, table: str) -> Tensor:
        """See ``SsdStore``."""
        ...

    def begin(self, table: TableSpec, seed: int) -> None:
        """See ``SsdStore``."""
        ...

    def zero_state(self, table: str) -> None:
        """See ``SsdStore``."""
        ...


class DiskShard(LocalShard):
    """A shard on tier ssd, whose ``weight`` and ``state`` copy all its rows. A new row has its initial value."""

    _store: DiskRows
    _states: dict[str, slice | int]  # which values of a row they are
    _values: int

    def __init__(self, store: DiskRows, shard: SsdShard, owner: bool, states: Sequence[StateColumn]) -> None:
        place = {"table": shard.name, "row": shard.first, "rows": shard.rows, "column": 0, "columns": shard.dim}
        own = {"_store": store, "_states": _places(states, shard.dim), "_values": shard.values}
        for name, value in {**place, "owner": owner, **own}.items():
            object.__setattr__(self, name, value)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """All rows: [rows, columns]. Only for tables that fit in memory."""
        return self._read(slice(0, self.rows))[:, : self.columns].contiguous()

    @property
    def state(self) -> dict[str, Tensor]:  # type: ignore[override]
        """The states of all rows by name: [rows] or [rows, columns]."""
        records = self._read(slice(0, self.rows)) if self._states else None
        return {name: records[:, at].contiguous() for name, at in self._states.items() if records is not None}

    def _read(self, places: Places) -> Tensor:
        return torch.from_numpy(self._store.read(self.table, _numbers(places)))[:, : self._values]

    def copy(self, places: Places, weight: Tensor, state: Mapping[str, Tensor]) -> None:
        """See ``LocalShard``."""
        records = self._read(places)
        weight.copy_(records[:, : self.columns])
        for name, into in state.items():
            into.copy_(records[:, self._states[name]])

    def put(
        self, places: Places, weight: Tensor, state: Mapping[str, Tensor], column: int = 0, *, add: bool = False
    ) -> None:
        """See ``LocalShard.put``. Rows that are not given whole are read first."""
        whole = weight.shape[1] == self.columns and not add and state.keys() == self._states.keys()
        records = torch.zeros(len(weight), self._values) if whole else self._read(places)
        records[:, column : column + weight.shape[1]] = weight
        for name, values in state.items():
            at = self._states[name]
            if isinstance(at, slice):
                records[:, at.start + column : at.start + column + values.shape[1]] = values
            else:
                records[:, at] = records[:, at] + values if add else values
        self._store.write(self.table, _numbers(places), records.numpy())

    def scratch(self) -> Tensor | None:
        """See ``LocalShard``."""
        return self._store.scratch(self.table)

    def begin(self, table: TableSpec, seed: int) -> None:
        """Give all rows their initial values, and zeros as state, at once."""
        self._store.begin(table, seed)

    @property
    def device(self) -> torch.device:
        """See ``LocalShard``."""
        return torch.device("cpu")

    def state_shapes(self, rows: int) -> dict[str, tuple[int, ...]]:
        """See ``LocalShard.state_shapes``."""
        return {name: (rows, self.columns) if isinstance(at, slice) else (rows,) for name, at in self._states.items()}

    def zero_state(self) -> None:
        """Set the optimizer state of all rows to zero."""
        if self._states:
            self._store.zero_state(self.table)


def _places(states: Sequence[StateColumn], dim: int) -> dict[str, slice | int]:
    """Which of a row's values each state is; the weights come first."""
    places: dict[str, slice | int] = {}
    at = dim
    for column in states:
        places[column.name] = slice(at, at + dim) if column.per_value else at
        at += dim if column.per_value else 1
    return places


def _numbers(places: Places) -> NDArray[np.int64]:
    return np.arange(places.start, places.stop) if isinstance(places, slice) else places.cpu().numpy()
