"""Rows, not shards: every read and write of table contents goes by (table name, global row number)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.embeddings.learning import kernel_states
from pipeline.embeddings.shards import LocalShard, ShardStore, columns_of
from pipeline.embeddings.tables import Kernel, TableSpec, kernels, sharded_collections, table_group
from pipeline.specs.table_optimizer import TableOptimizer


@dataclass(frozen=True)
class RowValues:
    """Copies of some rows: columns [column, column + columns) as ``weight`` [n, columns], ``state`` by name [n] or
    [n, columns].
    """

    column: int
    columns: int
    weight: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)


class RowAccess:
    """The rows of a sharded model on this rank, of any tier. ``tables``: all of the model's, wherever they lie.

    ``optimizer``: theirs. ``tables`` is given where only some ranks hold a table; else the collections tell it.
    """

    def __init__(self, dmp: DistributedModelParallel, tables: Sequence[TableSpec] | None = None) -> None:
        self._dmp = dmp
        self.optimizer: TableOptimizer = cast(Any, dmp).table_optimizer
        self._ssd: ShardStore | None = getattr(dmp, "ssd", None)
        configs = [c for ebc in sharded_collections(dmp).values() for c in ebc._embedding_bag_configs]
        specs = tables or [TableSpec(c.name, c.num_embeddings, c.embedding_dim) for c in configs]
        self.tables = {spec.name: spec for spec in specs}

    def local_shards(self) -> list[LocalShard]:
        """Every non-empty shard of this rank, ordered by (table, row, column).

        Views stay valid as long as the model; of a table with a device cache until it is next looked up, for what is
        cached is written back and forgotten here.
        """
        shards = [shard for kernel in kernels(self._dmp) for shard in self._shards_of(kernel)]
        return sorted(shards, key=lambda shard: (shard.table, shard.row, shard.column))

    def _shards_of(self, kernel: Kernel) -> list[LocalShard]:
        if kernel.fused:
            kernel.module.flush()
            kernel.module.reset_cache_states()
        states = kernel_states(kernel, self.optimizer.columns)
        order = {name: i for i, name in enumerate(self.tables)}
        group = table_group(self._dmp)
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        shards: list[LocalShard] = []
        for table, weight, state in zip(kernel.tables, kernel.module.split_embedding_weights(), states, strict=True):
            place = table.local_metadata
            row, column = place.shard_offsets if place is not None else (0, 0)
            owner = place is not None or order[table.name] % world == rank
            rows, columns = weight.shape
            if self._ssd is not None and table.name in self._ssd.tables:
                shards.append(self._ssd.local_shard(table.name, owner, list(state)))
            elif rows:
                parts = {name: values.detach() for name, values in state.items()}
                shards.append(LocalShard(table.name, row, rows, column, columns, owner, weight.detach(), parts))
        return shards

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fill every row from (seed, table, global row) and zero the optimizer state: the same on any sharding."""
        for shard in self.local_shards():
            shard.begin(self.tables[shard.table], seed)

    def _holding(self, table: str, rows: Tensor) -> list[tuple[LocalShard, Tensor]]:
        """Local shards that hold all of ``rows`` and the rows' places in them; ValueError where there is none."""
        holders = []
        for shard in self.local_shards():
            if shard.table == table:
                places = rows.cpu() - shard.row
                if bool(((places >= 0) & (places < shard.rows)).all()):
                    holders.append((shard, places))
        if not holders:
            raise ValueError(f"this rank does not hold all the asked rows of table {table!r}")
        return holders

    def read(self, table: str, rows: Tensor) -> list[RowValues]:
        """Copies of the global ``rows`` (int64 [n]) of ``table``, one entry per column range on this rank.

        ValueError where one of the rows is not local.
        """
        found = []
        for shard, places in self._holding(table, rows):
            weight = torch.empty(len(rows), shard.columns, device=shard.device)
            state = {name: torch.empty(s, device=shard.device) for name, s in shard.state_shapes(len(rows)).items()}
            shard.copy(places.to(shard.device), weight, state)
            found.append(RowValues(shard.column, shard.columns, weight, state))
        return found

    @torch.no_grad()
    def write(self, table: str, rows: Tensor, values: list[RowValues]) -> None:
        """Overwrite the global ``rows`` of ``table`` with ``values`` (as ``read`` returns them, or wider columns).

        ValueError where a row is not local or a local column range is not given. Replicas are
        written on this rank only: call it on every rank.
        """
        for shard, places in self._holding(table, rows):
            end = shard.column + shard.columns
            given = [v for v in values if v.column <= shard.column and v.column + v.columns >= end]
            if not given:
                raise ValueError(f"columns {shard.column} to {end - 1} of table {table!r} are not given")
            part = given[0]
            cut = slice(shard.column - part.column, end - part.column)
            shard.put(places.to(shard.device), part.weight[:, cut], columns_of(part.state, cut))
