"""Why nothing fits: what is short, by how many GiB in which tier, and the ways out."""

from __future__ import annotations

import math

from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Storage
from torchrec.distributed.planner.utils import reset_shard_rank

from pipeline.config import Config
from pipeline.errors import PlanError
from pipeline.planning.choices import COLUMN_STEP, ROW_WISE, Choice, Table
from pipeline.planning.engine import Engine
from pipeline.planning.hardware import GIB, Capacity, capacity, tier_gib, tiers
from pipeline.planning.proposers import largest_shard, spreads

BISECTIONS = 12


def plan_error(config: Config, tables: list[Table], offered: dict[str, Choice], engine: Engine) -> PlanError:
    """The error for an infeasible plan: need and room by tier, the shortfall, the largest table, hints."""
    options = engine.options()
    room = capacity(config)
    extra = missing_bytes(engine, options, room)
    need = least_bytes(options)
    message = (
        f"the tables do not fit hardware {config.hardware.name!r}: with optimizer state and buffers they need "
        f"{need / GIB:.2f} GiB, {_room(config, room)}; {_short(config, extra)}; "
        f"{_largest(tables, offered, options)}"
    )
    return PlanError(message, hint=_hint(config, tables, offered, extra, room, options))


def least_bytes(options: dict[str, list[ShardingOption]]) -> int:
    """Bytes over all ranks and tiers when every table takes its least: weights, optimizer state, buffers."""
    return sum(min(o.total_storage.hbm + o.total_storage.ddr for o in found) for found in options.values())


def missing_bytes(engine: Engine, options: dict[str, list[ShardingOption]], room: Capacity) -> dict[str, int]:
    """Bytes that every rank lacks, by tier: the least that makes a spread fit if only that tier grew.

    A tier that cannot mend it alone is absent (all HBM of the world does not hold what must be in DDR).
    """
    found = {}
    ways = [list(chosen.values()) for chosen in spreads(options, engine.topology.devices[0].storage)]
    everything = sum(max(o.total_storage.hbm + o.total_storage.ddr for o in table) for table in options.values())
    for tier in ("hbm", "ddr") if room.hbm else ("ddr",):
        low, high = 0, everything
        if not _fits(engine, ways, tier, high):
            continue
        for _ in range(BISECTIONS + max(0, int(math.log2(max(1, everything / GIB))))):
            middle = (low + high) // 2
            low, high = (low, middle) if _fits(engine, ways, tier, middle) else (middle, high)
        found[tier] = high
    return found


def _fits(engine: Engine, ways: list[list[ShardingOption]], tier: str, extra: int) -> bool:
    topology = engine.topology
    kept = [device.storage for device in topology.devices]
    try:
        for device in topology.devices:
            more = Storage(hbm=extra, ddr=0) if tier == "hbm" else Storage(hbm=0, ddr=extra)
            device.storage = device.storage + more
        return any(_places(engine, spread) for spread in ways)
    finally:
        for device, storage in zip(topology.devices, kept, strict=True):
            device.storage = storage


def _places(engine: Engine, spread: list[ShardingOption]) -> bool:
    try:
        GreedyPerfPartitioner().partition(spread, engine.topology)
    except PlannerError:
        return False
    finally:
        reset_shard_rank(spread)
    return True


def _room(config: Config, room: Capacity) -> str:
    parts = [f"{room.of(tier) / GIB:.2f} GiB {tier.upper()}" for tier in tiers(config.hardware)]
    ranks = f"{config.world_size} ranks offer" if config.world_size > 1 else "1 rank offers"
    each = " each" if config.world_size > 1 else ""
    return f"{ranks} {' and '.join(parts)}{each} ({config.plan.reserve:.0%} reserved)"


def _short(config: Config, extra: dict[str, int]) -> str:
    if not extra:
        return "no single tier's growth would mend it"
    parts = []
    for tier, missing in sorted(extra.items(), key=lambda item: item[1]):
        total = missing * config.world_size
        text = f"{tier.upper()} is short by {total / GIB:.2f} GiB"
        parts.append(text + (f" ({missing / GIB:.2f} GiB a rank)" if config.world_size > 1 else ""))
    return ", or ".join(parts)


def _largest(tables: list[Table], offered: dict[str, Choice], options: dict[str, list[ShardingOption]]) -> str:
    table = max(tables, key=lambda t: t.bytes)
    piece = min(largest_shard(option) for option in options[table.name])
    return (
        f"the largest table, {table.name} ({table.rows:,} rows x {table.dim}), needs at least {piece / GIB:.2f} GiB "
        f"on one rank ({', '.join(offered[table.name].sharding)})"
    )


def _hint(
    config: Config,
    tables: list[Table],
    offered: dict[str, Choice],
    extra: dict[str, int],
    room: Capacity,
    options: dict[str, list[ShardingOption]],
) -> str:
    """The overrides that would mend it, the cheapest first."""
    stuck = _split_hints(config, tables, offered, room, options)
    hints = list(stuck)
    need = least_bytes(options)
    reserve = 1.0 - config.plan.reserve
    for tier, missing in sorted(extra.items(), key=lambda item: item[1]):
        gib = math.ceil(10 * (tier_gib(config.hardware, tier) + missing / GIB / reserve)) / 10
        hints.append(f"hardware.{tier}_gib={gib:g}")
    if not extra:
        return ", or ".join(hints)
    have = sum(room.of(tier) for tier in tiers(config.hardware))
    ratio = (have + min(extra.values())) / have
    if not stuck:
        hints.append(f"hardware.hosts={max(config.hardware.hosts + 1, math.ceil(config.hardware.hosts * ratio))}")
    if sum(table.bytes for table in tables) <= have * config.world_size:
        hints.append(f"train.global_batch={max(config.world_size, int(config.train.global_batch / ratio / 2))}")
    else:
        dim = _fitting_dim(config, tables, min(have * config.world_size / need, 1 / ratio))
        hints += [f"model.embedding_dim={dim}"] if dim else []
    return ", or ".join(hints)


def _fitting_dim(config: Config, tables: list[Table], share: float) -> int:
    """The widest dim that needs at most ``share`` of today's bytes, 0 if none does; optimizer state does not shrink."""
    rows = sum(table.rows for table in tables)
    widest = int((rows * (config.model.embedding_dim + 1) * share) / rows - 1) // COLUMN_STEP * COLUMN_STEP
    return widest if COLUMN_STEP <= widest < config.model.embedding_dim else 0


def _split_hints(
    config: Config,
    tables: list[Table],
    offered: dict[str, Choice],
    room: Capacity,
    options: dict[str, list[ShardingOption]],
) -> list[str]:
    """A table that no allowed type makes small enough for one rank: unpin it, or allow row-wise."""
    hints = []
    limit = max(room.of(tier) for tier in tiers(config.hardware))
    for table in sorted(tables, key=lambda t: -t.bytes):
        if config.world_size == 1 or min(largest_shard(o) for o in options[table.name]) <= limit:
            continue
        if offered[table.name].pinned and ROW_WISE not in offered[table.name].sharding:
            hints.append(f"plan.tables.{table.name}={ROW_WISE}")
        elif ROW_WISE not in config.plan.sharding_types:
            hints.append(f"plan.sharding_types=[{','.join([*config.plan.sharding_types, ROW_WISE])}]")
    return list(dict.fromkeys(hints))[:2]
