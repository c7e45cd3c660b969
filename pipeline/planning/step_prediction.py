"""The cost model's view of a finished plan: every rank's phases and memory, and what towers add. No torch.

The plan of one group of tower hosts covers its tables, its ranks and their batch. The model's dense part is another:
its ranking takes what all towers put out for one rank's samples, and its gradients are reduced over all hosts.
``step_parts`` says what a predicted step is spent on, by what would make it shorter.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.hardware import HardwareConfig
from pipeline.models.costs import model_costs
from pipeline.planning.choices import DATA_PARALLEL, PlannedTable, tables_of
from pipeline.planning.cost import (
    BYTES_PER_MS,
    FLOAT,
    all_reduce_ms,
    dense_costs,
    dense_ms,
    fixed_ms,
    latency_ms,
    links_ms,
    local_batch,
    shard_ms,
    step_ms,
    vector_costs,
)
from pipeline.planning.inputs import PlanInputs, worker_side
from pipeline.planning.reservations import dense_bytes, staged_row
from pipeline.planning.shard_workload import ShardBlock, asked_of
from pipeline.records.plan import BESIDE_TRAINING, PHASES, Plan, TablePlan
from pipeline.specs.model import ModelCosts, ModelInputs, task_inputs

WITHIN, BETWEEN = "within_hosts", "between_hosts"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """By rank: ms by phase (PHASES), bytes of its tables with their optimizer state, bytes reserved by purpose.

    ``whole_ms``: a step, where ranks that do different work wait for each other; None: they work alike.
    """

    phases: list[dict[str, float]]
    tables: list[int]
    reserved: list[dict[str, int]]
    whole_ms: float | None = None

    @property
    def step_ms(self) -> float:
        """A step of the slowest rank, or that of all together."""
        return max(step_ms(phases) for phases in self.phases) if self.whole_ms is None else self.whole_ms

    @property
    def bytes(self) -> int:
        """Memory that training takes on the fullest rank: tables and reservations, without the process itself."""
        taken = (sum(v for name, v in kept.items() if name not in BESIDE_TRAINING) for kept in self.reserved)
        return max(own + kept for own, kept in zip(self.tables, taken, strict=True))


def predict(plan: Plan, inputs: PlanInputs) -> Prediction:
    """The cost model's figures of ``plan`` on the hardware and for the tables of ``inputs``.

    Ranks wait for each other in the exchanges; that time is not added up, the slowest rank's own time counts.
    """
    hardware, batch = inputs.hardware, inputs.batch
    phases = [fixed_ms(inputs.model, inputs.schema, hardware, batch, inputs.events) for _ in range(plan.world_size)]
    own, staged = [0] * plan.world_size, [0] * plan.world_size
    for table in tables_of(inputs):
        placed = plan.tables[table.name]
        for shard, spent in zip(placed.shards, shard_phases(hardware, batch, table, placed), strict=True):
            for phase, ms in spent.items():
                phases[shard.rank][phase] += ms
            own[shard.rank] += placed.resident_bytes(shard, plan.device)
            staged[shard.rank] += shard.rows * staged_row(0 if placed.tier == "ssd" else table.row_bytes(shard.columns))
    reserved = [dense_bytes(inputs) for _ in own]
    if hardware.device == "cpu":
        for kept, rows in zip(reserved, staged, strict=True):
            kept["staging"] = rows
    return Prediction(phases=phases, tables=own, reserved=reserved)


def shard_phases(
    hardware: HardwareConfig, batch: int, table: PlannedTable, placed: TablePlan
) -> list[dict[str, float]]:
    """Ms by phase of each of its shards, as the planner priced them."""
    blocks = [ShardBlock(shard.row, shard.rows, shard.column, shard.columns) for shard in placed.shards]
    asked = asked_of(hardware.world_size, batch, table, placed.sharding, blocks)
    loads = asked.loads(hardware, placed.tier, placed.cache_rows, placed.host_rows)
    return [shard_ms(hardware, load, global_batch=batch) for load in loads]


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """What one sample sends between tower hosts.

    ``ids``: values to other tower hosts, a length for each feature included; ``own``: vectors of width ``dim`` that
    this rank's tower hosts put out, out of all ``vectors`` (names); ``groups``: of tower hosts there are; ``modules``:
    the costs of their towers' modules.
    """

    ids: float
    own: int
    vectors: tuple[str, ...]
    dim: int
    groups: int
    modules: ModelCosts


def beyond_tower_ms(own: PlanInputs, hardware: HardwareConfig, crossing: Crossing) -> dict[str, float]:
    """Ms a step by phase to add to the plan of one group of tower hosts, out of all hosts of ``hardware``.

    ``own``: what that plan is made for: the group's hosts, and its tables beside all dense features. Vectors travel as
    float32. A group's ranks share the modules' work, on the samples of all peers.
    """
    model, batch, schema = own.model, own.batch, own.schema
    phases, samples = dict.fromkeys(PHASES, 0.0), local_batch(batch, hardware.world_size)
    tasks = task_inputs(schema.tasks)
    ranking = model_costs(
        model, ModelInputs(dense=schema.dense, vectors=crossing.vectors, dim=crossing.dim, tasks=tasks)
    )
    alone = dense_ms(vector_costs(model, schema), own.hardware, batch)
    phases["dense"] = dense_ms(ranking, hardware, batch) - alone
    if crossing.modules.parameters:
        phases["dense"] += dense_ms(crossing.modules, own.hardware, batch)
    if crossing.groups == 1:
        return phases
    latency, rate = hardware.inter_host_latency_us / 1e3, hardware.inter_host_gb_per_s * BYTES_PER_MS
    values = {
        "input_exchange": crossing.ids,
        # Own vectors of the peers' samples go out; the gradients of the other tower hosts' vectors go back.
        "output_exchange": (crossing.groups - 1) * crossing.own * crossing.dim,
        "gradient_exchange": (len(crossing.vectors) - crossing.own) * crossing.dim,
    }
    for phase, count in values.items():
        phases[phase] = latency * (2 if phase == "input_exchange" else 1) + samples * count * FLOAT / rate
    return phases


def step_parts(plan: Plan, inputs: PlanInputs, predicted: Prediction) -> dict[str, float]:
    """Ms of the slowest rank's step as ``predicted`` for ``plan``; they add up to the predicted step.

    ``compute``: lookups, updates and the dense part; ``overhead``: what a step costs whatever its samples, latency of
    its collectives included; ``within_hosts`` or ``between_hosts``: the all-to-alls of embeddings, or that of ids where
    it is longer than all the rest, by the slower link; ``all_reduce``: gradients of the dense part and of replicas.
    """
    hardware = inputs.hardware
    if hardware.embedding_hosts:
        return _parts_of_sides(inputs, predicted)
    every = predicted.phases
    rank = max(range(len(every)), key=lambda number: step_ms(every[number]))
    phases = every[rank]
    dense, latency = _dense_reduce_ms(inputs), latency_ms(hardware)
    waits = 3 * latency if hardware.world_size > 1 else 0.0  # outputs, their gradients, the dense part's gradients
    reduced = dense + _replicas_ms(plan, inputs, rank)
    exchanged = phases["output_exchange"] + phases["gradient_exchange"] - 2 * latency - (reduced - dense)
    compute = phases["lookup"] + phases["update"] + phases["dense"] - dense - (waits - 2 * latency)
    parts = {
        "compute": compute,
        "overhead": phases["overhead"] + waits,
        WITHIN: 0.0,
        BETWEEN: 0.0,
        "all_reduce": reduced,
    }
    longer = max(phases["input_exchange"] - sum(parts.values()) - exchanged, 0.0)
    parts[slower_link(hardware)] = max(exchanged, 0.0) + longer
    return parts


def _parts_of_sides(inputs: PlanInputs, predicted: Prediction) -> dict[str, float]:
    """Those of a bipartite cluster, where a step is the work of a worker and of the slowest rank with tables."""
    whole = {name: max(rank[name] for rank in predicted.phases) for name in predicted.phases[0]}
    own, waits = worker_side(inputs), 2 * inputs.hardware.inter_host_latency_us / 1e3
    reduced = _dense_reduce_ms(own)
    exchanged = whole["output_exchange"] + whole["gradient_exchange"] - waits
    parts = {
        "compute": whole["lookup"] + whole["update"] + whole["dense"] - reduced,
        "overhead": whole["overhead"] + waits,
        WITHIN: 0.0,
        BETWEEN: exchanged,
        "all_reduce": reduced,
    }
    parts[BETWEEN] += max(whole["input_exchange"] - sum(parts.values()), 0.0)
    return parts


def slower_link(hardware: HardwareConfig) -> str:
    """The link that an all-to-all over all ranks waits for."""
    within, between = links_ms(hardware, 1.0)
    return BETWEEN if between > within else WITHIN


def _dense_reduce_ms(inputs: PlanInputs) -> float:
    """Ms of the all-reduce of the dense part's gradients."""
    samples = local_batch(inputs.batch, inputs.world_size)
    costs = dense_costs(inputs.model, inputs.schema, inputs.events, samples)
    return all_reduce_ms(inputs.hardware, costs.parameters * FLOAT)


def _replicas_ms(plan: Plan, inputs: PlanInputs, rank: int) -> float:
    """Ms that ``rank`` spends on the all-reduces of tables of which every rank has a copy."""
    spent = 0.0
    for table in tables_of(inputs):
        placed = plan.tables[table.name]
        if placed.sharding == DATA_PARALLEL:
            shards = zip(placed.shards, shard_phases(inputs.hardware, inputs.batch, table, placed), strict=True)
            spent += sum(phases["gradient_exchange"] for shard, phases in shards if shard.rank == rank)
    return spent
