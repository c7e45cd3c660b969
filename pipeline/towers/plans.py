"""One plan per site, and all of them as one: every table on the ranks of its tower's hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipeline.config import Config
from pipeline.records import Plan, TablePlan
from pipeline.towers.layout import Layout, Site

# TorchRec runs these over groups of the whole world's hosts, never inside a sub-group.
WHOLE_WORLD = ("table_row_wise", "table_column_wise")


def site_config(config: Config, site: Site) -> Config:
    """``config`` as the planner must see it to plan ``site``'s tables alone.

    The global batch stays: every rank of a site looks up the samples of all its peers.
    """
    plan = config.plan
    types = [kind for kind in plan.sharding_types if kind not in WHOLE_WORLD]
    pins = {table: kind for table, kind in plan.tables.items() if table in site.features}
    hardware = replace(config.hardware, hosts=len(site.hosts))
    return replace(config, hardware=hardware, plan=replace(plan, sharding_types=types, tables=pins))


def united_plan(layout: Layout, plans: Sequence[Plan], features: Sequence[str]) -> Plan:
    """The sites' ``plans`` as one plan of all ranks, tables in the order ``features``."""
    tables: dict[str, TablePlan] = {}
    for site, plan in enumerate(plans):
        ranks = layout.site_ranks(site)
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
    """Figures of every site's ranks in the order of the global ranks; [] where a plan has none."""
    if not all(figures):
        return []
    placed = {
        rank: figure
        for site, ranks in enumerate(figures)
        for rank, figure in zip(layout.site_ranks(site), ranks, strict=True)
    }
    return [placed[rank] for rank in sorted(placed)]
