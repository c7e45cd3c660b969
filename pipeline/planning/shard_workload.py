"""What a step asks of every shard of a table, for plans and predictions alike. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.config.hardware import HardwareConfig
from pipeline.planning.choices import DATA_PARALLEL, PlannedTable
from pipeline.planning.cost import ShardLoad


class ShardBlock(NamedTuple):
    """Rows [row, row + rows) and columns [column, column + columns) of a table."""

    row: int
    rows: int
    column: int
    columns: int


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a global ``batch`` of samples asks of a table's ``blocks``, in any tier.

    By block: ``shares`` of the table's lookups in a step, and how many ``distinct`` rows these ask for.
    """

    table: PlannedTable
    sharding: str
    blocks: Sequence[ShardBlock]
    batch: int
    shares: list[float]
    distinct: list[float]

    def mean(self, figures: Sequence[float]) -> float:
        """The mean of the blocks' ``figures``, weighted by their lookups."""
        return sum(figure * share for figure, share in zip(figures, self.shares, strict=True)) / sum(self.shares)

    def loads(self, hardware: HardwareConfig, tier: str, cache_rows: int, host_rows: int = 0) -> list[ShardLoad]:
        """The load of every block in ``tier``, with its part of a cache of ``cache_rows`` rows in front.

        ``host_rows``: that many more are in host memory, behind a GPU's cache. Rows that leave the cache come there, so
        together they serve what one cache of all these rows would.
        """
        table, batch = self.table, self.batch
        hits = _hit_rates(hardware, tier, cache_rows, self)
        either = _hit_rates(hardware, tier, cache_rows + host_rows, self) if host_rows else hits
        samples = batch / hardware.world_size if self.sharding == DATA_PARALLEL else float(batch)
        pooled = samples * table.outputs
        return [
            ShardLoad(
                rows=block.rows,
                columns=block.columns,
                lookups=batch * table.pooling * share,
                distinct=distinct,
                pooled_rows=pooled,
                sharding=self.sharding,
                tier=tier,
                hit_rate=hit,
                weighted=table.weighted,
                optimizer=table.optimizer,
                host_rate=both - hit,
            )
            for block, share, distinct, hit, both in zip(
                self.blocks, self.shares, self.distinct, hits, either, strict=True
            )
        ]


def asked_of(world_size: int, batch: int, table: PlannedTable, sharding: str, blocks: Sequence[ShardBlock]) -> Asked:
    """What a global ``batch`` of samples asks of the ``blocks`` of ``table``."""
    shares = [_share(table, sharding, block, world_size) for block in blocks]
    lookups = batch * table.pooling
    known: dict[tuple[int, int, float], float] = {}
    distinct = []
    for block, share in zip(blocks, shares, strict=True):
        key = (block.row if table.ranked else 0, block.rows, share)
        if key not in known:
            known[key] = _distinct(table, block, lookups, share)
        distinct.append(min(known[key], float(block.rows)))
    return Asked(table=table, sharding=sharding, blocks=blocks, batch=batch, shares=shares, distinct=distinct)


def _hit_rates(hardware: HardwareConfig, tier: str, cache_rows: int, asked: Asked) -> list[float]:
    """The share of each block's lookups that the faster memory serves.

    A GPU's cache is LRU. A CPU's holds a shard's first rows, which are the hottest only where rows are ranked; a fifth
    of it follows what is used instead, which costs some 7 % more misses where nothing changes and is not charged.
    """
    table = asked.table
    if tier not in ("hbm_cached", "ssd"):
        return [1.0] * len(asked.blocks)
    if hardware.device == "cuda":
        return [table.curve.lru_share(cache_rows)] * len(asked.blocks)
    if not table.ranked:
        return [cache_rows / table.rows] * len(asked.blocks)
    rates = []
    for block, share in zip(asked.blocks, asked.shares, strict=True):
        kept = cache_rows * block.rows / table.rows
        rates.append(min((table.curve.share(block.row + kept) - table.curve.share(block.row)) / share, 1.0))
    return rates


def _share(table: PlannedTable, sharding: str, block: ShardBlock, world_size: int) -> float:
    """The share of the table's lookups that a block serves."""
    if sharding == DATA_PARALLEL:
        return 1.0 / world_size
    if block.rows == table.rows:
        return 1.0
    if table.ranked:
        return max(table.curve.share(block.row + block.rows) - table.curve.share(block.row), 1e-9)
    return block.rows / table.rows


def _distinct(table: PlannedTable, block: ShardBlock, lookups: float, share: float) -> float:
    """Expected distinct rows of a block that has ``share`` of the table's ``lookups``."""
    if block.rows == table.rows:
        return table.curve.distinct(lookups * share)
    if table.ranked:
        return table.curve.within(block.row, block.rows).distinct(lookups * share)
    return table.curve.distinct(lookups) * share
