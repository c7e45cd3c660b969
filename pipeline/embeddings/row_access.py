"""The rows of a sharded model, by table name and global row number, and this rank's shards of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline.embeddings.initial import INIT_BLOCK_ROWS, initial_rows, rows_at
from pipeline.embeddings.table_optimizers import TableRules
from pipeline.embeddings.tables import TableSpec, kernel_states, kernels, sharded_collections, table_group
from pipeline.records.plan import ShardPlan
from pipeline.specs.optimizers import StateColumn

Places = slice | Tensor
# The number of rows that are reset at a time, which bounds the memory for their new values.
_RESET_ROWS = 1 << 18


@dataclass
class LocalShard:
    """Rows [row, row + rows) and columns [column, column + columns) of ``table`` on this rank.

    ``weight`` [rows, columns] and ``state``, by name [rows] or [rows, columns], are float32 views of the live storage.
    Of the ranks that hold a data-parallel replica, ``owner`` is true on only one; other shards are always owned.
    ``Places`` are row numbers relative to the shard.
    """

    table: str
    row: int
    rows: int
    column: int
    columns: int
    owner: bool
    weight: Tensor
    state: dict[str, Tensor]

    @property
    def device(self) -> torch.device:
        """The device on which lookups read the rows."""
        return self.weight.device

    def copy(self, places: Places, weight: Tensor, state: Mapping[str, Tensor]) -> None:
        """Copy the rows at ``places`` into ``weight`` [n, columns] and ``state`` by name [n] or [n, columns]."""
        _copy(self.weight, places, weight)
        for name, destination in state.items():
            _copy(self.state[name], places, destination)

    def scratch(self) -> Tensor | None:
        """Return float32 on disk with room for a copy of all rows and states; None where copies go to memory.

        Raises GuardError if the disk has no room.
        """
        return None

    def put(
        self, places: Places, weight: Tensor, state: Mapping[str, Tensor], column: int = 0, *, add: bool = False
    ) -> None:
        """Overwrite columns from ``column`` on of the rows at ``places``, each given once, and the given states.

        With ``add``, states of whole rows, [n], are added to instead of overwritten.
        """
        part = slice(column, column + weight.shape[1])
        self.weight[places, part] = weight.to(self.weight)
        for name, values in state.items():
            current = self.state[name]
            values = values.to(current)
            if values.dim() > 1:
                current[places, part] = values
            elif add:
                current[places] = current[places] + values
            else:
                current[places] = values

    def begin(self, table: TableSpec, seed: int) -> None:
        """Set all rows to their initial values, and their state to zeros."""
        for start in range(self.row, self.row + self.rows, INIT_BLOCK_ROWS):
            stop = min(start + INIT_BLOCK_ROWS, self.row + self.rows)
            values = initial_rows(seed, table, start, stop)[:, self.column : self.column + self.columns]
            self.weight[start - self.row : stop - self.row].copy_(values)
        self.zero_state()

    def state_shapes(self, rows: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the states of ``rows`` rows by name: (rows,) or (rows, columns)."""
        return {name: (rows, *values.shape[1:]) for name, values in self.state.items()}

    def zero_state(self) -> None:
        """Set the optimizer state of all rows to zero."""
        for state in self.state.values():
            state.zero_()


def _copy(source: Tensor, places: Places, destination: Tensor) -> None:
    if isinstance(places, Tensor) and source.device.type == "cpu" and destination.is_contiguous():
        torch.index_select(source, 0, places, out=destination)
    else:
        destination.copy_(source[places])


def columns_of(state: Mapping[str, Tensor], columns: slice) -> dict[str, Tensor]:
    """Cut the ``state`` of n rows to ``columns``.

    Args:
        state: States by name, [n, k] with a number for each value of a row, or [n], which stays as it is.
        columns: The columns to keep of the k.
    """
    parts = {}
    for name, values in state.items():
        if values.dim() > 1:
            values = values[:, columns]
        parts[name] = values
    return parts


