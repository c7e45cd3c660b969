"""The cost model's view of a finished plan: every rank's phases and memory, and what towers add. No torch.

The plan of one group of tower hosts covers its tables, its ranks and their batch. The model's dense part is separate:
its ranking model takes the outputs of all towers for one rank's samples, and its gradients are reduced over all hosts.
``step_parts`` splits a predicted step by what would make it shorter.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.hardware import HardwareConfig
from pipeline.models.costs import model_costs
from pipeline.planning import cost
from pipeline.planning.candidates import ShardBlock, compute_workload
from pipeline.planning.choices import DATA_PARALLEL, PlannedTable, tables_of
from pipeline.planning.inputs import PlanInputs, worker_side
from pipeline.planning.problem import (
    PER_ACTIVATION,
    RUNTIME_LINKED,
    dense_bytes,
    parameter_bytes,
    ranking_activations,
    staged_row,
)
from pipeline.records.plan import BESIDE_TRAINING, PHASES, Plan, TablePlan
from pipeline.specs.model import ModelCosts, ModelInputs, task_inputs

WITHIN, BETWEEN = "within_hosts", "between_hosts"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """By rank: ms by phase (PHASES), bytes of its tables with their optimizer state, bytes reserved by purpose.

    ``whole_ms`` is a step if ranks that do different work wait for each other; None: they all do the same work.
    """

    phases: list[dict[str, float]]
    tables: list[int]
    reserved: list[dict[str, int]]
    whole_ms: float | None = None

    @property
    def step_ms(self) -> float:
        """A step of the slowest rank, or that of all together."""
        if self.whole_ms is not None:
            return self.whole_ms
        return max(map(cost.step_ms, self.phases))

    @property
    def bytes(self) -> int:
        """The memory that training takes on the fullest rank: tables and reservations, without the process itself."""
        fullest = 0
        for tables, reserved in zip(self.tables, self.reserved, strict=True):
            size = tables
            for purpose, count in reserved.items():
                if purpose not in BESIDE_TRAINING:
                    size += count
            fullest = max(fullest, size)
        return fullest


def predict(plan: Plan, inputs: PlanInputs) -> Prediction:
    """Predict the cost of ``plan`` on the hardware and for the tables of ``inputs``.

    Ranks wait for each other in the exchanges. That time is not added up; the slowest rank's own time counts.
    """
    hardware, batch, world = inputs.hardware, inputs.batch, plan.world_size
    phases, reserved = [], []
    for _ in range(world):
        phases.append(
            cost.fixed_ms(inputs.model, inputs.schema, hardware, batch, inputs.events, inputs.train.accumulate)
        )
        reserved.append(dense_bytes(inputs))
    tables, staged = [0] * world, [0] * world
    for table in tables_of(inputs):
        placed = plan.tables[table.name]
        for shard, spent in zip(placed.shards, shard_phases(hardware, batch, table, placed), strict=True):
            for phase, ms in spent.items():
                phases[shard.rank][phase] += ms
            tables[shard.rank] += placed.resident_bytes(shard, plan.device)
            # The copy of rows on SSD lies on SSD, not in memory.
            row = 0 if placed.tier == "ssd" else table.row_bytes(shard.columns)
            staged[shard.rank] += shard.rows * staged_row(row)
    if hardware.device == "cpu":
        # The plan reserved for tables spread evenly, but now it is known what each rank stages.
        for purposes, size in zip(reserved, staged, strict=True):
            purposes["staging"] = size
    return Prediction(phases=phases, tables=tables, reserved=reserved)


def shard_phases(
    hardware: HardwareConfig, batch: int, table: PlannedTable, placed: TablePlan
) -> list[dict[str, float]]:
    """Return the ms by phase of each shard of ``placed``, as the planner priced them."""
    blocks = []
    for shard in placed.shards:
        blocks.append(ShardBlock(shard.row, shard.rows, shard.column, shard.columns))
    workload = compute_workload(hardware.world_size, batch, table, placed.sharding, blocks)
    loads = workload.loads(hardware, placed.tier, placed.cache_rows, placed.host_rows)
    return [cost.shard_ms(hardware, load, global_batch=batch) for load in loads]


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """What one sample sends between tower hosts.

    ``ids`` is the number of values sent to other tower hosts, including a length for each feature. ``own`` is the
    number of vectors of width ``dim`` that this rank's tower hosts output, out of all ``vectors`` (names). ``groups``
    is the number of groups of tower hosts. ``modules`` has the costs of their towers' modules, ``held`` the parameters
    of the other towers', which a rank does not train. ``beside`` is the share of the samples whose modules run while
    others' vectors travel.
    """

    ids: float
    own: int
    vectors: tuple[str, ...]
    dim: int
    groups: int
    modules: ModelCosts
    held: int = 0
    beside: float = 0.0

    def ranking_costs(self, group: PlanInputs) -> ModelCosts:
        """Return the costs of the ranking model, which takes all towers' vectors."""
        schema = group.schema
        tasks = task_inputs(schema.tasks)
        inputs = ModelInputs(dense=schema.dense, vectors=self.vectors, dim=self.dim, tasks=tasks)
        return model_costs(group.model, inputs)


