"""What a predicted step is spent on, by what would make it shorter. No torch."""

from __future__ import annotations

from pipeline.config import HardwareConfig
from pipeline.planning.choices import DATA_PARALLEL, tables_of
from pipeline.planning.cost import FLOAT, all_reduce_ms, dense_costs, latency_ms, links_ms, local_batch, step_ms
from pipeline.planning.inputs import PlanInputs, worker_side
from pipeline.planning.predict import Prediction, shard_phases
from pipeline.records import Plan

WITHIN, BETWEEN = "within_hosts", "between_hosts"


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
