"""What a finished plan costs: every rank's phases and memory by the cost model. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeline.config import Config
from pipeline.contracts import DatasetSchema, Plan, Profile, ShardPlan, TablePlan
from pipeline.planning.cost import DATA_PARALLEL, FLOAT, ShardLoad, fixed_ms, shard_ms, step_ms
from pipeline.planning.hitrate import HitCurve
from pipeline.planning.memory import dense_bytes, staged_row


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """By rank: ms by phase (PHASES), bytes of its tables with their optimizer state, bytes reserved by purpose."""

    phases: list[dict[str, float]]
    tables: list[int]
    reserved: list[dict[str, int]]

    @property
    def step_ms(self) -> float:
        """A step of the slowest rank."""
        return max(step_ms(phases) for phases in self.phases)

    @property
    def bytes(self) -> int:
        """Memory of the fullest rank, tables and reservations."""
        return max(own + sum(kept.values()) for own, kept in zip(self.tables, self.reserved, strict=True))


def predict(plan: Plan, config: Config, schema: DatasetSchema, profile: Profile) -> Prediction:
    """The ``plan`` for ``config.hardware`` by the cost model; its tables are those of ``schema`` and ``profile``.

    The exchanges make the ranks wait for each other; that is not added up, the slowest rank's own time counts.
    """
    phases = [fixed_ms(config, schema) for _ in range(plan.world_size)]
    own, staged = [0] * plan.world_size, [0] * plan.world_size
    for name, table in plan.tables.items():
        ranked = _ranked(config, name)
        curve = HitCurve.from_profile(profile.sparse[name])
        weighted = any(column.weighted for column in schema.sparse)
        for shard, load in shard_loads(plan, table, curve, ranked=ranked, weighted=weighted):
            for phase, ms in shard_ms(config.hardware, load, global_batch=plan.global_batch).items():
                phases[shard.rank][phase] += ms
            if table.tier != "ssd":
                own[shard.rank] += shard.rows * (shard.columns + 1) * FLOAT
                staged[shard.rank] += shard.rows * staged_row(shard.columns)
    reserved = [dense_bytes(config, schema) for _ in own]
    if config.hardware.device == "cpu":
        for kept, rows in zip(reserved, staged, strict=True):
            kept["staging"] = rows
    return Prediction(phases=phases, tables=own, reserved=reserved)


def shard_loads(
    plan: Plan, table: TablePlan, curve: HitCurve, *, ranked: bool, weighted: bool
) -> Iterator[tuple[ShardPlan, ShardLoad]]:
    """Each shard of ``table`` and what it is asked for; ``ranked``: rows are numbered in falling frequency."""
    lookups = plan.global_batch * table.pooling
    for shard in table.shards:
        part = block_curve(curve, shard.row, shard.rows) if ranked else None
        share = curve.share(shard.row + shard.rows) - curve.share(shard.row) if ranked else shard.rows / table.rows
        asked, pooled = lookups * share, float(plan.global_batch)
        if table.sharding == DATA_PARALLEL:
            asked, pooled = lookups / plan.world_size, plan.global_batch / plan.world_size
        distinct = part.distinct(asked) if part else curve.distinct(asked / share) * share
        yield (
            shard,
            ShardLoad(
                rows=shard.rows,
                columns=shard.columns,
                lookups=asked,
                distinct=min(distinct, shard.rows),
                pooled_rows=pooled,
                sharding=table.sharding,
                tier=table.tier,
                hit_rate=table.hit_rate,
                weighted=weighted,
            ),
        )


def block_curve(curve: HitCurve, row: int, rows: int) -> HitCurve:
    """The curve of lookups that fall on ``rows`` rows from ``row`` on, the hottest of them first."""
    inner = curve.knots[(curve.knots > row) & (curve.knots < row + rows)]
    knots = np.concatenate([[row], inner, [row + rows]])
    served = np.array([curve.share(k) for k in knots])
    total = served[-1] - served[0]
    if total <= 0:
        return HitCurve.zipf(rows, 0.0)
    return HitCurve(rows=rows, knots=knots - row, served=(served - served[0]) / total)


def _ranked(config: Config, table: str) -> bool:
    """Whether ingestion numbers the table's rows in falling frequency: a vocabulary does, a hash does not."""
    feature = config.data.sparse.get(table)
    return (feature.mapping if feature and feature.mapping else config.data.sparse_defaults.mapping) == "vocab"