class RowStore(Protocol):
    """The rows of tables that no kernel keeps whole, on one rank: those on tier ssd (``ssd/store.py``).

    ``shard_model`` calls ``provide_memory``, ``building_kernels`` and ``attach``, in this order. A training announces
    the ids of coming batches to ``prefetch`` and calls ``check`` before each step.
    """

    # Whether kernels have memory only for some rows of a table, which change from batch to batch.
    cached: bool

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables of which this rank has rows."""
        ...

    @property
    def placed(self) -> dict[str, tuple[ShardPlan, ...]]:
        """All tables of the store, each with its shards on all ranks."""
        ...

    def provide_memory(self, collection: EmbeddingBagCollection, rules: TableRules) -> None:
        """Set the memory from which the kernels of the store's tables in ``collection`` will look up."""
        ...

    def building_kernels(self) -> AbstractContextManager[None]:
        """Have TorchRec build kernels with the memory of ``provide_memory`` while the context is open."""
        ...

    def attach(self, dmp: DistributedModelParallel) -> None:
        """Turn the row numbers of the sharded model's lookups into positions in that memory."""
        ...

    def prefetch(self, ids: Mapping[str, NDArray[np.int64]]) -> None:
        """Start bringing the rows of a coming global batch into memory. ``ids`` has row numbers by table."""
        ...

    def check(self) -> None:
        """Raise the errors of the store since the last step."""
        ...

    def take_counts(self) -> list[float]:
        """Return the counts since the last call; ``ssd.diagnostics`` names their sums over the ranks."""
        ...

    def shortcomings(self) -> list[tuple[str, str]]:
        """Return the features for a fast store that the machine refuses, each with what to change."""
        ...

    def local_shard(self, table: str, owner: bool, states: Sequence[StateColumn]) -> LocalShard:
        """Return this rank's shard of ``table``, with its optimizer's ``states``."""
        ...


class RowAccess:
    """The rows of a sharded model on this rank, on any tier, and the ``rules`` by which its tables learn.

    ``tables`` are all tables of the model, on whichever ranks they are; None reads them from the collections, where
    every rank has all of them.
    """

    def __init__(self, dmp: DistributedModelParallel, tables: Sequence[TableSpec] | None = None) -> None:
        self._dmp = dmp
        self.rules: TableRules = cast(Any, dmp).table_rules
        self._store: RowStore | None = getattr(dmp, "row_store", None)
        self.tables: dict[str, TableSpec] = {}
        if tables:
            for table in tables:
                self.tables[table.name] = table
            return
        for collection in sharded_collections(dmp).values():
            for config in collection._embedding_bag_configs:
                self.tables[config.name] = TableSpec(
                    config.name, config.num_embeddings, config.embedding_dim, config.weight_init_max
                )

    def local_shards(self) -> list[LocalShard]:
        """Return every non-empty shard of this rank, ordered by (table, row, column).

        Views stay valid as long as the model. Views of a table with a device cache stay valid until its next lookup:
        this call writes the cache back and empties it.
        """
        order = {name: i for i, name in enumerate(self.tables)}
        group = table_group(self._dmp)
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        shards: list[LocalShard] = []
        for kernel in kernels(self._dmp):
            if not kernel.data_parallel:
                kernel.module.flush()
                kernel.module.reset_cache_states()
            states = kernel_states(kernel, self.rules.of(kernel.tables[0].name).columns)
            weights = kernel.module.split_embedding_weights()
            for table, weight, state in zip(kernel.tables, weights, states, strict=True):
                name, metadata = table.name, table.local_metadata
                if metadata is not None:
                    row, column = metadata.shard_offsets
                    owner = True
                else:
                    # The table is a data-parallel replica. Ownership of replicas is spread over the ranks.
                    row = column = 0
                    owner = order[name] % ranks == rank
                if self._store is not None and name in self._store.tables:
                    shards.append(self._store.local_shard(name, owner, self.rules.of(name).columns))
                elif len(weight):
                    rows, columns = weight.shape
                    views = {key: values.detach() for key, values in state.items()}
                    shards.append(LocalShard(name, row, rows, column, columns, owner, weight.detach(), views))
        return sorted(shards, key=lambda shard: (shard.table, shard.row, shard.column))

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fill rows by (seed, table, global row), which is the same on any sharding, and zero the optimizer state."""
        for shard in self.local_shards():
            shard.begin(self.tables[shard.table], seed)


@torch.no_grad()
def reset_rows(access: RowAccess, table: str, rows: np.ndarray, seed: int) -> None:
    """Reset the global ``rows`` (int64 [n], each once) of ``table`` to initial values, and optimizer state to 0.

    Only writes rows of this rank's shards and replicas, so call it on every rank. ``seed`` is that of the training.
    """
    spec = access.tables[table]
    for shard in access.local_shards():
        if shard.table != table:
            continue
        local = rows[(rows >= shard.row) & (rows < shard.row + shard.rows)]
        for start in range(0, len(local), _RESET_ROWS):
            part = local[start : start + _RESET_ROWS].astype(np.int64)
            values = rows_at(seed, spec, part)[:, shard.column : shard.column + shard.columns]
            weight = torch.from_numpy(np.ascontiguousarray(values)).to(shard.device)
            places = torch.from_numpy(part - shard.row).to(shard.device)
            shapes = shard.state_shapes(len(part))
            zeros = {name: torch.zeros(shape, device=shard.device) for name, shape in shapes.items()}
            shard.put(places, weight, zeros)
