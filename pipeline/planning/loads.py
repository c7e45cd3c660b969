"""What every shard of a table is asked for in a step: the one derivation that plans and predictions share. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.config import Config, HardwareConfig
from pipeline.planning.choices import DATA_PARALLEL, Table
from pipeline.planning.cost import ShardLoad


class Block(NamedTuple):
    """Rows [row, row + rows) and columns [column, column + columns) of a table."""

    row: int
    rows: int
    column: int
    columns: int


@dataclass(frozen=True, kw_only=True)
class Asked:
    """By shard: ``shares`` of the table's lookups in a step, and how many ``distinct`` rows these ask for."""

    shares: list[float]
    distinct: list[float]


def asked_of(config: Config, table: Table, sharding: str, blocks: Sequence[Block]) -> Asked:
    """What the ``blocks`` of ``table`` are asked for, whatever tier they lie in."""
    shares = [_share(table, sharding, block, config.world_size) for block in blocks]
    lookups = config.train.batch * table.pooling
    known: dict[tuple[int, int, float], float] = {}
    distinct = []
    for block, share in zip(blocks, shares, strict=True):
        key = (block.row if table.ranked else 0, block.rows, share)
        if key not in known:
            known[key] = _distinct(table, block, lookups, share)
        distinct.append(min(known[key], float(block.rows)))
    return Asked(shares=shares, distinct=distinct)


def shard_loads(
    config: Config, table: Table, sharding: str, tier: str, blocks: Sequence[Block], asked: Asked, hits: Sequence[float]
) -> list[ShardLoad]:
    """The load of every block, with the ``hits`` (``hit_rates``) of its cache."""
    batch = config.train.batch
    pooled = batch / config.world_size if sharding == DATA_PARALLEL else float(batch)
    return [
        ShardLoad(
            rows=block.rows,
            columns=block.columns,
            lookups=batch * table.pooling * share,
            distinct=distinct,
            pooled_rows=pooled,
            sharding=sharding,
            tier=tier,
            hit_rate=hit,
            weighted=table.weighted,
            optimizer=table.optimizer,
        )
        for block, share, distinct, hit in zip(blocks, asked.shares, asked.distinct, hits, strict=True)
    ]


def hit_rates(
    hardware: HardwareConfig, table: Table, tier: str, cache_rows: int, blocks: Sequence[Block], asked: Asked
) -> list[float]:
    """Share of each block's lookups that find their row in the faster memory.

    A GPU's cache is LRU. On CPU a shard's first rows are kept: the hottest only where rows are ranked.
    """
    if tier not in ("hbm_cached", "ssd"):
        return [1.0] * len(blocks)
    if hardware.device == "cuda":
        return [table.curve.lru_share(cache_rows)] * len(blocks)
    if not table.ranked:
        return [cache_rows / table.rows] * len(blocks)
    found = []
    for block, share in zip(blocks, asked.shares, strict=True):
        kept = cache_rows * block.rows / table.rows
        found.append(min((table.curve.share(block.row + kept) - table.curve.share(block.row)) / share, 1.0))
    return found


def _share(table: Table, sharding: str, block: Block, world_size: int) -> float:
    """Of the table's lookups the share that a block serves; blocks of ranked rows are far from alike."""
    if sharding == DATA_PARALLEL:
        return 1.0 / world_size
    if block.rows == table.rows:
        return 1.0
    if table.ranked:
        return max(table.curve.share(block.row + block.rows) - table.curve.share(block.row), 1e-9)
    return block.rows / table.rows


def _distinct(table: Table, block: Block, lookups: float, share: float) -> float:
    """Expected distinct rows of a block that has ``share`` of the table's ``lookups``."""
    if block.rows == table.rows:
        return table.curve.distinct(lookups * share)
    if table.ranked:
        return table.curve.within(block.row, block.rows).distinct(lookups * share)
    return table.curve.distinct(lookups) * share
