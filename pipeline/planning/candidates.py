"""Every way to place a table (sharding, tier, cache size), with its cost in both models and the memory it takes.

Shards, buffers and one cost come from TorchRec; hit rates, distinct ids and our cost come from here. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pipeline.config.hardware import HardwareConfig
from pipeline.config.train import TrainConfig
from pipeline.planning.choices import (
    DATA_PARALLEL,
    ROW_WISE,
    TABLE_COLUMN_WISE,
    TABLE_ROW_WISE,
    TABLE_WISE,
    Choice,
    PlannedTable,
    tiers_of,
)
from pipeline.planning.cost import FLOAT, ShardLoad, missing_rows, shard_ms
from pipeline.planning.hardware import MEMORIES, fast_memory, kernel_of
from pipeline.planning.shard_workload import Asked, ShardBlock, asked_of
from pipeline.records.plan import HOST_ROW_BYTES, MARK_BYTES
from pipeline.records.scratch import NUMBER_BYTES, log_shape, place_bytes

# A cache may hold these shares of a table's rows; TorchRec's default is 0.2.
CACHE_SHARES = (0.003, 0.01, 0.03, 0.1, 0.2, 0.5)
STOCK_CACHE = 0.2
# Host memory behind a GPU's cache of a table on SSD may hold these shares of its rows.
HOST_SHARES = (0.0, 0.03, 0.1, 0.3)
# FBGEMM's cache has an id and a time stamp (8 bytes each) for every slot, and a slot number (4 bytes) for every row.
SLOT_BYTES, ROW_BYTES = 16, 4
# Batches whose rows from SSD are in memory beside those read ahead: trained, exchanged, fetched (twice), written.
BATCHES_MOVING = 5
# Of each lookup in these batches that is not served by pinned rows: its row and its slot.
LOOKUP_BYTES = 8
# A GPU's cache of a table on SSD has slots for the distinct rows of two batches: one in training, and the next.
BATCHES_CACHED = 2
# The phase that TorchRec's pipeline works on while the step before runs (``cost.step_ms``).
BESIDE = "input_exchange"


class Stock(NamedTuple):
    """What a shard costs in TorchRec's own model, ms."""

    compute: float
    comms: float

    @property
    def ms(self) -> float:
        """Both, as TorchRec adds them."""
        return self.compute + self.comms


