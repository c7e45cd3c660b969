"""Lists every way to place a table (sharding, tier, cache size), with its cost in both models and its memory.

Shards, buffers and one cost come from TorchRec; hit rates, distinct ids and our cost come from here. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from pipeline.planning.cost import FLOAT, OVERLAPPED, ShardLoad, missing_rows, serial_ms, shard_ms
from pipeline.planning.hardware import MEMORIES, fast_memory, kernel_of
from pipeline.records.plan import HOST_ROW_BYTES, MARK_BYTES
from pipeline.records.scratch import NUMBER_BYTES, log_shape, place_bytes

# The shares of a table's rows that a cache may hold; TorchRec's default is 0.2.
CACHE_SHARES = (0.003, 0.01, 0.03, 0.1, 0.2, 0.5)
STOCK_CACHE = 0.2
# The shares of its rows that host memory behind a GPU's cache of a table on SSD may hold.
HOST_SHARES = (0.0, 0.03, 0.1, 0.3)
# FBGEMM's cache has an id and a time stamp (8 bytes each) for every slot, and a slot number (4 bytes) for every row.
SLOT_BYTES, ROW_BYTES = 16, 4
# The batches whose rows from SSD are in memory besides those read ahead: trained, exchanged, fetched (two), written.
BATCHES_MOVING = 5
# Each lookup in these batches that pinned rows do not serve has the number of its row and that of its slot.
LOOKUP_BYTES = 8
# A GPU's cache of a table on SSD has slots for the distinct rows of two batches: the one in training and the next.
BATCHES_CACHED = 2


class ShardBlock(NamedTuple):
    """Rows [row, row + rows) and columns [column, column + columns) of a table."""

    row: int
    rows: int
    column: int
    columns: int


class Stock(NamedTuple):
    """The cost of a shard in TorchRec's own model, in ms."""

    compute: float
    comms: float


class CachedRows(NamedTuple):
    """The number of a table's rows in the faster memory, and in host memory behind a GPU's."""

    cache: int
    host: int


