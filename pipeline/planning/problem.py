"""What is planned: every table with what it may get, and what a rank keeps for everything else. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeline.config.fields import check_values
from pipeline.config.hardware import HardwareConfig
from pipeline.config.plan import SHARDING_TYPES, PlanConfig
from pipeline.errors import ConfigError
from pipeline.planning.candidates import OVERLAPPED, ShardBlock, compute_workload
from pipeline.planning.choices import (
    DATA_PARALLEL,
    MIN_COLUMNS,
    SPLIT_TYPES,
    TABLE_ROW_WISE,
    TABLE_WISE,
    Choice,
    PlannedTable,
    apply_pin,
    check_pins,
    find_obstacle,
    table_tiers,
    tables_of,
    tiers_of,
)
from pipeline.planning.cost import fixed_ms, shard_ms
from pipeline.planning.hardware import Capacity, capacity, check_hardware, fast_memory, memories, tiers
from pipeline.planning.inputs import PlanInputs, table_side
from pipeline.planning.reservations import dense_bytes, host_bytes

# Above this many (table, rank) pairs only tables above half of a rank's fair load are offered split.
SEARCH_PAIRS = 4_096
HEAVY_SHARE = 0.5
# The smallest tables stay in the fastest memory, up to this share of it, unless nothing fits then.
SMALL_SHARE = 0.02


@dataclass(frozen=True, kw_only=True)
class PlanningProblem:
    """What is planned: tables and their choices; on every rank reserved bytes, room and fixed ms by phase."""

    inputs: PlanInputs
    tables: list[PlannedTable]
    offered: dict[str, Choice]
    reserved: dict[str, int]
    room: Capacity
    fixed: dict[str, float]


def build_problem(inputs: PlanInputs) -> PlanningProblem:
    """Check the user's settings, and work out the choices of each table; of a bipartite cluster on its table side.

    Raises:
        ConfigError: An unknown type or pinned table, a pin that cannot run, a hardware figure of 0.
        ArtifactError: Profile and schema differ.
    """
    inputs = table_side(inputs)
    hardware, batch = inputs.hardware, inputs.batch
    check_hardware(hardware)
    tables = tables_of(inputs)
    reserved = dense_bytes(inputs)
    check_values(inputs.plan, "plan")
    check_pins(inputs.plan, {table.name for table in tables})
    return PlanningProblem(
        inputs=inputs,
        tables=tables,
        offered=_build_choices(inputs.plan, hardware, batch, tables),
        reserved=reserved,
        room=capacity(hardware, inputs.plan, reserved, host_bytes(inputs)),
        fixed=fixed_ms(inputs.model, inputs.schema, hardware, batch, inputs.events),
    )


def _build_choices(
    plan: PlanConfig, hardware: HardwareConfig, batch: int, tables: list[PlannedTable]
) -> dict[str, Choice]:
    total_bytes = sum(table.bytes for table in tables)
    total_lookups = sum(table.pooling for table in tables)
    # What keeps 1,000 tables on 128 ranks searchable: tables below a share of a rank's fair load (bytes and lookups
    # alike) are not offered split, and replicas only of tables that cost less so all the ranks that whole tables would
    # keep busy.
    large = len(tables) * hardware.world_size > SEARCH_PAIRS
    offered = {}
    for table in tables:
        pin = plan.tables.get(table.name)
        if pin is not None and pin.sharding:
            offered[table.name] = apply_pin(hardware, table, pin, None)
            continue
        load = hardware.world_size * max(table.bytes / total_bytes, table.pooling / total_lookups)
        split = not large or load >= HEAVY_SHARE
        replicas = not large or _has_cheap_replicas(hardware, batch, table, min(hardware.world_size, len(tables)))
        free = _build_free_choice(plan.sharding_types, hardware, table, split, replicas)
        offered[table.name] = free if pin is None else apply_pin(hardware, table, pin, free)
    return offered


def _has_cheap_replicas(hardware: HardwareConfig, batch: int, table: PlannedTable, busy: int) -> bool:
    # Whether copies of the table cost ``busy`` ranks together no more than the table whole on one of them. Of more
    # ranks than tables the others would be idle, so their copies are free. What overlaps with the step is left out,
    # and memory: the search counts them.
    whole, tier = ShardBlock(0, table.rows, 0, table.dim), tiers(hardware)[0]
    cost = {}
    for sharding in (TABLE_WISE, DATA_PARALLEL):
        workload = compute_workload(hardware.world_size, batch, table, sharding, [whole])
        phases = shard_ms(hardware, workload.loads(hardware, tier, 0)[0], global_batch=batch)
        cost[sharding] = sum(phases.values()) - phases[OVERLAPPED]
    return busy * cost[DATA_PARALLEL] <= cost[TABLE_WISE]


def _build_free_choice(
    wanted: list[str], hardware: HardwareConfig, table: PlannedTable, split: bool, replicas: bool
) -> Choice:
    possible = []
    for name in SHARDING_TYPES:
        if name in wanted and not find_obstacle(hardware, table, name, MIN_COLUMNS):
            possible.append(name)
    if not possible:
        obstacle = find_obstacle(hardware, table, wanted[0], MIN_COLUMNS)
        raise ConfigError(
            f"plan.sharding_types=[{','.join(wanted)}] leaves no placement for table {table.name!r}: {obstacle}",
            hint=f"plan.sharding_types=[{','.join(dict.fromkeys([TABLE_WISE, *wanted]))}]",
        )
    pointless = set[str]()
    if not split:
        pointless.update(SPLIT_TYPES)
    if not replicas or hardware.world_size == 1:
        pointless.add(DATA_PARALLEL)
    if hardware.ranks_per_host == 1:
        # It is table_wise by another name.
        pointless.add(TABLE_ROW_WISE)
    worthwhile = [name for name in possible if name not in pointless] or possible
    if hardware.world_size == 1 and TABLE_WISE in possible:
        worthwhile = [TABLE_WISE]
    return Choice(sharding=tuple(worthwhile), tiers=table_tiers(hardware, table), columns=MIN_COLUMNS)


def search_rounds(problem: PlanningProblem) -> list[dict[str, Choice]]:
    """List the choices for each round of the search: the fastest memory alone first, then with slower ones."""
    hardware = problem.inputs.hardware
    known, all_tiers = memories(hardware), tiers(hardware)
    need = sum(table.bytes for table in problem.tables)
    allowances, allowed = [], all_tiers
    have = 0
    for memory in known:
        have += problem.room.of(memory) * problem.inputs.world_size
        if memory == known[-1] or need <= have:
            allowed = all_tiers[: all_tiers.index(memory) + 1]
            allowances.append({name: _within(choice, allowed) for name, choice in problem.offered.items()})

    # Before the last round comes one in which the smallest tables keep the fastest memory: together they take so
    # little of it that a slower tier gains nothing.
    fast_bytes = problem.room.of(fast_memory(hardware)) * problem.inputs.world_size
    small = set[str]()
    taken = 0
    for table in sorted(problem.tables, key=lambda table: table.bytes):
        taken += table.bytes
        if taken > SMALL_SHARE * fast_bytes:
            break
        small.add(table.name)
    if small and len(allowed) > 1:
        with_small = {}
        for name, choice in allowances[-1].items():
            with_small[name] = _within(choice, all_tiers[:1] if name in small else allowed)
        allowances.insert(-1, with_small)
    return allowances


def _within(choice: Choice, allowed: tuple[str, ...]) -> Choice:
    offered = tuple(tier for tier in choice.tiers if tier in allowed)
    sharding = tuple(name for name in choice.sharding if tiers_of(name, offered))
    # A choice that has none of the allowed tiers stays as it is, because a pin wins.
    return replace(choice, tiers=offered, sharding=sharding) if sharding else choice
