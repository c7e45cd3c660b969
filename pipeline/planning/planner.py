"""From configuration, schema and profile to a complete plan: the story of the plan stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.config import Config
from pipeline.contracts import DatasetSchema, Plan, Profile, ShardPlan, TablePlan
from pipeline.planning.choices import DATA_PARALLEL, TABLE_WISE, Choice, Table, choices, tables_of
from pipeline.planning.hardware import DEVICE_KERNELS, GIB, HOST_KERNELS, capacity, check_hardware, tier_of
from pipeline.planning.quiet import quiet

if TYPE_CHECKING:
    from torchrec.distributed.planner.types import ShardingOption

# Above this many (table, rank) pairs only tables above half of a rank's fair load are offered split.
SEARCH_PAIRS = 4_096
HEAVY_SHARE = 0.5


def make_plan(config: Config, schema: DatasetSchema, profile: Profile) -> Plan:
    """Place every table of ``schema`` on ``config.hardware``'s ranks at the least predicted step time.

    Deterministic: equal inputs give equal plans. Raises ConfigError (pins, types, hardware figures),
    ArtifactError (profile and schema differ) and PlanError (the tables do not fit).
    """
    check_hardware(config.hardware)
    tables = tables_of(config, schema, profile)
    rounds = _rounds(config, tables)
    with quiet():
        from pipeline.planning.engine import Engine
        from pipeline.planning.shortfall import plan_error

        for offered, kernels in rounds:
            engine = Engine(config, tables, offered, kernels)
            placed = engine.search()
            if placed:
                return _assemble(config, tables, offered, placed, engine.options())
        raise plan_error(config, tables, offered, engine)


def _rounds(config: Config, tables: list[Table]) -> list[tuple[dict[str, Choice], tuple[str, ...]]]:
    """What each search may use, narrowest first: DDR behind a GPU only where HBM alone does not do."""
    heavy = HEAVY_SHARE if len(tables) * config.world_size > SEARCH_PAIRS else 0.0
    offered = choices(config, tables, heavy)
    kernels: list[tuple[str, ...]] = [DEVICE_KERNELS]
    if config.hardware.device == "cuda":
        hbm = capacity(config).hbm * config.world_size
        kernels = [DEVICE_KERNELS] if sum(table.bytes for table in tables) <= hbm else []
        kernels.append(DEVICE_KERNELS + HOST_KERNELS)
    return [(offered, some) for some in kernels]


def _assemble(
    config: Config,
    tables: list[Table],
    offered: dict[str, Choice],
    placed: list[ShardingOption],
    options: dict[str, list[ShardingOption]],
) -> Plan:
    by_name = {option.name: option for option in placed}
    planned = {}
    for table in tables:
        option = by_name[table.name]
        planned[table.name] = TablePlan(
            rows=table.rows,
            dim=table.dim,
            pooling=table.pooling,
            tier=tier_of(config.hardware, option.compute_kernel),
            sharding=option.sharding_type,
            kernel=option.compute_kernel,
            shards=_shards(option),
            cost_ms=round(max(_rank_ms([option], config.world_size)), 6),
            reason=_reason(config, table, offered[table.name], option, options[table.name]),
        )
    return Plan(
        hardware=config.hardware.name,
        device=config.hardware.device,
        world_size=config.world_size,
        ranks_per_host=config.hardware.ranks_per_host,
        global_batch=config.train.global_batch,
        tables=planned,
        memory=_memory(placed, config.world_size),
        predicted_step_ms=round(max(_rank_ms(placed, config.world_size)), 6),
    )


def _shards(option: ShardingOption) -> tuple[ShardPlan, ...]:
    return tuple(
        ShardPlan(
            rank=int(shard.rank or 0),
            row=shard.offset[0],
            rows=shard.size[0],
            column=shard.offset[1],
            columns=shard.size[1],
        )
        for shard in option.shards
    )


def _rank_ms(options: list[ShardingOption], world_size: int) -> list[float]:
    spent = [0.0] * world_size
    for option in options:
        for shard in option.shards:
            if shard.rank is not None and shard.perf is not None:
                spent[shard.rank] += shard.perf.total
    return spent


def _memory(options: list[ShardingOption], world_size: int) -> list[dict[str, int]]:
    used = [{"hbm": 0, "ddr": 0, "ssd": 0} for _ in range(world_size)]
    for option in options:
        for shard in option.shards:
            if shard.rank is not None and shard.storage is not None:
                for tier in used[shard.rank]:
                    used[shard.rank][tier] += int(getattr(shard.storage, tier))
    return used


def _reason(config: Config, table: Table, choice: Choice, option: ShardingOption, options: list[ShardingOption]) -> str:
    """One sentence for people: why this sharding, and why this tier if it is not the fastest."""
    text = _sharding_reason(config, table, choice, option, options)
    tier = tier_of(config.hardware, option.compute_kernel)
    if config.hardware.device == "cuda" and tier != "hbm":
        text += "; HBM has no room for every table, so this one stays in DDR" + (
            " behind a cache" if tier == "hbm_cached" else ""
        )
    return text


def _sharding_reason(
    config: Config, table: Table, choice: Choice, option: ShardingOption, options: list[ShardingOption]
) -> str:
    if choice.pinned:
        return f"pinned by plan.tables.{table.name}"
    if config.world_size == 1:
        return "one rank holds every table whole"
    if option.sharding_type == DATA_PARALLEL:
        return f"{table.rows} rows: reducing the whole table is cheaper than exchanging its lookups"
    if option.sharding_type == TABLE_WISE:
        return f"{table.bytes / GIB:.2f} GiB fit one rank, and whole tables balance the ranks"
    room = capacity(config)
    if table.bytes > (room.hbm if tier_of(config.hardware, option.compute_kernel) == "hbm" else room.ddr):
        return f"{table.bytes / GIB:.2f} GiB do not fit one rank: split over {option.num_shards} shards"
    whole = [o for o in options if o.sharding_type == TABLE_WISE and o.compute_kernel == option.compute_kernel]
    if whole:
        saved = max(_shard_ms(whole[0])) / max(max(_shard_ms(option)), 1e-9)
        return f"split over {option.num_shards} shards: the busiest rank spends {saved:.1f}x less on it than whole"
    return f"split over {option.num_shards} shards, the cheapest of the types allowed"


def _shard_ms(option: ShardingOption) -> list[float]:
    return [shard.perf.total for shard in option.shards if shard.perf is not None]
