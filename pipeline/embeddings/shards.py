"""The rows of one table on one rank: what checkpoints and row access read and write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pipeline.embeddings.initial import INIT_BLOCK_ROWS, initial_rows
from pipeline.embeddings.tables import TableSpec
from pipeline.specs.optimizers import StateColumn

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
        """Overwrite the columns from ``column`` on of the rows at ``places``, each once, and the given states.

        ``add``: add to the states of whole rows, [n], instead of overwriting them.
        """
        part = slice(column, column + weight.shape[1])
        self.weight[places, part] = weight.to(self.weight)
        for name, values in state.items():
            kept = self.state[name]
            if values.dim() > 1:
                kept[places, part] = values.to(kept)
            else:
                kept[places] = kept[places] + values.to(kept) if add else values.to(kept)

    def begin(self, table: TableSpec, seed: int) -> None:
        """Give all rows their initial values, and zeros as state."""
        for start in range(self.row, self.row + self.rows, INIT_BLOCK_ROWS):
            stop = min(start + INIT_BLOCK_ROWS, self.row + self.rows)
            values = initial_rows(seed, table, start, stop)[:, self.column : self.column + self.columns]
            self.weight[start - self.row : stop - self.row].copy_(values)
        self.zero_state()

    @property
    def device(self) -> torch.device:
        """Where lookups read the rows."""
        return self.weight.device

    def state_shapes(self, rows: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the states of ``rows`` rows by name: (rows,) or (rows, columns)."""
        return {name: (rows, *values.shape[1:]) for name, values in self.state.items()}

    def zero_state(self) -> None:
        """Set the optimizer state of all rows to zero."""
        for state in self.state.values():
            state.zero_()


def columns_of(state: Mapping[str, Tensor], columns: slice) -> dict[str, Tensor]:
    """``state`` by name, [n] or [n, k], cut to ``columns``; a state of whole rows [n] stays as it is."""
    return {name: values[:, columns] if values.dim() > 1 else values for name, values in state.items()}


def _copy(source: Tensor, places: Places, into: Tensor) -> None:
    if isinstance(places, Tensor) and source.device.type == "cpu" and into.is_contiguous():
        torch.index_select(source, 0, places, out=into)
    else:
        into.copy_(source[places])


class ShardStore(Protocol):
    """The shards of tables that no kernel keeps whole: those on tier ssd."""

    @property
    def tables(self) -> tuple[str, ...]:
        """Those of which this rank has rows."""
        ...

    def local_shard(self, table: str, owner: bool, states: Sequence[StateColumn]) -> LocalShard:
        """This rank's shard of ``table``, with its optimizer's ``states``."""
        ...
