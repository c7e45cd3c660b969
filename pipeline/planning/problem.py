"""The planning problem: every table with what it may get, and what a rank keeps for everything else. No torch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from pipeline.config.fields import check_values
from pipeline.config.hardware import HardwareConfig
from pipeline.config.plan import SHARDING_TYPES, PlanConfig
from pipeline.config.train import fitting_lanes
from pipeline.core.errors import ConfigError
from pipeline.core.units import GIB
from pipeline.embeddings.event_lookups import event_lookups
from pipeline.embeddings.table_optimizers import table_rules
from pipeline.planning.candidates import ShardBlock, compute_workload
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
from pipeline.planning.cost import (
    FLOAT,
    OVERLAPPED,
    dense_costs,
    fixed_ms,
    kept_activations,
    local_batch,
    shard_ms,
    vector_costs,
)
from pipeline.planning.hardware import Capacity, capacity, check_hardware, fast_memory, memories, tiers
from pipeline.planning.inputs import PlanInputs, table_side
from pipeline.records.dataset import DatasetSchema, Profile
from pipeline.specs.model import ModelCosts
from pipeline.specs.optimizers import ORDINARY_STATE

# Bytes of thread stacks, allocator arenas, compiled kernels and decoder buffers of a training run, measured on a CPU.
RUNTIME = 56 << 20
# Bytes of oneDNN's kernels for the products of sequence blocks, which it makes for every number of events that batches
# are filled up to (docs/measurements/models.md).
RUNTIME_EVENTS = 88 << 20
# Bytes of the offset at which the ids of a sample with several ids begin.
OFFSET = 8
# Bytes of pairs, buffers and threads' arenas of three process groups, where there are other ranks.
RUNTIME_LINKED = 48 << 20
# float32 values per parameter besides optimizer state: the value, its gradient, a reduced copy, half of one for bf16.
PER_PARAMETER = 3.5
# float32 values per activation: the one kept for the backward pass, and its gradient or a temporary copy.
PER_ACTIVATION = 2.0
# Batches of a rank besides the prefetched ones: one being built, one exchanged, one trained.
BATCHES_IN_WORK = 3


def dense_bytes(inputs: PlanInputs) -> dict[str, int]:
    """Count the bytes that one rank reserves in its fastest memory, by purpose; on a CPU they include ``host_bytes``.

    ``staging`` is a checkpoint's copy of the rank's rows, for tables spread evenly; on a CPU it takes at most half of
    the rest. The copy of rows on SSD lies on SSD, where ``candidates`` counts it.
    """
    hardware, model, schema, world = inputs.hardware, inputs.model, inputs.schema, inputs.world_size
    linked = world > 1 or hardware.only_tables
    batch, costs = local_batch(inputs.batch, world), dense_costs(model, schema, inputs.events)
    values = len(schema.vectors) * model.embedding_dim
    activations = ranking_activations(vector_costs(model, schema), values, batch, inputs.train.accumulate)
    activations += kept_activations(model, schema, inputs.events, batch)
    pooled = batch * FLOAT * sum(len(table.features) * model.dim_of(table.name) for table in schema.tables)
    pooled += int(event_bytes(inputs, batch))
    copies, runtime = 2, RUNTIME
    if linked:
        copies, runtime = 4, RUNTIME + RUNTIME_LINKED
    if schema.sequences and hardware.device == "cpu" and not hardware.only_tables:
        runtime += RUNTIME_EVENTS
    reserved = {
        "dense": parameter_bytes(inputs, costs.parameters),
        "activations": int(PER_ACTIVATION * FLOAT * activations),
        "inputs": int(BATCHES_IN_WORK * batch * row_bytes(schema, inputs.profile)),
        "communication": pooled * copies,
        "staging": 0,
        "runtime": runtime,
    }
    if hardware.only_tables:
        # The dense part exists on these ranks, but it has no samples and learns nothing.
        reserved |= {"dense": FLOAT * int(costs.parameters), "activations": 0, "inputs": 0}
    for purpose, size in inputs.beyond.items():
        reserved[purpose] += size
    if hardware.device == "cpu":
        host = host_bytes(inputs)
        if not hardware.only_tables:
            reserved["inputs"] += host["inputs"]
        reserved["process"] = host["process"]
        rest = hardware.ddr_gib * GIB - sum(reserved.values())
        reserved["staging"] = int(min(host["staging"], max(rest, 0) / 2))
    return reserved


def parameter_bytes(inputs: PlanInputs, parameters: int) -> int:
    """Count the bytes of dense ``parameters`` that a rank trains: values, gradients, copies and optimizer state."""
    per_parameter = PER_PARAMETER + max(ORDINARY_STATE, inputs.train.dense_state_values)
    return int(per_parameter * FLOAT * parameters)


def ranking_activations(costs: ModelCosts, values: int, batch: int, parts: int) -> float:
    """Count the activations of a ranking model in a ``batch`` of samples, processed in ``parts``.

    Args:
        costs: Those of the ranking model.
        values: Its inputs from embeddings, of a sample.
    """
    part = local_batch(batch, parts)
    activations = float(part * costs.activations)
    if part < batch:
        # The inputs of the ranking model, and their gradient, stay for the whole batch.
        activations += batch * values
    return activations


def event_bytes(inputs: PlanInputs, samples: int) -> float:
    """Count the embedding bytes of the events of ``samples`` rows, in the batches that have the most of them.

    Every table of sequences has a value for each row of events; rows are those of ``embeddings.event_lookups``.
    """
    lookups = event_lookups(inputs.schema)
    if lookups is None:
        return 0.0
    longest = {sequence.name: sequence.max_length for sequence in inputs.schema.sequences}
    rows = sum(inputs.events.of_batch(event.sequence, longest[event.sequence], samples) for event in lookups.events)
    return rows * FLOAT * sum(map(inputs.model.dim_of, lookups.tables))


def host_bytes(inputs: PlanInputs) -> dict[str, int]:
    """Count the bytes that one rank needs in host memory on any device.

    They are the process (interpreter and libraries), rows read ahead, and a checkpoint's copy.
    """
    schema, train, world = inputs.schema, inputs.train, inputs.world_size
    row = row_bytes(schema, inputs.profile)
    batches = int(train.prefetch_batches * local_batch(train.batch, world) * row)
    rules = table_rules(inputs.model, train)
    staged = 0
    for table in schema.tables:
        dim = inputs.model.dim_of(table.name)
        staged += table.rows * staged_row(dim * FLOAT + rules.of(table.name).state_bytes(dim))
    return {
        "process": int(inputs.hardware.process_gib * GIB),
        "inputs": int(_decoded_rows(inputs) * row) + batches,
        "staging": staged // world,
    }


def _decoded_rows(inputs: PlanInputs) -> int:
    # Returns the decoded rows in memory: those of each lane's window, and those ahead. A window is decoded into
    # separate memory, then its rows are mixed into that of the lane (``training/lane_reader.py``). Rows that are not
    # shuffled need less.
    train = inputs.train
    groups = list(itertools.chain(*inputs.schema.groups.get("train", [])))
    largest = max(groups, default=inputs.ingest.rows_per_group)
    lanes = fitting_lanes(train.lanes, train.batch, len(groups))
    groups_per_window = max(1, -(-train.shuffle_window_groups // lanes))
    lanes_per_rank = max(1, -(-lanes // inputs.world_size))
    ahead = max(1, min(lanes_per_rank, train.shuffle_window_groups // groups_per_window))
    window = min(groups_per_window * largest, max(inputs.schema.rows.get("train", 0), 1))
    return (lanes_per_rank + ahead + min(ahead, 2)) * window


def staged_row(size: int) -> int:
    """Return the bytes that a checkpoint stages for a row: ``size`` with optimizer state, its number and its mark."""
    return size + 8 + 1


def row_bytes(schema: DatasetSchema, profile: Profile) -> float:
    """Count the mean bytes of a sample: label, dense values, and every feature's ids with their weights."""
    size = float(FLOAT * (1 + len(schema.dense)))
    for column in schema.sparse:
        if column.multi:
            per_id = FLOAT * (2 if column.weighted else 1)
            size += profile.sparse[column.name].pooling * per_id + OFFSET
        else:
            size += FLOAT
    for sequence in schema.sequences:
        # The columns of a sequence share one array of offsets.
        size += OFFSET + sum(profile.sparse[event.name].pooling for event in sequence.columns) * FLOAT
    return size


