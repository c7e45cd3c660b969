"""The rows of one checkpoint, chain applied, table by table in row order, with bounded memory: for export and diff."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch

from pipeline.checkpoint.chunks import RowBlock, read_block
from pipeline.checkpoint.index import damage_hint, restore_order
from pipeline.checkpoint.reader import apply_block, meets, read_index
from pipeline.checkpoint.verified import read_verified
from pipeline.embeddings.shards import LocalShard
from pipeline.errors import DamagedError
from pipeline.records import Extent, TableSize
from pipeline.store import Artifact, Store

# float32 bytes of a window of rows.
WINDOW_BYTES = 16 << 20


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

    def reopened(self) -> ChainReader:
        """Another reader of the same checkpoint, for another thread: what a reader has open is its own."""
        other = copy.copy(self)
        other._open, other._states = {}, {}
        return other

    def states(self, table: str) -> dict[str, bool]:
        """The optimizer's states of ``table`` by name: whether each weight has one, not each row."""
        if table not in self._states:
            extents = [extent for extent in self._indices[0].files if extent.table == table]
            stored = self._block(self.chain[0], extents[0]).state if extents else {}
            self._states[table] = {name: stored[name].dim() > 1 for name in sorted(stored)}
        return self._states[table]

    def windows(self, table: str, window_bytes: int = WINDOW_BYTES) -> Iterator[LocalShard]:
        """All rows of ``table`` in order, as shards of its rows. A window's tensors are used again for the next one."""
        rows, dim = self.tables[table].rows, self.tables[table].dim
        size = max(1, window_bytes // (4 * dim))
        mine = [
            sorted((e for e in index.files if e.table == table), key=lambda extent: (extent.column, extent.first))
            for index in self._indices
        ]
        weight = torch.empty(min(size, rows), dim)
        states = {
            name: torch.empty((len(weight), dim) if wide else len(weight)) for name, wide in self.states(table).items()
        }
        self._open.clear()
        for first in range(0, rows, size):
            count = min(size, rows - first)
            state = {name: values[:count] for name, values in states.items()}
            window = LocalShard(table, first, count, 0, dim, True, weight[:count], state)
            self._fill(window, mine)
            yield window

    def _fill(self, window: LocalShard, mine: list[list[Extent]]) -> None:
        window.weight.fill_(float("nan"))
        for state in window.state.values():
            state.zero_()
        used = set()
        for artifact, extents in zip(self.chain, mine, strict=True):
            for extent in extents:
                if meets(extent, window):
                    apply_block(self._block(artifact, extent), window)
                    used.add((artifact.path, extent.file))
        for key in set(self._open) - used:
            del self._open[key]
        if window.weight.isnan().any():
            raise DamagedError(
                f"checkpoint {self.artifact.path} does not hold all of rows {window.row} to "
                f"{window.row + window.rows - 1} of table {window.table!r}",
                hint=damage_hint(self.store, self.artifact.path),
            )

    def _block(self, artifact: Artifact, extent: Extent) -> RowBlock:
        key = (artifact.path, extent.file)
        if key not in self._open:
            data = read_verified(self.store, artifact, extent.file)
            self._open[key] = read_block(data, self.store.url_of(f"{artifact.path}/{extent.file}"))
        return self._open[key]
