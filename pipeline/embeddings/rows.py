"""Rows, not shards: every read and write of table contents goes by (table name, global row number)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.embeddings.learning import kernel_states
from pipeline.embeddings.shards import DiskShard, LocalShard, columns_of
from pipeline.embeddings.tables import Kernel, TableSpec, kernels, sharded_collections, table_group
from pipeline.specs.table_optimizer import TableOptimizer

if TYPE_CHECKING:
    from pipeline.embeddings.ssd.store import SsdStore

INIT_BLOCK_ROWS = 8192


@dataclass(frozen=True)
class RowValues:
    """Copies of some rows: columns [column, column + columns) as ``weight`` [n, columns], ``state`` by name [n] or
    [n, columns].
    """

    column: int
    columns: int
    weight: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)


def initial_rows(seed: int, table: TableSpec, start: int, stop: int) -> Tensor:
    """Initial values of rows [start, stop): uniform in +-1 / sqrt(table.rows), [stop - start, dim].

    A function of (seed, table, global row) alone: each block of ``INIT_BLOCK_ROWS`` rows has a
    counter-based generator of its own, so any range costs at most two blocks more than itself.
    """
    bound = 1.0 / math.sqrt(table.rows)
    parts = []
    for block in range(start // INIT_BLOCK_ROWS, -(-stop // INIT_BLOCK_ROWS)):
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(block_key(seed, table, block), "little")))
        first = block * INIT_BLOCK_ROWS
        size = min(INIT_BLOCK_ROWS, table.rows - first)
        values = generator.random((size, table.dim), dtype=np.float32)
        parts.append(values[max(start - first, 0) : stop - first])
    flat = np.concatenate(parts) if parts else np.empty((0, table.dim), dtype=np.float32)
    # numpy, not torch: blocks are small, and threads for them would wait for one another.
    flat *= np.float32(2 * bound)
    flat -= np.float32(bound)
    return torch.from_numpy(flat)


def block_key(seed: int, table: TableSpec, block: int) -> bytes:
    """The 128-bit key of the generator of a block of ``INIT_BLOCK_ROWS`` rows, little-endian."""
    return hashlib.blake2b(f"{seed}|{table.name}|{block}".encode(), digest_size=16).digest()


class RowAccess:
    """The rows of a sharded model on this rank, of any tier. ``tables``: all of the model's, wherever they lie.

    ``optimizer``: theirs. ``tables`` is given where only some ranks hold a table; else the collections tell it.
    """

    def __init__(self, dmp: DistributedModelParallel, tables: Sequence[TableSpec] | None = None) -> None:
        self._dmp = dmp
        self.optimizer: TableOptimizer = cast(Any, dmp).table_optimizer
        self._ssd: SsdStore | None = getattr(dmp, "ssd", None)
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
                shards.append(DiskShard(self._ssd, table.name, owner, list(state)))
            elif rows:
                parts = {name: values.detach() for name, values in state.items()}
                shards.append(LocalShard(table.name, row, rows, column, columns, owner, weight.detach(), parts))
        return shards

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fill every row from (seed, table, global row) and zero the optimizer state: the same on any sharding."""
        for shard in self.local_shards():
            spec = self.tables[shard.table]
            if isinstance(shard, DiskShard):
                shard.begin(spec, seed)
                continue
            for start in range(shard.row, shard.row + shard.rows, INIT_BLOCK_ROWS):
                stop = min(start + INIT_BLOCK_ROWS, shard.row + shard.rows)
                values = initial_rows(seed, spec, start, stop)[:, shard.column : shard.column + shard.columns]
                shard.weight[start - shard.row : stop - shard.row].copy_(values)
            shard.zero_state()

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