# Above this many (table, rank) pairs, only tables above half of a rank's fair load are offered split.
SEARCH_PAIRS = 4_096
HEAVY_SHARE = 0.5
# The smallest tables stay in the fastest memory, up to this share of it, unless nothing fits then.
SMALL_SHARE = 0.02


@dataclass(frozen=True, kw_only=True)
class PlanningProblem:
    """What is planned: tables and their choices, and the reserved bytes, room and fixed ms by phase of every rank."""

    inputs: PlanInputs
    tables: list[PlannedTable]
    offered: dict[str, Choice]
    reserved: dict[str, int]
    room: Capacity
    fixed: dict[str, float]

    @property
    def table_bytes(self) -> int:
        """The bytes of weights and optimizer state of all tables."""
        return sum(table.bytes for table in self.tables)


def build_problem(inputs: PlanInputs) -> PlanningProblem:
    """Check the user's settings, and find the choices of each table; in a bipartite cluster those of its table side.

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
        fixed=fixed_ms(inputs.model, inputs.schema, hardware, batch, inputs.events, inputs.train.accumulate),
    )


def _build_choices(
    plan: PlanConfig, hardware: HardwareConfig, batch: int, tables: list[PlannedTable]
) -> dict[str, Choice]:
    total_bytes = sum(table.bytes for table in tables)
    total_lookups = sum(table.pooling for table in tables)
    # Keep 1,000 tables on 128 ranks searchable: tables below a share of a rank's fair load (bytes and lookups alike)
    # are not offered split, and replicas only if copies on all ranks that whole tables would keep busy cost no more
    # together than the whole table (``_has_cheap_replicas``).
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
        choice = _build_free_choice(plan.sharding_types, hardware, table, split, replicas)
        if pin is not None:
            choice = apply_pin(hardware, table, pin, choice)
        offered[table.name] = choice
    return offered


def _has_cheap_replicas(hardware: HardwareConfig, batch: int, table: PlannedTable, busy: int) -> bool:
    # Whether copies of the table cost ``busy`` ranks together no more than the whole table costs one of them. If there
    # are more ranks than tables, the others would be idle, so their copies are free. Memory and what overlaps with the
    # step are left out, since the search counts them.
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
        # With one rank per host it is the same as table_wise.
        pointless.add(TABLE_ROW_WISE)
    worthwhile = [name for name in possible if name not in pointless] or possible
    if hardware.world_size == 1 and TABLE_WISE in possible:
        worthwhile = [TABLE_WISE]
    return Choice(sharding=tuple(worthwhile), tiers=table_tiers(hardware, table), columns=MIN_COLUMNS)


def search_rounds(problem: PlanningProblem) -> list[dict[str, Choice]]:
    """List the choices for each round of the search: the fastest memory alone first, then with slower ones."""
    hardware = problem.inputs.hardware
    known, all_tiers = memories(hardware), tiers(hardware)
    allowances, allowed = [], all_tiers
    have = 0
    for memory in known:
        have += problem.room.of(memory) * problem.inputs.world_size
        if memory == known[-1] or problem.table_bytes <= have:
            allowed = all_tiers[: all_tiers.index(memory) + 1]
            allowances.append({name: _within(choice, allowed) for name, choice in problem.offered.items()})

    # In the round before the last, the smallest tables keep the fastest memory: together they take so little of it that
    # a slower tier gains nothing.
    fast_bytes = problem.room.of(fast_memory(hardware)) * problem.inputs.world_size
    small = set[str]()
    taken = 0
    for table in sorted(problem.tables, key=lambda table: table.bytes):
        taken += table.bytes
        if taken > SMALL_SHARE * fast_bytes:
            break
        small.add(table.name)
    if small and len(allowed) > 1:
        with_small = dict(allowances[-1])
        for name in small:
            with_small[name] = _within(with_small[name], all_tiers[:1])
        allowances.insert(-1, with_small)
    return allowances


def _within(choice: Choice, allowed: tuple[str, ...]) -> Choice:
    offered = tuple(tier for tier in choice.tiers if tier in allowed)
    sharding = tuple(name for name in choice.sharding if tiers_of(name, offered))
    if not sharding:
        # A choice that has none of the allowed tiers stays as it is, because a pin wins.
        return choice
    return replace(choice, tiers=offered, sharding=sharding)
