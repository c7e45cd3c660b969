"""From configuration, schema and profile to a complete plan: the steps of the plan stage."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.config.hardware import HardwareConfig
from pipeline.planning.bipartite import bipartite_plan
from pipeline.planning.candidates import offers, whole_layout
from pipeline.planning.choices import TABLE_WISE, Choice, PlannedTable
from pipeline.planning.greedy import default_plan
from pipeline.planning.hardware import MEMORIES, fast_memory, figures, memory_gib
from pipeline.planning.infeasibility import plan_error
from pipeline.planning.inputs import PlanInputs
from pipeline.planning.problem import PlanningProblem, build_problem, rounds
from pipeline.planning.quiet import quiet
from pipeline.planning.report import reason
from pipeline.planning.search import BestPlacement, Placement, PlacementSpace, anywhere, best
from pipeline.records.plan import Plan, ShardPlan, TablePlan
from pipeline.units import GIB


def make_plan(inputs: PlanInputs, profile_key: str = "") -> Plan:
    """Place every table on the ranks of the hardware at the least predicted step time. Needs no process group.

    ``profile_key``: the dataset's, recorded in the plan. Deterministic: equal inputs give equal plans. Raises
    ConfigError (pins, types, hardware figures), ArtifactError (profile and schema differ) and PlanError (no fit).
    """
    if inputs.hardware.embedding_hosts and not inputs.hardware.only_tables:
        return bipartite_plan(inputs, lambda own: make_plan(own, profile_key))
    setting = build_problem(inputs)
    with quiet():
        for offered in rounds(setting):
            space = open_space(setting, offered)
            chosen = best(space, None if _only_whole(setting.inputs.hardware, offered) else default_plan(space))
            if chosen is not None:
                return _assemble(setting, space, chosen, profile_key)
        raise plan_error(setting, space, sketch)


def sketch(inputs: PlanInputs) -> Placement | None:
    """The assignment's placement alone, or None; remedies of an infeasible plan are tried with it."""
    setting = build_problem(inputs)
    for offered in rounds(setting):
        placement = anywhere(open_space(setting, offered))
        if placement is not None:
            return placement
    return None


def open_space(setting: PlanningProblem, offered: dict[str, Choice]) -> PlacementSpace:
    """Every offer of the ``offered`` choices with both costs and its bytes.

    On one CPU rank every table lies whole: TorchRec has nothing to say, and loading it would take longer than the rest.
    """
    hardware, train = setting.inputs.hardware, setting.inputs.train
    if _only_whole(hardware, offered):
        layouts = {table.name: [whole_layout(train.batch, table)] for table in setting.tables}
    else:
        from pipeline.planning.torchrec_planner import TorchRecPlanner

        layouts = TorchRecPlanner(hardware, train.batch, setting.tables, offered, setting.room).layouts()
    all_offers = {t.name: offers(hardware, train, t, offered[t.name], layouts[t.name]) for t in setting.tables}
    return PlacementSpace(hardware=hardware, offers=all_offers, room=setting.room, fixed=setting.fixed)


def _only_whole(hardware: HardwareConfig, offered: Mapping[str, Choice]) -> bool:
    alone = hardware.world_size == 1 and hardware.device == "cpu"
    return alone and all(choice.sharding == (TABLE_WISE,) for choice in offered.values())


def _assemble(setting: PlanningProblem, space: PlacementSpace, chosen: BestPlacement, profile_key: str) -> Plan:
    inputs, placement = setting.inputs, chosen.placement
    hardware, fast = inputs.hardware, fast_memory(inputs.hardware)
    tables = {table.name: _table(setting, space, chosen, table) for table in setting.tables}
    margin = int(memory_gib(hardware, fast) * GIB * float(getattr(inputs.plan, f"{fast}_reserve")))
    return Plan(
        hardware=hardware.name,
        device=hardware.device,
        world_size=hardware.world_size,
        ranks_per_host=hardware.ranks_per_host,
        global_batch=inputs.batch,
        tables=tables,
        memory=[dict(zip(MEMORIES, used, strict=True)) for used in placement.memory],
        predicted_step_ms=round(placement.step_ms, 6),
        phases=[{phase: round(ms, 6) for phase, ms in phases.items()} for phases in placement.phases],
        reserved=[{**setting.reserved, "margin": margin} for _ in range(hardware.world_size)],
        reserved_tier=fast,
        gap=round(chosen.gap, 6),
        figures=figures(hardware),
        profile_key=profile_key,
    )


def _table(setting: PlanningProblem, space: PlacementSpace, chosen: BestPlacement, table: PlannedTable) -> TablePlan:
    offer, ranks = chosen.placement.offers[table.name], chosen.placement.ranks[table.name]
    spent = dict.fromkeys(ranks, 0.0)
    for rank, ms in zip(ranks, offer.ms, strict=True):
        spent[rank] += ms
    shards = zip(ranks, offer.layout.shards, strict=True)
    why = reason(table, setting.offered[table.name], offer, space)
    return TablePlan(
        rows=table.rows,
        dim=table.dim,
        pooling=table.pooling,
        tier=offer.tier,
        sharding=offer.sharding,
        kernel=offer.kernel,
        shards=tuple(ShardPlan(rank=rank, **block._asdict()) for rank, block in shards),
        cost_ms=round(max(spent.values()), 6),
        reason=why + (f"; {chosen.remark}" if chosen.remark else ""),
        cache_rows=offer.cache_rows,
        hit_rate=round(offer.hit_rate, 6),
        host_rows=offer.host_rows,
        host_rate=round(offer.host_rate, 6),
        state_bytes=table.optimizer.row_bytes,
        value_state_bytes=table.optimizer.value_bytes,
    )
