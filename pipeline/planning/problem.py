"""What is planned: every table with what it may get, and what a rank keeps for everything else. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeline.config.hardware import HardwareConfig
from pipeline.config.plan import SHARDING_TYPES, PlanConfig
from pipeline.config.values import check_values
from pipeline.errors import ConfigError
from pipeline.planning.candidates import BESIDE
from pipeline.planning.choices import (
    DATA_PARALLEL,
    MIN_COLUMNS,
    SPLIT_TYPES,
    TABLE_ROW_WISE,
    TABLE_WISE,
    Choice,
    PlannedTable,
    impossible,
    table_tiers,
    tables_of,
    tiers_of,
)
from pipeline.planning.constraints import check_pins, pinned
from pipeline.planning.cost import fixed_ms, shard_ms
from pipeline.planning.hardware import Capacity, capacity, check_hardware, fast_memory, memories, tiers
from pipeline.planning.inputs import PlanInputs, table_side
from pipeline.planning.reservations import dense_bytes, host_bytes
from pipeline.planning.shard_workload import ShardBlock, asked_of

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
    """Check the user's settings, and work out the choices of each table; of a bipartite cluster on its table side."""
    inputs = table_side(inputs)
    hardware, batch = inputs.hardware, inputs.batch
    check_hardware(hardware)
    tables = tables_of(inputs)
    heavy = HEAVY_SHARE if len(tables) * hardware.world_size > SEARCH_PAIRS else 0.0
    reserved = dense_bytes(inputs)
    return PlanningProblem(
        inputs=inputs,
        tables=tables,
        offered=choices(inputs.plan, hardware, batch, tables, heavy),
        reserved=reserved,
        room=capacity(hardware, inputs.plan, reserved, host_bytes(inputs)),
        fixed=fixed_ms(inputs.model, inputs.schema, hardware, batch, inputs.events),
    )


def choices(
    plan: PlanConfig, hardware: HardwareConfig, batch: int, tables: list[PlannedTable], heavy: float
) -> dict[str, Choice]:
    """What the planner may try for every table, for a global ``batch`` of samples.

    Tables below the share ``heavy`` of a rank's fair load (bytes and lookups alike) are not offered split, and replicas
    only of tables that cost less so all the ranks that whole tables would keep busy, which keeps 1,000 tables on 128
    ranks searchable; 0 offers every type. Raises ConfigError for an unknown type, an unknown pinned table or a pin that
    cannot run.
    """
    check_values(plan, "plan")
    check_pins(plan, {table.name for table in tables})
    total_bytes = sum(table.bytes for table in tables)
    total_lookups = sum(table.pooling for table in tables)
    offered = {}
    for table in tables:
        share = hardware.world_size * max(table.bytes / total_bytes, table.pooling / total_lookups)
        pin = plan.tables.get(table.name)
        if pin is not None and pin.sharding:
            offered[table.name] = pinned(hardware, table, pin, None)
            continue
        replicas = not heavy or _cheap_replicas(hardware, batch, table, min(hardware.world_size, len(tables)))
        free = _free(plan.sharding_types, hardware, table, share >= heavy, replicas)
        offered[table.name] = free if pin is None else pinned(hardware, table, pin, free)
    return offered


def _cheap_replicas(hardware: HardwareConfig, batch: int, table: PlannedTable, busy: int) -> bool:
    """Whether copies of the table cost ``busy`` ranks together no more than the table whole on one of them.

    Of more ranks than tables the others would be idle, so their copies are free. What overlaps with the step is left
    out, and memory: the search counts them.
    """
    whole, tier = ShardBlock(0, table.rows, 0, table.dim), tiers(hardware)[0]
    cost = {}
    for sharding in (TABLE_WISE, DATA_PARALLEL):
        asked = asked_of(hardware.world_size, batch, table, sharding, [whole])
        phases = shard_ms(hardware, asked.loads(hardware, tier, 0)[0], global_batch=batch)
        cost[sharding] = sum(phases.values()) - phases[BESIDE]
    return busy * cost[DATA_PARALLEL] <= cost[TABLE_WISE]


def _free(wanted: list[str], hardware: HardwareConfig, table: PlannedTable, split: bool, replicas: bool) -> Choice:
    """The choice of a table without a pin; ``split``, ``replicas``: whether it is offered split, and data-parallel."""
    why = {name: impossible(hardware, table, name, MIN_COLUMNS) for name in SHARDING_TYPES if name in wanted}
    possible = [name for name, problem in why.items() if not problem]
    if not possible:
        raise ConfigError(
            f"plan.sharding_types=[{','.join(wanted)}] leaves no placement for table {table.name!r}: {why[wanted[0]]}",
            hint=f"plan.sharding_types=[{','.join(dict.fromkeys([TABLE_WISE, *wanted]))}]",
        )
    idle = set() if split else set(SPLIT_TYPES)
    idle |= set() if replicas and hardware.world_size > 1 else {DATA_PARALLEL}
    idle |= {TABLE_ROW_WISE} if hardware.ranks_per_host == 1 else set()  # table_wise by another name
    worthwhile = [name for name in possible if name not in idle] or possible
    if hardware.world_size == 1 and TABLE_WISE in possible:
        worthwhile = [TABLE_WISE]
    return Choice(sharding=tuple(worthwhile), tiers=table_tiers(hardware, table), columns=MIN_COLUMNS)


def rounds(setting: PlanningProblem) -> list[dict[str, Choice]]:
    """The choices for each round of the search: the fastest memory alone first, then with slower ones."""
    hardware, room = setting.inputs.hardware, setting.room
    need = sum(table.bytes for table in setting.tables)
    allowances, have = [], 0
    for memory in memories(hardware):
        have += room.of(memory) * setting.inputs.world_size
        last = memory == memories(hardware)[-1]
        if last or need <= have:
            allowed = tiers(hardware)[: tiers(hardware).index(memory) + 1]
            allowances.append({name: _within(choice, allowed) for name, choice in setting.offered.items()})
    small, fast = _small(setting), tiers(hardware)[:1]
    if small and len(allowed) > 1:
        near = {name: _within(choice, fast if name in small else allowed) for name, choice in allowances[-1].items()}
        allowances.insert(-1, near)
    return allowances


def _small(setting: PlanningProblem) -> set[str]:
    """The smallest tables, which together take so little of the fastest memory that a slower tier gains nothing."""
    room = setting.room.of(fast_memory(setting.inputs.hardware)) * setting.inputs.world_size
    small, taken = set(), 0
    for table in sorted(setting.tables, key=lambda t: t.bytes):
        taken += table.bytes
        if taken > SMALL_SHARE * room:
            break
        small.add(table.name)
    return small


def _within(choice: Choice, allowed: tuple[str, ...]) -> Choice:
    """The choice within the ``allowed`` tiers; unchanged if it has none of them, because a pin wins."""
    kept = tuple(tier for tier in choice.tiers if tier in allowed)
    sharding = tuple(name for name in choice.sharding if tiers_of(name, kept))
    return replace(choice, tiers=kept, sharding=sharding) if sharding else choice
