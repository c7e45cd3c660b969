"""The rows of one checkpoint, chain applied, table by table in row order, with bounded memory: for export and diff."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.checkpoint.chunks import RowBlock, read_block
from pipeline.checkpoint.index import damage_hint, restore_order
from pipeline.checkpoint.reader import apply_block, read_index
from pipeline.checkpoint.verified import read_verified
from pipeline.embeddings.shards import LocalShard
from pipeline.errors import DamagedError
from pipeline.records import Extent, Index, TableSize
from pipeline.store import Artifact, Store

# float32 bytes of a window of rows.
WINDOW_BYTES = 16 << 20


@dataclass(frozen=True)
class Window:
    """Rows [first, first + n) of ``table``: ``weight`` float32 [n, dim], ``state`` by name, float32 [n] or [n, dim]."""

    table: str
    first: int
    weight: Tensor
    state: dict[str, Tensor]


class ChainReader:
    """Reads a checkpoint and what it rests on without a model. ``tables``: {name: {"rows", "dim"}}.

    Chunks are verified as they are read (DamagedError). Held in memory: a window, and of each checkpoint of the chain
    the chunks that overlap it.
    """

    def __init__(self, store: Store, artifact: Artifact) -> None:
        self.store, self.artifact = store, artifact
        self.chain = restore_order(store, artifact)
        self._indices = [read_index(store, each) for each in self.chain]
        self.tables: dict[str, TableSize] = self._indices[-1].tables
        self._open: dict[tuple[str, str], RowBlock] = {}
        self._states: dict[str, dict[str, bool]] = {}

    def states(self, table: str) -> dict[str, bool]:
        """The optimizer's states of ``table`` by name: whether each weight has one, not each row."""
        if table not in self._states:
            extents = [extent for extent in self._indices[0].files if extent.table == table]
            stored = self._block(self.chain[0], extents[0]).state if extents else {}
            self._states[table] = {name: stored[name].dim() > 1 for name in sorted(stored)}
        return self._states[table]

    def windows(self, table: str, window_bytes: int = WINDOW_BYTES) -> Iterator[Window]:
        """All rows of ``table`` in order. A window's tensors are used again for the next one."""
        rows, dim = self.tables[table].rows, self.tables[table].dim
        size = max(1, window_bytes // (4 * dim))
        mine = [sorted(self._extents(index, table), key=_lowest_column) for index in self._indices]
        weight = torch.empty(min(size, rows), dim)
        states = {
            name: torch.empty((len(weight), dim) if wide else len(weight)) for name, wide in self.states(table).items()
        }
        self._open.clear()
        for first in range(0, rows, size):
            count = min(size, rows - first)
            window = Window(table, first, weight[:count], {name: state[:count] for name, state in states.items()})
            self._fill(window, mine)
            yield window

    def _fill(self, window: Window, mine: list[list[Extent]]) -> None:
        count, dim = window.weight.shape
        window.weight.fill_(float("nan"))
        for state in window.state.values():
            state.zero_()
        shard = LocalShard(window.table, window.first, count, 0, dim, True, window.weight, window.state)
        used = set()
        for artifact, extents in zip(self.chain, mine, strict=True):
            for extent in extents:
                if extent.first < window.first + count and extent.last >= window.first:
                    apply_block(self._block(artifact, extent), shard)
                    used.add((artifact.path, extent.file))
        for key in set(self._open) - used:
            del self._open[key]
        if window.weight.isnan().any():
            raise DamagedError(
                f"checkpoint {self.artifact.path} does not hold all of rows {window.first} to "
                f"{window.first + count - 1} of table {window.table!r}",
                hint=damage_hint(self.store, self.artifact.path),
            )

    def _extents(self, index: Index, table: str) -> list[Extent]:
        return [extent for extent in index.files if extent.table == table]

    def _block(self, artifact: Artifact, extent: Extent) -> RowBlock:
        key = (artifact.path, extent.file)
        if key not in self._open:
            data = read_verified(self.store, artifact, extent.file)
            self._open[key] = read_block(data, self.store.url_of(f"{artifact.path}/{extent.file}"))
        return self._open[key]


def _lowest_column(extent: Extent) -> tuple[int, int]:
    return extent.column, extent.first
