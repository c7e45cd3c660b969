"""From configuration, schema and profile to a complete plan: the steps of the plan stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipeline.config import Config, HardwareConfig
from pipeline.planning.candidates import offers, whole_layout
from pipeline.planning.choices import TABLE_WISE, Choice, Table
from pipeline.planning.hardware import (
    MEMORIES,
    fast_memory,
    figures,
    memory_gib,
)
from pipeline.planning.placement import Placement
from pipeline.planning.quiet import quiet
from pipeline.planning.reasons import reason
from pipeline.planning.search import Best, Space, anywhere, best
from pipeline.planning.setting import Setting, rounds, settle
from pipeline.planning.shortfall import plan_error
from pipeline.records import DatasetSchema, Plan, Profile, ShardPlan, TablePlan
from pipeline.units import GIB

if TYPE_CHECKING:
    from pipeline.planning.engine import Engine


def make_plan(config: Config, schema: DatasetSchema, profile: Profile, profile_key: str = "") -> Plan:
    """Place every table of ``schema`` on ``config.hardware``'s ranks at the least predicted step time.

    ``profile_key``: the dataset's, recorded in the plan. Deterministic: equal inputs give equal plans. Raises
    ConfigError (pins, types, hardware figures), ArtifactError (profile and schema differ) and PlanError (no fit).
    """
    setting = settle(config, schema, profile)
    with quiet():
        for offered in rounds(setting):
            engine, space = open_space(setting, offered)
            chosen = _search(engine, space)
            if chosen is not None:
                return _assemble(setting, space, chosen, profile_key)
        raise plan_error(setting, space, lambda other: sketch(other, schema, profile))


def sketch(config: Config, schema: DatasetSchema, profile: Profile) -> Placement | None:
    """The assignment's placement alone, or None; remedies of an infeasible plan are tried with it."""
    setting = settle(config, schema, profile)
    for offered in rounds(setting):
        placement = anywhere(open_space(setting, offered)[1])
        if placement is not None:
            return placement
    return None


def open_space(setting: Setting, offered: dict[str, Choice]) -> tuple[Engine | None, Space]:
    """TorchRec's engine over the ``offered`` choices, and every offer with both costs and its bytes.

    There is no engine on one CPU rank, where every table lies whole: TorchRec has nothing to search, and loading it
    would take longer than the rest.
    """
    hardware, train = setting.config.hardware, setting.config.train
    if _only_whole(hardware, offered):
        engine, layouts = None, {t.name: [whole_layout(train.batch, t)] for t in setting.tables}
    else:
        from pipeline.planning.engine import Engine

        engine = Engine(hardware, train.batch, setting.tables, offered, setting.room)
        layouts = engine.layouts()
    all_offers = {t.name: offers(hardware, train, t, offered[t.name], layouts[t.name]) for t in setting.tables}
    return engine, Space(hardware=hardware, offers=all_offers, room=setting.room, fixed=setting.fixed)


def _only_whole(hardware: HardwareConfig, offered: Mapping[str, Choice]) -> bool:
    alone = hardware.world_size == 1 and hardware.device == "cpu"
    return alone and all(choice.sharding == (TABLE_WISE,) for choice in offered.values())


def _search(engine: Engine | None, space: Space) -> Best | None:
    """Run TorchRec's planner with its own costs and with ours, and choose among these and our assignments."""
    if engine is None:
        return best(space, [])
    from pipeline.planning.estimator import OurCosts

    known = []
    for costs in (None, OurCosts(space.offers)):
        plan = engine.search(costs)
        known += [space.from_torchrec(plan)] if plan else []
    return best(space, known)


def _assemble(setting: Setting, space: Space, chosen: Best, profile_key: str) -> Plan:
    config, placement = setting.config, chosen.placement
    tables = {table.name: _table(setting, space, chosen, table) for table in setting.tables}
    share = float(getattr(config.plan, f"{fast_memory(config.hardware)}_reserve"))
    margin = int(memory_gib(config.hardware, fast_memory(config.hardware)) * GIB * share)
    return Plan(
        hardware=config.hardware.name,
        device=config.hardware.device,
        world_size=config.world_size,
        ranks_per_host=config.hardware.ranks_per_host,
        global_batch=config.train.batch,
        tables=tables,
        memory=[dict(zip(MEMORIES, used, strict=True)) for used in placement.memory],
        predicted_step_ms=round(placement.step_ms, 6),
        phases=[{phase: round(ms, 6) for phase, ms in phases.items()} for phases in placement.phases],
        reserved=[{**setting.reserved, "margin": margin} for _ in range(config.world_size)],
        reserved_tier=fast_memory(config.hardware),
        gap=round(chosen.gap, 6),
        figures=figures(config.hardware),
        profile_key=profile_key,
    )


def _table(setting: Setting, space: Space, chosen: Best, table: Table) -> TablePlan:
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
        state_bytes=table.optimizer.row_bytes,
        value_state_bytes=table.optimizer.value_bytes,
    )