def beyond_tower_bytes(group: PlanInputs, flat: PlanInputs, crossing: Crossing) -> dict[str, int]:
    """Count what towers add to ``dense_bytes`` of one group of tower hosts, for a rank.

    Args:
        group: As in ``beyond_tower_ms``.
        flat: The inputs of the flat model's plan: all hosts, tables and samples.
        crossing: As in ``beyond_tower_ms``.

    Returns:
        Bytes by purpose, 0 where the group alone, with the samples of all peers, would take more: what infeasible
        plans suggest is tried with the same figures.
    """
    model, schema, parts = group.model, group.schema, group.train.accumulate
    ranking, alone = crossing.ranking_costs(group), cost.vector_costs(model, schema)
    own = cost.local_batch(flat.batch, flat.world_size)
    # A group's ranks run the modules on the samples of all peers.
    shared = cost.local_batch(group.batch, group.world_size)
    vectors = len(crossing.vectors) * crossing.dim
    trained = max(ranking.parameters - alone.parameters, 0) + crossing.modules.parameters
    counted = ranking_activations(alone, len(schema.vectors) * model.embedding_dim, shared, parts)
    activations = max(ranking_activations(ranking, vectors, own, parts) - counted, 0.0)
    activations += shared * crossing.modules.activations
    extra = {
        "dense": parameter_bytes(group, trained) + cost.FLOAT * crossing.held,
        "activations": int(PER_ACTIVATION * cost.FLOAT * activations),
        # A rank reads its own samples with all their features.
        "inputs": max(dense_bytes(flat)["inputs"] - dense_bytes(group)["inputs"], 0),
    }
    if crossing.groups > 1:
        # Vectors leave for the peers and come from them, and their gradients the other way.
        extra["communication"] = 2 * cost.FLOAT * (shared * crossing.own * crossing.dim + own * vectors)
    if group.world_size == 1 and flat.world_size > 1:
        extra["runtime"] = RUNTIME_LINKED
    return extra


def beyond_tower_ms(group: PlanInputs, hardware: HardwareConfig, crossing: Crossing) -> dict[str, float]:
    """Predict what towers add to the plan of one group of tower hosts.

    Args:
        group: The inputs of that plan: the group's hosts, and its tables with all dense features.
        hardware: The hardware of all hosts.
        crossing: What one sample sends between the groups. Vectors travel as float32.

    Returns:
        Ms per step by phase (PHASES).
    """
    model, batch, schema, parts = group.model, group.batch, group.schema, group.train.accumulate
    phases = dict.fromkeys(PHASES, 0.0)
    alone = cost.dense_ms(cost.vector_costs(model, schema, parts), group.hardware, batch)
    beyond = cost.repeat_operations(crossing.ranking_costs(group), parts)
    phases["dense"] = cost.dense_ms(beyond, hardware, batch) - alone
    modules_ms = 0.0
    if crossing.modules.parameters:
        # A group's ranks share the modules' work, on the samples of all peers.
        modules_ms = cost.dense_ms(crossing.modules, group.hardware, batch)
        phases["dense"] += modules_ms
    if crossing.groups == 1:
        return phases
    latency = hardware.inter_host_latency_us / 1e3
    bytes_per_ms = hardware.inter_host_gb_per_s * cost.BYTES_PER_MS
    samples = cost.local_batch(batch, hardware.world_size)
    phases["input_exchange"] = latency * 2 + samples * crossing.ids * cost.FLOAT / bytes_per_ms
    # Vectors of the peers' samples go out, and the gradients of the other tower hosts' vectors go back.
    sent = (crossing.groups - 1) * crossing.own * crossing.dim
    returned = (len(crossing.vectors) - crossing.own) * crossing.dim
    # A third of a module's products are forward, and the others backward.
    for phase, count, share in (("output_exchange", sent, 1 / 3), ("gradient_exchange", returned, 2 / 3)):
        travel = samples * count * cost.FLOAT / bytes_per_ms
        phases[phase] = latency + max(travel - share * crossing.beside * modules_ms, 0.0)
    return phases