@dataclass(frozen=True, kw_only=True)
class TableSharding:
    """One table under one sharding type, in any tier; ``buffers`` has the bytes of a batch, by shard."""

    sharding: str
    shards: tuple[ShardBlock, ...]
    buffers: tuple[int, ...]
    stock: Mapping[str, tuple[Stock, ...]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Offer:
    """One way to place a table. Cached rows and hit rates are the table's, the other figures are by shard.

    For tier ssd on a GPU, ``host_rows`` is the number of rows in host memory behind the cache, and ``host_rate`` the
    further share of lookups that they serve. ``phases`` is our cost in ms, ``stock_ms`` TorchRec's; ``bytes`` is in the
    order of MEMORIES.
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
        return tuple(map(serial_ms, self.phases))

    @cached_property
    def overlapped_ms(self) -> tuple[float, ...]:
        """Our cost by shard of what overlaps with the step: the next batch's ids, and its rows read from SSD."""
        return tuple(phases.get(OVERLAPPED, 0.0) for phases in self.phases)

    @cached_property
    def total_bytes(self) -> tuple[int, int, int]:
        """The bytes of all shards together, in the order of MEMORIES."""
        hbm, ddr, ssd = map(sum, zip(*self.bytes, strict=True))
        return hbm, ddr, ssd

    @cached_property
    def rows(self) -> int:
        return max(shard.row + shard.rows for shard in self.layout.shards)

    @property
    def sharding(self) -> str:
        return self.layout.sharding


# What a step asks of the shards of a table, for plans and predictions alike.


@dataclass(frozen=True, kw_only=True)
class TableWorkload:
    """What a global ``batch`` of samples asks of a table's ``blocks``, in any tier.

    By block, ``shares`` has the share of the table's lookups in a step, and ``distinct`` the distinct rows among them.
    """

    table: PlannedTable
    sharding: str
    blocks: Sequence[ShardBlock]
    batch: int
    shares: list[float]
    distinct: list[float]

    def mean(self, figures: Sequence[float]) -> float:
        """Return the mean of the blocks' ``figures``, weighted by their lookups."""
        return sum(figure * share for figure, share in zip(figures, self.shares, strict=True)) / sum(self.shares)

    def loads(self, hardware: HardwareConfig, tier: str, cache_rows: int, host_rows: int = 0) -> list[ShardLoad]:
        """Compute the load of every block in ``tier``, with its part of a cache of ``cache_rows`` rows in front.

        ``host_rows`` is the number of further rows in host memory, behind a GPU's cache.
        """
        table, batch = self.table, self.batch
        hits = with_host = self._hit_rates(hardware, tier, cache_rows)
        if host_rows:
            # Rows that leave a GPU's cache move to host memory, so the two together serve what a single cache of their
            # joint size would.
            with_host = self._hit_rates(hardware, tier, cache_rows + host_rows)
        samples = float(batch)
        if self.sharding == DATA_PARALLEL:
            # Each rank looks up only its own samples in its copy.
            samples = batch / hardware.world_size
        loads = []
        for number, block in enumerate(self.blocks):
            load = ShardLoad(
                rows=block.rows,
                columns=block.columns,
                lookups=batch * table.pooling * self.shares[number],
                distinct=self.distinct[number],
                pooled_rows=samples * table.outputs,
                sharding=self.sharding,
                tier=tier,
                hit_rate=hits[number],
                weighted=table.weighted,
                optimizer=table.optimizer,
                host_rate=with_host[number] - hits[number],
            )
            loads.append(load)
        return loads

    def _hit_rates(self, hardware: HardwareConfig, tier: str, cache_rows: int) -> list[float]:
        table, blocks = self.table, self.blocks
        if tier not in ("hbm_cached", "ssd"):
            return [1.0] * len(blocks)
        # A GPU's cache is LRU. A CPU's cache holds the first rows of a shard, which are the hottest only if rows are
        # ranked. A fifth of it follows the use instead, which causes about 7 % more misses where nothing changes and is
        # not charged.
        if hardware.device == "cuda":
            return [table.curve.lru_share(cache_rows)] * len(blocks)
        if not table.ranked:
            return [cache_rows / table.rows] * len(blocks)
        rates = []
        for block, share in zip(blocks, self.shares, strict=True):
            cached = cache_rows * block.rows / table.rows
            served = table.curve.share(block.row + cached) - table.curve.share(block.row)
            rates.append(min(served / share, 1.0))
        return rates


def compute_workload(
    world_size: int, batch: int, table: PlannedTable, sharding: str, blocks: Sequence[ShardBlock]
) -> TableWorkload:
    """Compute what a global ``batch`` of samples asks of the ``blocks`` of ``table``."""
    curve = table.curve
    shares = []
    for block in blocks:
        if sharding == DATA_PARALLEL:
            shares.append(1.0 / world_size)
        elif block.rows == table.rows:
            shares.append(1.0)
        elif table.ranked:
            shares.append(max(curve.share(block.row + block.rows) - curve.share(block.row), 1e-9))
        else:
            shares.append(block.rows / table.rows)

    # Most blocks of a table are equal, and evaluating curves is slow.
    lookups = batch * table.pooling
    known: dict[tuple[int, int, float], float] = {}
    distinct = []
    for block, share in zip(blocks, shares, strict=True):
        key = (block.row if table.ranked else 0, block.rows, share)
        if key not in known:
            if block.rows == table.rows:
                known[key] = curve.distinct(lookups * share)
            elif table.ranked:
                known[key] = curve.within(block.row, block.rows).distinct(lookups * share)
            else:
                known[key] = curve.distinct(lookups) * share
        distinct.append(min(known[key], float(block.rows)))
    return TableWorkload(table=table, sharding=sharding, blocks=blocks, batch=batch, shares=shares, distinct=distinct)


# Offers of every sharding, tier and cache size.


def allowed_places(hardware: HardwareConfig, layout: TableSharding) -> tuple[tuple[int, ...], ...] | None:
    """List the alternative ranks for the shards, in the shards' order; None: each shard may go to any rank."""
    local, world = hardware.ranks_per_host, hardware.world_size
    if layout.sharding in (ROW_WISE, DATA_PARALLEL):
        return (tuple(range(world)),)
    first_ranks = range(0, world, local)
    if layout.sharding == TABLE_ROW_WISE:
        return tuple(tuple(range(first, first + local)) for first in first_ranks)
    if layout.sharding != TABLE_COLUMN_WISE:
        return None
    # A table takes neighbouring ranks of one host, from any rank on; shards that divide a host evenly begin only at
    # multiples of their number.
    count = len(layout.shards)
    stride = count if local % count == 0 else 1
    places = []
    for first in first_ranks:
        for start in range(0, local, stride):
            places.append(tuple(first + (start + shard) % local for shard in range(count)))
    return tuple(places)


def whole_layout(batch: int, table: PlannedTable) -> TableSharding:
    """Lay out the whole table on the single rank of a CPU, as TorchRec's enumerator and estimators describe it.

    Its buffers are 8 bytes per id and 4 per pooled value (torchrec.distributed.planner.shard_estimators). Its cost is
    left out, since one layout leaves nothing to decide.
    """
    ids = math.ceil(batch * table.pooling * 8)
    values = math.ceil(min(float(table.outputs), table.pooling) * batch * table.dim * FLOAT)
    whole = ShardBlock(0, table.rows, 0, table.dim)
    return TableSharding(
        sharding=TABLE_WISE, shards=(whole,), buffers=(ids + values,), stock={"fused": (Stock(0.0, 0.0),)}
    )


def build_offers(
    hardware: HardwareConfig, train: TrainConfig, table: PlannedTable, choice: Choice, layouts: list[TableSharding]
) -> list[Offer]:
    """Offer every sharding of ``layouts`` in every tier of ``choice`` that can hold it, with every cache size."""
    offers = []
    for layout in layouts:
        workload = compute_workload(hardware.world_size, train.batch, table, layout.sharding, layout.shards)
        for tier in tiers_of(layout.sharding, choice.tiers):
            for cached in _cached_rows(hardware, choice, tier, workload):
                offers.append(_build_offer(hardware, train, layout, tier, cached, workload))
    return offers


def _cached_rows(hardware: HardwareConfig, choice: Choice, tier: str, workload: TableWorkload) -> list[CachedRows]:
    rows = workload.table.rows
    if tier not in ("hbm_cached", "ssd"):
        cache_sizes = [0]
    elif choice.cache_rows is not None:
        cache_sizes = [choice.cache_rows]
    else:
        least = 1
        if tier == "ssd" and hardware.device == "cuda":
            # A GPU looks up a table on SSD only in its cache, so the cache must hold whole batches.
            fullest = 0.0
            for distinct, block in zip(workload.distinct, workload.blocks, strict=True):
                fullest = max(fullest, distinct / block.rows)
            least = min(rows, math.ceil(BATCHES_CACHED * fullest * rows))
        cache_sizes = sorted({max(least, round(share * rows)) for share in CACHE_SHARES})
    host_shares = HOST_SHARES if tier == "ssd" and hardware.device == "cuda" else (0.0,)
    cached = []
    for cache in cache_sizes:
        for share in host_shares:
            cached.append(CachedRows(cache, min(rows - cache, round(share * rows))))
    return list(dict.fromkeys(cached))


def _build_offer(
    hardware: HardwareConfig,
    train: TrainConfig,
    layout: TableSharding,
    tier: str,
    cached: CachedRows,
    workload: TableWorkload,
) -> Offer:
    table, kernel = workload.table, kernel_of(hardware, tier, layout.sharding)
    loads = workload.loads(hardware, tier, cached.cache, cached.host)
    known: dict[ShardLoad, dict[str, float]] = {}
    phases, sizes, hits, host_hits = [], [], [], []
    for block, buffers, load in zip(layout.shards, layout.buffers, loads, strict=True):
        # Equal shards cost the same, and row-wise tables have one on every rank, so each load is rated once.
        if load not in known:
            known[load] = shard_ms(hardware, load, global_batch=train.batch)
        phases.append(known[load])
        hits.append(load.hit_rate)
        host_hits.append(load.host_rate)
        in_flight = _bytes_in_flight(hardware, train, load)
        sizes.append(shard_bytes(hardware, table, tier, cached, block, buffers, in_flight))
    return Offer(
        table=table.name,
        layout=layout,
        tier=tier,
        kernel=kernel,
        cache_rows=cached.cache,
        hit_rate=workload.mean(hits),
        host_rows=cached.host,
        host_rate=workload.mean(host_hits),
        phases=tuple(phases),
        stock_ms=_stock_ms(hardware, table, layout.stock[kernel], tier, cached.cache),
        bytes=tuple(sizes),
    )


def _bytes_in_flight(hardware: HardwareConfig, train: TrainConfig, load: ShardLoad) -> int:
    # Returns the memory for a shard's rows in flight from SSD: those of batches read ahead, and copies while they move.
    if load.tier != "ssd":
        return 0
    row = FLOAT * load.columns + load.optimizer.state_bytes(load.columns)
    if hardware.device == "cuda":
        # The rows of batches read ahead are in the GPU's cache.
        ahead, lookups = 0, load.lookups
    else:
        ahead, lookups = train.prefetch_batches, load.lookups * (1.0 - load.hit_rate)
    lookup_bytes = (train.prefetch_batches + BATCHES_MOVING) * lookups * LOOKUP_BYTES
    moving = (ahead + BATCHES_MOVING) * missing_rows(load) * (row + NUMBER_BYTES)
    return int(moving + lookup_bytes) + log_shape(load.rows, row, hardware.ssd_spare).memory


def shard_bytes(
    hardware: HardwareConfig,
    table: PlannedTable,
    tier: str,
    cached: CachedRows,
    block: ShardBlock,
    buffers: int,
    in_flight: int,
) -> tuple[int, int, int]:
    """Count a shard's bytes in the order of MEMORIES: weights, optimizer state, its part of the cache, and the rest."""
    # TorchRec's own figures cannot be used: it charges SSD tables neither DDR nor SSD, and knows one cache size.
    sizes = dict.fromkeys(MEMORIES, 0)
    fast = fast_memory(hardware)
    row = table.row_bytes(block.columns)
    if tier == "ssd":
        # A checkpoint's copy of the rows lies on SSD too.
        sizes["ssd"] += log_shape(block.rows, row, hardware.ssd_spare).bytes + block.rows * row
        hosted = -(-cached.host * block.rows // table.rows)
        sizes["ddr"] += place_bytes(block.rows + hosted) * block.rows + hosted * (row + HOST_ROW_BYTES)
    else:
        home = "hbm" if tier == "hbm" else "ddr"
        sizes[home] += block.rows * row
    if hardware.device == "cuda":
        sizes[fast] += MARK_BYTES * block.rows
    sizes[fast] += buffers
    sizes["ddr"] += in_flight
    if cached.cache:
        slots = -(-cached.cache * block.rows // table.rows)
        if tier == "hbm_cached":
            row = 4 * block.columns + SLOT_BYTES
            sizes[fast] += ROW_BYTES * block.rows
        sizes[fast] += slots * row
    return sizes["hbm"], sizes["ddr"], sizes["ssd"]


def _stock_ms(
    hardware: HardwareConfig, table: PlannedTable, stock: tuple[Stock, ...], tier: str, cache_rows: int
) -> tuple[float, ...]:
    # Scale TorchRec's compute by the bandwidth of our cache size or of the SSD, which TorchRec does not know.
    slower = 1.0
    if tier == "ssd":
        memory = hardware.hbm_gb_per_s if hardware.device == "cuda" else hardware.ddr_gb_per_s
        slower = memory / hardware.ssd_gb_per_s
    elif tier == "hbm_cached":
        slower = _cached_gb_per_s(hardware, STOCK_CACHE) / _cached_gb_per_s(hardware, cache_rows / table.rows)
    return tuple(shard.compute * slower + shard.comms for shard in stock)


def _cached_gb_per_s(hardware: HardwareConfig, share: float) -> float:
    # Returns the bandwidth that TorchRec's model gives a cache of ``share`` of the rows (``kernel_bw_lookup``).
    return (share * hardware.hbm_gb_per_s + (1 - share) * hardware.hbm_to_ddr_gb_per_s) / 10
