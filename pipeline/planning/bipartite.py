"""Plans for a bipartite cluster: tables on the ranks of embedding hosts, the dense part on those of the workers.

The table side is planned like a separate cluster whose samples come from other hosts. In a step one side works after
the other: ids go out, rows are looked up, pooled embeddings come back, the dense part learns, gradients go out, rows
are updated. An exchange takes as long as it does on the side whose link carries more. This module does not import
torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from pipeline.core.errors import PlanError
from pipeline.core.units import GIB
from pipeline.planning.cost import BYTES_PER_MS, FLOAT, fixed_ms, local_batch, step_ms
from pipeline.planning.hardware import check_hardware, fast_memory, memory_gib, size_text
from pipeline.planning.inputs import PlanInputs, table_side, worker_side
from pipeline.planning.problem import dense_bytes
from pipeline.planning.step_prediction import Prediction, predict, slowest_phases
from pipeline.records.plan import Plan, TablePlan


@dataclass(frozen=True)
class SampleBytes:
    """Bytes of one sample between its worker and the tables: ``ids`` go there, ``pooled`` embeddings come back."""

    ids: float
    pooled: float

    @property
    def total(self) -> float:
        # Embeddings come back, and as many bytes of their gradients go to the tables.
        return self.ids + self.pooled + self.pooled


def sample_bytes(plan: Plan, inputs: PlanInputs) -> SampleBytes:
    """Count a sample's bytes by the shards of ``plan``: 4 for each id, length, weight and value of an embedding.

    Each column shard of a table receives all of its ids.
    """
    ids = pooled = 0.0
    for table in inputs.schema.tables:
        placed, features = plan.tables[table.name], len(table.features)
        weighted = 2 if table.weighted else 1
        ids += FLOAT * len(placed.shards) * (placed.pooling * weighted + features)
        pooled += FLOAT * features * placed.dim
    return SampleBytes(ids=ids, pooled=pooled)


def bipartite_plan(inputs: PlanInputs, plan_tables: Callable[[PlanInputs], Plan]) -> Plan:
    """Plan all ranks; ``plan_tables`` plans the table side. Raises PlanError if a side does not fit."""
    hardware = inputs.hardware
    workers = hardware.workers
    check_hardware(worker_side(inputs).hardware)
    reserved = _reserve_worker(inputs)
    try:
        table_plan = plan_tables(table_side(inputs))
    except PlanError as error:
        # Rewrite remedies for the table side as settings of the whole cluster.
        hosts = hardware.hosts - hardware.embedding_hosts
        hint = re.sub(
            r"hardware\.hosts=(\d+)",
            lambda match: f"hardware.hosts={int(match[1]) + hosts} hardware.embedding_hosts={match[1]}",
            error.hint,
        )
        hint = hint.replace("hardware.ddr_gib=", "hardware.embedding_ddr_gib=")
        raise PlanError(error.message, hint=hint) from None
    # The workers are the first ranks.
    plan = replace(
        table_plan,
        tables=_shift_ranks(table_plan.tables, workers),
        world_size=hardware.world_size,
        embedding_hosts=hardware.embedding_hosts,
        memory=[{"hbm": 0, "ddr": 0, "ssd": 0}] * workers + table_plan.memory,
        reserved=[reserved] * workers + table_plan.reserved,
        figures={**table_plan.figures, "hosts": hardware.hosts},
    )
    spent = worker_phases(plan, inputs)
    rounded = {phase: round(ms, 6) for phase, ms in spent.items()}
    return replace(
        plan,
        phases=[rounded] * workers + table_plan.phases,
        predicted_step_ms=round(step_ms(slowest_phases([spent, *table_plan.phases])), 6),
    )


def _shift_ranks(tables: dict[str, TablePlan], by: int) -> dict[str, TablePlan]:
    shifted = {}
    for name, table in tables.items():
        shards = tuple(replace(shard, rank=shard.rank + by) for shard in table.shards)
        shifted[name] = replace(table, shards=shards)
    return shifted


def predict_any(plan: Plan, inputs: PlanInputs) -> Prediction:
    """Predict the cost of ``plan`` on a cluster of either kind."""
    if not inputs.hardware.embedding_hosts:
        return predict(plan, inputs)
    workers, owners = inputs.hardware.workers, table_side(inputs)
    side = replace(plan, tables=_shift_ranks(plan.tables, -workers), world_size=owners.world_size)
    of_tables = predict(side, owners)
    spent = worker_phases(plan, inputs)
    return Prediction(
        phases=[spent] * workers + of_tables.phases,
        tables=[0] * workers + of_tables.tables,
        reserved=[_reserve_worker(inputs)] * workers + of_tables.reserved,
        whole_ms=step_ms(slowest_phases([spent, *of_tables.phases])),
    )


def worker_phases(plan: Plan, inputs: PlanInputs) -> dict[str, float]:
    """Predict ms per step by phase on a worker: its dense part, and its link's share of the exchanges."""
    workers, sample = worker_side(inputs), sample_bytes(plan, inputs)
    hardware = workers.hardware
    samples = local_batch(workers.batch, workers.world_size)
    bytes_per_ms = hardware.inter_host_gb_per_s * BYTES_PER_MS
    latency = hardware.inter_host_latency_us / 1e3
    parts = workers.train.accumulate
    phases = fixed_ms(workers.model, workers.schema, hardware, workers.batch, workers.events, parts)
    phases["input_exchange"] = 2 * latency + samples * sample.ids / bytes_per_ms
    phases["output_exchange"] = latency + samples * sample.pooled / bytes_per_ms
    phases["gradient_exchange"] = latency + samples * sample.pooled / bytes_per_ms
    return phases


def _reserve_worker(inputs: PlanInputs) -> dict[str, int]:
    # Returns the bytes that a worker needs, by purpose. A GPU's bytes are not planned.
    workers = worker_side(inputs)
    reserved = {**dense_bytes(workers), "staging": 0, "margin": 0}
    memory = fast_memory(workers.hardware)
    need, have = sum(reserved.values()), memory_gib(workers.hardware, memory) * GIB
    if need > have:
        raise PlanError(
            f"the dense part and its batches take {size_text(need)} of {memory.upper()} on a worker, which has "
            f"{size_text(have)}",
            hint=f"train.global_batch={max(inputs.batch // 2, workers.world_size)}, or "
            f"hardware.{memory}_gib={need / GIB:.3g}",
        )
    if memory != "ddr":
        return {}
    return reserved