@dataclass(frozen=True, kw_only=True)
class TableSharding:
    """One table under one sharding type, in any tier; ``buffers``: bytes of a batch, by shard."""

    sharding: str
    shards: tuple[ShardBlock, ...]
    buffers: tuple[int, ...]
    stock: Mapping[str, tuple[Stock, ...]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Offer:
    """One way to place a table. Cached rows and hit rates are the table's, the other figures are by shard.

    ``host_rows``, ``host_rate``: of tier ssd on a GPU, rows in host memory behind the cache, and what they serve more.
    ``phases``: our cost, ms; ``stock_ms``: TorchRec's; ``bytes``: in the order of MEMORIES.
    """

    table: str
    layout: TableSharding
    tier: str
    kernel: str
    cache_rows: int
    hit_rate: float
    host_rows: int
    host_rate: float
    phases: tuple[Mapping[str, float], ...]
    stock_ms: tuple[float, ...]
    bytes: tuple[tuple[int, int, int], ...]

    @cached_property
    def ms(self) -> tuple[float, ...]:
        """Our cost by shard, without what overlaps with the step."""
        return tuple(sum(ms for phase, ms in phases.items() if phase != BESIDE) for phases in self.phases)

    @cached_property
    def beside_ms(self) -> tuple[float, ...]:
        """Our cost by shard of what overlaps with the step: the next batch's ids, and its rows read from SSD."""
        return tuple(phases.get(BESIDE, 0.0) for phases in self.phases)

    @cached_property
    def total_bytes(self) -> tuple[int, int, int]:
        """Over all shards, in the order of MEMORIES."""
        hbm, ddr, ssd = (sum(sizes) for sizes in zip(*self.bytes, strict=True))
        return hbm, ddr, ssd

    @cached_property
    def rows(self) -> int:
        """Rows of the table."""
        return max(shard.row + shard.rows for shard in self.layout.shards)

    @property
    def sharding(self) -> str:
        """TorchRec's name of the sharding type."""
        return self.layout.sharding


def places(hardware: HardwareConfig, layout: TableSharding) -> tuple[tuple[int, ...], ...] | None:
    """Alternative lists of ranks for the shards, in their order; None: each shard may go to any rank."""
    local, world = hardware.ranks_per_host, hardware.world_size
    if layout.sharding in (ROW_WISE, DATA_PARALLEL):
        return (tuple(range(world)),)
    if layout.sharding == TABLE_ROW_WISE:
        return tuple(tuple(range(first, first + local)) for first in range(0, world, local))
    if layout.sharding == TABLE_COLUMN_WISE:
        count = range(len(layout.shards))
        apart = len(layout.shards) if local % len(layout.shards) == 0 else 1
        starts = range(0, local, apart)
        return tuple(
            tuple(first + (start + i) % local for i in count) for first in range(0, world, local) for start in starts
        )
    return None


def whole_layout(batch: int, table: PlannedTable) -> TableSharding:
    """The table whole on the one rank of a CPU, as TorchRec's enumerator and estimators describe it.

    Its buffers are 8 bytes an id and 4 a pooled value (torchrec.distributed.planner.shard_estimators). Its cost is left
    out: with one layout there is nothing to decide.
    """
    ids = math.ceil(batch * table.pooling * 8)
    values = math.ceil(min(float(table.outputs), table.pooling) * batch * table.dim * FLOAT)
    whole = ShardBlock(0, table.rows, 0, table.dim)
    return TableSharding(
        sharding=TABLE_WISE, shards=(whole,), buffers=(ids + values,), stock={"fused": (Stock(0.0, 0.0),)}
    )


def offers(
    hardware: HardwareConfig, train: TrainConfig, table: PlannedTable, choice: Choice, layouts: list[TableSharding]
) -> list[Offer]:
    """Every sharding of ``layouts`` in every tier of ``choice`` that can hold it, with every cache size."""
    offered = []
    for layout in layouts:
        asked = asked_of(hardware.world_size, train.batch, table, layout.sharding, layout.shards)
        for tier in tiers_of(layout.sharding, choice.tiers):
            for kept in _kept(hardware, choice, tier, asked):
                offered.append(_offer(hardware, train, layout, tier, kept, asked))
    return offered


class CachedRows(NamedTuple):
    """How many rows of a table the faster memory keeps, and host memory behind a GPU's."""

    cache: int
    host: int


def _kept(hardware: HardwareConfig, choice: Choice, tier: str, asked: Asked) -> list[CachedRows]:
    """Numbers of rows worth keeping."""
    rows = asked.table.rows
    shares = HOST_SHARES if tier == "ssd" and hardware.device == "cuda" else (0.0,)
    both = (
        CachedRows(cache, min(rows - cache, round(share * rows)))
        for cache in _cache_sizes(hardware, choice, tier, asked)
        for share in shares
    )
    return list(dict.fromkeys(both))


def _cache_sizes(hardware: HardwareConfig, choice: Choice, tier: str, asked: Asked) -> list[int]:
    """Cache sizes worth trying. A GPU looks up a table on SSD in its cache alone, so the cache holds whole batches."""
    table = asked.table
    if tier not in ("hbm_cached", "ssd"):
        return [0]
    if choice.cache_rows is not None:
        return [choice.cache_rows]
    least = 1
    if tier == "ssd" and hardware.device == "cuda":
        needs = (rows / block.rows for rows, block in zip(asked.distinct, asked.blocks, strict=True))
        least = min(table.rows, math.ceil(BATCHES_CACHED * max(needs) * table.rows))
    return sorted({max(least, round(share * table.rows)) for share in CACHE_SHARES})


def _offer(
    hardware: HardwareConfig, train: TrainConfig, layout: TableSharding, tier: str, kept: CachedRows, asked: Asked
) -> Offer:
    table, kernel = asked.table, kernel_of(hardware, tier, layout.sharding)
    loads = asked.loads(hardware, tier, *kept)
    priced = {load: shard_ms(hardware, load, global_batch=train.batch) for load in dict.fromkeys(loads)}
    return Offer(
        table=table.name,
        layout=layout,
        tier=tier,
        kernel=kernel,
        cache_rows=kept.cache,
        hit_rate=asked.mean([load.hit_rate for load in loads]),
        host_rows=kept.host,
        host_rate=asked.mean([load.host_rate for load in loads]),
        phases=tuple(priced[load] for load in loads),
        stock_ms=_stock_ms(hardware, table, layout, tier, kernel, kept.cache),
        bytes=tuple(
            _bytes(hardware, table, tier, kept, block, buffers, _flight(hardware, train, load))
            for block, buffers, load in zip(layout.shards, layout.buffers, loads, strict=True)
        ),
    )


def _flight(hardware: HardwareConfig, train: TrainConfig, load: ShardLoad) -> int:
    """Memory for a shard's rows in flight from SSD: those of batches read ahead, and copies while they move."""
    if load.tier != "ssd":
        return 0
    row = FLOAT * load.columns + load.optimizer.state_bytes(load.columns)
    ahead = train.prefetch_batches if hardware.device == "cpu" else 0  # a GPU's are in its cache
    lookups = load.lookups if hardware.device == "cuda" else load.lookups * (1.0 - load.hit_rate)
    found = (train.prefetch_batches + BATCHES_MOVING) * lookups * LOOKUP_BYTES
    moving = (ahead + BATCHES_MOVING) * missing_rows(load) * (row + NUMBER_BYTES)
    return int(moving + found) + log_shape(load.rows, row, hardware.ssd_spare).memory


def _bytes(
    hardware: HardwareConfig,
    table: PlannedTable,
    tier: str,
    kept: CachedRows,
    block: ShardBlock,
    buffers: int,
    flight: int,
) -> tuple[int, int, int]:
    """Bytes of one shard by memory: weights and state in its tier, its part of the cache, buffers, rows in ``flight``.

    TorchRec's own figures do not do: it charges SSD tables neither DDR nor SSD, and knows one cache size.
    """
    sizes = dict.fromkeys(MEMORIES, 0)
    fast = fast_memory(hardware)
    home = {"hbm": "hbm", "hbm_cached": "ddr"}.get(tier, tier)
    row = table.row_bytes(block.columns)
    if tier == "ssd":
        # A checkpoint's copy of the rows lies on SSD too.
        sizes["ssd"] += log_shape(block.rows, row, hardware.ssd_spare).bytes + block.rows * row
        hosted = -(-kept.host * block.rows // table.rows)
        sizes["ddr"] += place_bytes(block.rows + hosted) * block.rows + hosted * (row + HOST_ROW_BYTES)
    else:
        sizes[home] += block.rows * row
    if hardware.device == "cuda":
        sizes[fast] += MARK_BYTES * block.rows
    sizes[fast] += buffers
    sizes["ddr"] += flight
    if kept.cache:
        slots = -(-kept.cache * block.rows // table.rows)
        if tier == "hbm_cached":
            row = 4 * block.columns + SLOT_BYTES
            sizes[fast] += ROW_BYTES * block.rows
        sizes[fast] += slots * row
    return sizes["hbm"], sizes["ddr"], sizes["ssd"]


def _stock_ms(
    hardware: HardwareConfig, table: PlannedTable, layout: TableSharding, tier: str, kernel: str, cache_rows: int
) -> tuple[float, ...]:
    """TorchRec's cost by shard, its compute scaled by the bandwidth of our cache size or of the SSD."""
    known = layout.stock[kernel]
    if tier == "ssd":
        slower = (hardware.hbm_gb_per_s if hardware.device == "cuda" else hardware.ddr_gb_per_s) / hardware.ssd_gb_per_s
    elif tier == "hbm_cached":
        slower = _cached_gb_per_s(hardware, STOCK_CACHE) / _cached_gb_per_s(hardware, cache_rows / table.rows)
    else:
        return tuple(shard.ms for shard in known)
    return tuple(shard.compute * slower + shard.comms for shard in known)


def _cached_gb_per_s(hardware: HardwareConfig, share: float) -> float:
    """The bandwidth TorchRec's model gives a cache of ``share`` of the rows (``kernel_bw_lookup``)."""
    return (share * hardware.hbm_gb_per_s + (1 - share) * hardware.hbm_to_ddr_gb_per_s) / 10
