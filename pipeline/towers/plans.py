"""A plan for each group of tower hosts, and all of them as one plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipeline.config import Config
from pipeline.records import Plan, TablePlan
from pipeline.towers.layout import Layout, TowerHosts

# TorchRec runs these over the hosts of all ranks, never within a process group.
WHOLE_WORLD = ("table_row_wise", "table_column_wise")


def tower_hosts_config(config: Config, group: TowerHosts) -> Config:
    """``config`` with which the planner places the tables of one group of tower hosts.

    The global batch stays: every rank of the group looks up the samples of all its peers.
    """
    plan = config.plan
    types = [kind for kind in plan.sharding_types if kind not in WHOLE_WORLD]
    pins = {table: kind for table, kind in plan.tables.items() if table in group.features}
    hardware = replace(config.hardware, hosts=len(group.hosts))
    return replace(config, hardware=hardware, plan=replace(plan, sharding_types=types, tables=pins))


def united_plan(layout: Layout, plans: Sequence[Plan], features: Sequence[str]) -> Plan:
    """The ``plans`` of all tower hosts as one plan of all ranks, tables in the order ``features``."""
    tables: dict[str, TablePlan] = {}
    for group, plan in enumerate(plans):
        ranks = layout.tower_ranks(group)
        for name, table in plan.tables.items():
            shards = tuple(replace(shard, rank=ranks[shard.rank]) for shard in table.shards)
            tables[name] = replace(table, shards=shards)
    return replace(
        plans[0],
        world_size=layout.hosts * layout.ranks_per_host,
        ranks_per_host=layout.ranks_per_host,
        tables={name: tables[name] for name in features},
        memory=_by_rank(layout, [plan.memory for plan in plans]),
        phases=_by_rank(layout, [plan.phases for plan in plans]),
        reserved=_by_rank(layout, [plan.reserved for plan in plans]),
        predicted_step_ms=max(plan.predicted_step_ms for plan in plans),
        gap=max(plan.gap for plan in plans),
    )


def _by_rank(layout: Layout, figures: Sequence[Sequence[Any]]) -> list[Any]:
    """Figures of the ranks of all tower hosts in the order of the global ranks; [] where a plan has none."""
    if not all(figures):
        return []
    placed = {
        rank: figure
        for group, ranks in enumerate(figures)
        for rank, figure in zip(layout.tower_ranks(group), ranks, strict=True)
    }
    return [placed[rank] for rank in sorted(placed)]
