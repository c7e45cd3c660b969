"""The rows of a sharded model: every read and write goes by table name and global row number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.embeddings.initial import rows_at
from pipeline.embeddings.shards import LocalShard, ShardStore
from pipeline.embeddings.state import kernel_states
from pipeline.embeddings.table_optimizer_config import TableRules
from pipeline.embeddings.tables import Kernel, TableSpec, kernels, sharded_collections, table_group

_AT_ONCE = 1 << 18


class RowAccess:
    """The rows of a sharded model on this rank, on any tier, and the ``rules`` by which its tables learn.

    ``tables``: all tables of the model, on whichever ranks they are; None reads them from the collections, where every
    rank has all of them.
    """

    def __init__(self, dmp: DistributedModelParallel, tables: Sequence[TableSpec] | None = None) -> None:
        self._dmp = dmp
        self.rules: TableRules = cast(Any, dmp).table_rules
        self._ssd: ShardStore | None = getattr(dmp, "ssd", None)
        configs = [c for ebc in sharded_collections(dmp).values() for c in ebc._embedding_bag_configs]
        specs = tables or [TableSpec(c.name, c.num_embeddings, c.embedding_dim, c.weight_init_max) for c in configs]
        self.tables = {spec.name: spec for spec in specs}

    def local_shards(self) -> list[LocalShard]:
        """Every non-empty shard of this rank, ordered by (table, row, column).

        Views stay valid as long as the model. Of a table with a device cache they stay valid until its next lookup:
        this call writes the cache back and empties it.
        """
        shards = [shard for kernel in kernels(self._dmp) for shard in self._shards_of(kernel)]
        return sorted(shards, key=lambda shard: (shard.table, shard.row, shard.column))

    def _shards_of(self, kernel: Kernel) -> list[LocalShard]:
        if kernel.fused:
            kernel.module.flush()
            kernel.module.reset_cache_states()
        states = kernel_states(kernel, self.rules.of(kernel.tables[0].name).columns)
        order = {name: i for i, name in enumerate(self.tables)}
        group = table_group(self._dmp)
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        shards: list[LocalShard] = []
        for table, weight, state in zip(kernel.tables, kernel.module.split_embedding_weights(), states, strict=True):
            place = table.local_metadata
            row, column = place.shard_offsets if place is not None else (0, 0)
            owner = place is not None or order[table.name] % ranks == rank
            rows, columns = weight.shape
            if self._ssd is not None and table.name in self._ssd.tables:
                shards.append(self._ssd.local_shard(table.name, owner, self.rules.of(table.name).columns))
            elif rows:
                parts = {name: values.detach() for name, values in state.items()}
                shards.append(LocalShard(table.name, row, rows, column, columns, owner, weight.detach(), parts))
        return shards

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fill every row from (seed, table, global row) and zero the optimizer state: the same on any sharding."""
        for shard in self.local_shards():
            shard.begin(self.tables[shard.table], seed)


@torch.no_grad()
def reset_rows(access: RowAccess, table: str, rows: np.ndarray, seed: int) -> None:
    """Give the global ``rows`` (int64 [n], each once) of ``table`` their initial values and zero their optimizer state.

    Writes the rows of this rank's shards and replicas alone: call it on every rank. ``seed``: of the training.
    """
    spec = access.tables[table]
    for shard in access.local_shards():
        if shard.table != table:
            continue
        own = rows[(rows >= shard.row) & (rows < shard.row + shard.rows)]
        for start in range(0, len(own), _AT_ONCE):
            part = own[start : start + _AT_ONCE].astype(np.int64)
            values = rows_at(seed, spec, part)[:, shard.column : shard.column + shard.columns]
            places = torch.from_numpy(part - shard.row).to(shard.device)
            zeros = {name: torch.zeros(s, device=shard.device) for name, s in shard.state_shapes(len(part)).items()}
            shard.put(places, torch.from_numpy(np.ascontiguousarray(values)).to(shard.device), zeros)
