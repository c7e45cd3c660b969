"""A shard on tier ssd as checkpoints and row access see it."""

from __future__ import annotations

from collections.abc import Mapping
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


class DiskRows(Protocol):
    """What a ``DiskShard`` reads and writes through: ``SsdStore``, by table and places in the shard."""

    def read(self, table: str, places: I64) -> F32:
        """See ``SsdStore``."""
        ...

    def write(self, table: str, places: I64, weights: F32, state: F32) -> None:
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
    _states: list[str]

    def __init__(self, store: DiskRows, shard: SsdShard, owner: bool, states: list[str]) -> None:
        place = {"table": shard.name, "row": shard.first, "rows": shard.rows, "column": 0, "columns": shard.dim}
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
        """See ``LocalShard``."""
        records = self._read(places)
        weight.copy_(records[:, :-2])
        for into in state.values():
            into.copy_(records[:, -2])

    def put(
        self, places: Places, weight: Tensor, state: Mapping[str, Tensor], column: int = 0, *, add: bool = False
    ) -> None:
        """See ``LocalShard.put``. Rows that are not given whole are read first."""
        whole = weight.shape[1] == self.columns and not add and set(state) == set(self._states)
        records = torch.zeros(len(weight), self.columns + 2) if whole else self._read(places)
        records[:, column : column + weight.shape[1]] = weight
        for values in state.values():
            records[:, -2] = records[:, -2] + values if add else values
        written = records.numpy()
        self._store.write(self.table, _numbers(places), written[:, :-2], written[:, -2])

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
        """Shapes of the states of ``rows`` rows by name; on this tier a state is one figure a row."""
        return dict.fromkeys(self._states, (rows,))

    def zero_state(self) -> None:
        """Set the optimizer state of all rows to zero."""
        if self._states:
            self._store.zero_state(self.table)


def _numbers(places: Places) -> NDArray[np.int64]:
    return np.arange(places.start, places.stop) if isinstance(places, slice) else places.cpu().numpy()