def step_parts(plan: Plan, inputs: PlanInputs, predicted: Prediction) -> dict[str, float]:
    """Split the slowest rank's step by what would make it shorter.

    ``compute`` has lookups, updates and the dense part; ``overhead`` is what a step costs whatever its samples,
    including the latency of its collectives; ``within_hosts`` or ``between_hosts`` has the all-to-alls of embeddings,
    or that of ids if it is longer than all the rest, by the slower link; ``all_reduce`` has gradients of the dense part
    and of replicas.

    Returns:
        Ms by part, which add up to the step as ``predicted`` for ``plan``.
    """
    hardware = inputs.hardware
    if hardware.embedding_hosts:
        return _split_bipartite_step(inputs, predicted)
    rank = max(range(len(predicted.phases)), key=lambda rank: cost.step_ms(predicted.phases[rank]))
    phases = predicted.phases[rank]
    dense, latency, calls = _dense_reduce_ms(inputs), cost.latency_ms(hardware), _calls_ms(inputs)
    # A step waits for outputs, for their gradients and for the dense part's gradients.
    waits = 3 * latency if hardware.world_size > 1 else 0.0
    reduced = dense + _replica_reduce_ms(plan, inputs, rank)
    exchanged = phases["output_exchange"] + phases["gradient_exchange"] - 2 * latency - (reduced - dense)
    parts = {
        "compute": phases["lookup"] + phases["update"] + phases["dense"] - dense - calls - (waits - 2 * latency),
        "overhead": phases["overhead"] + calls + waits,
        WITHIN: 0.0,
        BETWEEN: 0.0,
        "all_reduce": reduced,
    }
    longer = max(phases["input_exchange"] - sum(parts.values()) - exchanged, 0.0)
    # An all-to-all over all ranks uses both links at once and waits for the slower one.
    within, between = cost.links_ms(hardware, 1.0)
    slower_link = BETWEEN if between > within else WITHIN
    parts[slower_link] = max(exchanged, 0.0) + longer
    return parts


def slowest_phases(by_rank: list[dict[str, float]]) -> dict[str, float]:
    """Return ms by phase of the rank slowest in it, where ranks of different kinds work one after the other."""
    slowest = {}
    for phase in by_rank[0]:
        slowest[phase] = max(rank[phase] for rank in by_rank)
    return slowest


def _split_bipartite_step(inputs: PlanInputs, predicted: Prediction) -> dict[str, float]:
    # A step takes the work of a worker plus that of the slowest rank with tables.
    phases = slowest_phases(predicted.phases)
    waits = 2 * inputs.hardware.inter_host_latency_us / 1e3
    workers = worker_side(inputs)
    reduced, calls = _dense_reduce_ms(workers), _calls_ms(workers)
    parts = {
        "compute": phases["lookup"] + phases["update"] + phases["dense"] - reduced - calls,
        "overhead": phases["overhead"] + calls + waits,
        WITHIN: 0.0,
        BETWEEN: phases["output_exchange"] + phases["gradient_exchange"] - waits,
        "all_reduce": reduced,
    }
    parts[BETWEEN] += max(phases["input_exchange"] - sum(parts.values()), 0.0)
    return parts


def _dense_reduce_ms(inputs: PlanInputs) -> float:
    return cost.all_reduce_ms(inputs.hardware, _dense_costs(inputs).parameters * cost.FLOAT)


def _calls_ms(inputs: PlanInputs) -> float:
    return cost.calls_ms(_dense_costs(inputs), inputs.hardware)


def _dense_costs(inputs: PlanInputs) -> ModelCosts:
    samples = cost.local_batch(inputs.batch, inputs.world_size)
    return cost.dense_costs(inputs.model, inputs.schema, inputs.events, samples, inputs.train.accumulate)


def _replica_reduce_ms(plan: Plan, inputs: PlanInputs, rank: int) -> float:
    spent = 0.0
    for table in tables_of(inputs):
        placed = plan.tables[table.name]
        if placed.sharding != DATA_PARALLEL:
            continue
        by_shard = shard_phases(inputs.hardware, inputs.batch, table, placed)
        for shard, phases in zip(placed.shards, by_shard, strict=True):
            if shard.rank == rank:
                spent += phases["gradient_exchange"]
    return spent
