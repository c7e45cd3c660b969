"""Makes a complete plan from configuration, schema and profile: the steps of the plan stage."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pipeline.config.hardware import HardwareConfig
from pipeline.core.units import GIB
from pipeline.planning.bipartite import bipartite_plan
from pipeline.planning.candidate_search import (
    BestPlacement,
    Placement,
    PlacementSpace,
    default_plan,
    find_best,
    find_feasible,
)
from pipeline.planning.candidates import build_offers, whole_layout
from pipeline.planning.choices import TABLE_WISE, Choice, PlannedTable
from pipeline.planning.hardware import MEMORIES, fast_memory, figures, memory_gib
from pipeline.planning.infeasibility import plan_error
from pipeline.planning.inputs import PlanInputs
from pipeline.planning.plan_report import explain
from pipeline.planning.problem import PlanningProblem, build_problem, search_rounds
from pipeline.records.plan import Plan, ShardPlan, TablePlan


def make_plan(inputs: PlanInputs, profile_key: str = "") -> Plan:
    """Place every table on the ranks of the hardware at the least predicted step time.

    Needs no process group. Equal inputs give equal plans.

    Args:
        inputs: The configuration and the dataset.
        profile_key: The key of the dataset's profile, recorded in the plan.

    Raises:
        ConfigError: Pins, types or hardware figures are impossible.
        ArtifactError: Profile and schema differ.
        PlanError: The tables do not fit.
    """
    if inputs.hardware.embedding_hosts and not inputs.hardware.only_tables:
        return bipartite_plan(inputs, lambda table_side: make_plan(table_side, profile_key))
    # 1. Find what each table may get, and what a rank keeps for everything else.
    problem = build_problem(inputs)
    hardware = problem.inputs.hardware
    with silence_warnings():
        # 2. Offer the fastest memory alone first, and slower ones where nothing fits.
        for offered in search_rounds(problem):
            # 3. Price every way to place every table by both cost models.
            space = build_space(problem, offered)
            # 4. Find what TorchRec's planner would do; with a single layout per table it decides nothing.
            default = None
            if not _lies_whole(hardware, offered):
                default = default_plan(space)
            # 5. Choose the fastest placement of all that is not rated worse.
            chosen = find_best(space, default)
            if chosen is not None:
                return _assemble(problem, space, chosen, profile_key)
        raise plan_error(problem, space, sketch)


def sketch(inputs: PlanInputs) -> Placement | None:
    """Find any placement that fits, or None; remedies of an infeasible plan are tried with it."""
    problem = build_problem(inputs)
    for offered in search_rounds(problem):
        placement = find_feasible(build_space(problem, offered))
        if placement is not None:
            return placement
    return None


def build_space(problem: PlanningProblem, offered: dict[str, Choice]) -> PlacementSpace:
    hardware, train = problem.inputs.hardware, problem.inputs.train
    layouts = {}
    if _lies_whole(hardware, offered):
        # TorchRec decides nothing here, and importing it would take longer than the rest.
        for table in problem.tables:
            layouts[table.name] = [whole_layout(train.batch, table)]
    else:
        from pipeline.planning.torchrec_planner import TorchRecPlanner

        layouts = TorchRecPlanner(hardware, train.batch, problem.tables, offered, problem.room).layouts()
    offers = {}
    for table in problem.tables:
        offers[table.name] = build_offers(hardware, train, table, offered[table.name], layouts[table.name])
    return PlacementSpace(hardware=hardware, offers=offers, room=problem.room, fixed=problem.fixed)


def _lies_whole(hardware: HardwareConfig, offered: Mapping[str, Choice]) -> bool:
    one_cpu_rank = hardware.world_size == 1 and hardware.device == "cpu"
    return one_cpu_rank and all(choice.sharding == (TABLE_WISE,) for choice in offered.values())


@contextmanager
def silence_warnings() -> Iterator[None]:
    """Suppress Python warnings and log records of TorchRec's planner, since only a result or an error matters."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _assemble(problem: PlanningProblem, space: PlacementSpace, chosen: BestPlacement, profile_key: str) -> Plan:
    inputs, placement = problem.inputs, chosen.placement
    hardware, fast = inputs.hardware, fast_memory(inputs.hardware)
    margin = int(memory_gib(hardware, fast) * GIB * float(getattr(inputs.plan, f"{fast}_reserve")))
    tables = {}
    for table in problem.tables:
        tables[table.name] = _plan_table(problem, space, chosen, table)
    memory, phases, reserved = [], [], []
    for used, spent in zip(placement.memory, placement.phases, strict=True):
        memory.append(dict(zip(MEMORIES, used, strict=True)))
        # Values are rounded, so that plan.json does not show rounding errors of sums.
        phases.append({phase: round(ms, 6) for phase, ms in spent.items()})
        reserved.append({**problem.reserved, "margin": margin})
    return Plan(
        hardware=hardware.name,
        device=hardware.device,
        world_size=hardware.world_size,
        ranks_per_host=hardware.ranks_per_host,
        global_batch=inputs.batch,
        tables=tables,
        memory=memory,
        predicted_step_ms=round(placement.step_ms, 6),
        phases=phases,
        reserved=reserved,
        reserved_tier=fast,
        gap=round(chosen.gap, 6),
        figures=figures(hardware),
        profile_key=profile_key,
    )


def _plan_table(
    problem: PlanningProblem, space: PlacementSpace, chosen: BestPlacement, table: PlannedTable
) -> TablePlan:
    offer, ranks = chosen.placement.offers[table.name], chosen.placement.ranks[table.name]
    # A rank may hold several shards of a table.
    spent = dict.fromkeys(ranks, 0.0)
    shards = []
    for rank, block, ms in zip(ranks, offer.layout.shards, offer.ms, strict=True):
        spent[rank] += ms
        shards.append(ShardPlan(rank=rank, **block._asdict()))
    reason = explain(table, problem.offered[table.name], offer, space)
    if chosen.remark:
        reason += f"; {chosen.remark}"
    return TablePlan(
        rows=table.rows,
        dim=table.dim,
        pooling=table.pooling,
        tier=offer.tier,
        sharding=offer.sharding,
        kernel=offer.kernel,
        shards=tuple(shards),
        cost_ms=round(max(spent.values()), 6),
        reason=reason,
        cache_rows=offer.cache_rows,
        hit_rate=round(offer.hit_rate, 6),
        host_rows=offer.host_rows,
        host_rate=round(offer.host_rate, 6),
        state_bytes=table.optimizer.row_bytes,
        value_state_bytes=table.optimizer.value_bytes,
    )
