"""Plans for a bipartite cluster: the tables on the ranks of embedding hosts, the dense part on those of the workers.

The table side is planned like a cluster of its own, whose samples come from other hosts. A step is one side after the
other: ids go out, rows are looked up, pooled embeddings come back, the dense part learns, gradients go out, rows are
updated. An exchange takes as long as on the side whose link has more to carry. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from pipeline.errors import PlanError
from pipeline.planning.cost import BYTES_PER_MS, FLOAT, fixed_ms, local_batch
from pipeline.planning.hardware import check_hardware, fast_memory, memory_gib, size_text
from pipeline.planning.inputs import PlanInputs, table_side, worker_side
from pipeline.planning.reservations import dense_bytes
from pipeline.planning.step_prediction import Prediction, predict
from pipeline.records.plan import Plan
from pipeline.units import GIB

EXCHANGES = ("input_exchange", "output_exchange", "gradient_exchange")


@dataclass(frozen=True)
class SampleBytes:
    """Bytes of one sample between its worker and the tables: ``ids`` go there, ``pooled`` embeddings come back.

    Gradients of the embeddings go there, too: as many bytes as ``pooled``.
    """

    ids: float
    pooled: float

    @property
    def there(self) -> float:
        """From the workers to the embedding hosts."""
        return self.ids + self.pooled

    @property
    def total(self) -> float:
        """Both ways."""
        return self.there + self.pooled


def sample_bytes(plan: Plan, inputs: PlanInputs) -> SampleBytes:
    """What a sample costs by the shards of ``plan``: 4 bytes an id, a length, a weight and a value of an embedding.

    Each column shard of a table is sent all of its ids.
    """
    ids = pooled = 0.0
    for table in inputs.schema.tables:
        placed, features = plan.tables[table.name], len(table.features)
        weighted = 2 if table.weighted else 1
        ids += FLOAT * len(placed.shards) * (placed.pooling * weighted + features)
        pooled += FLOAT * features * placed.dim
    return SampleBytes(ids=ids, pooled=pooled)


def bipartite_plan(inputs: PlanInputs, flat_plan: Callable[[PlanInputs], Plan]) -> Plan:
    """The plan of all ranks; ``flat_plan`` plans the table side. PlanError where a side does not fit."""
    hardware, own = inputs.hardware, table_side(inputs)
    check_hardware(worker_side(inputs).hardware)
    reserved = _worker_reserved(inputs)
    try:
        found = flat_plan(own)
    except PlanError as error:
        raise PlanError(error.message, hint=_whole(error.hint, inputs)) from None
    first = hardware.workers
    tables = {
        name: replace(table, shards=tuple(replace(shard, rank=shard.rank + first) for shard in table.shards))
        for name, table in found.tables.items()
    }
    plan = replace(
        found,
        tables=tables,
        world_size=hardware.world_size,
        embedding_hosts=hardware.embedding_hosts,
        memory=[{"hbm": 0, "ddr": 0, "ssd": 0}] * first + found.memory,
        reserved=[reserved] * first + found.reserved,
        figures={**found.figures, "hosts": hardware.hosts},
    )
    spent = worker_phases(plan, inputs)
    phases = [{name: round(ms, 6) for name, ms in spent.items()}] * first + found.phases
    return replace(plan, phases=phases, predicted_step_ms=round(whole_step_ms(spent, found.phases), 6))


def predict_any(plan: Plan, inputs: PlanInputs) -> Prediction:
    """``predict`` on a cluster of either kind."""
    if not inputs.hardware.embedding_hosts:
        return predict(plan, inputs)
    first, own = inputs.hardware.workers, table_side(inputs)
    tables = {
        name: replace(table, shards=tuple(replace(shard, rank=shard.rank - first) for shard in table.shards))
        for name, table in plan.tables.items()
    }
    found = predict(replace(plan, tables=tables, world_size=own.world_size), own)
    spent = worker_phases(plan, inputs)
    return Prediction(
        phases=[spent] * first + found.phases,
        tables=[0] * first + found.tables,
        reserved=[_worker_reserved(inputs)] * first + found.reserved,
        whole_ms=whole_step_ms(spent, found.phases),
    )


def worker_phases(plan: Plan, inputs: PlanInputs) -> dict[str, float]:
    """Ms a step by phase on a worker: its dense part, and its link's share of the exchanges."""
    own, sample = worker_side(inputs), sample_bytes(plan, inputs)
    hardware = own.hardware
    samples, rate = local_batch(own.batch, own.world_size), hardware.inter_host_gb_per_s * BYTES_PER_MS
    latency = hardware.inter_host_latency_us / 1e3
    return {
        **fixed_ms(own.model, own.schema, hardware, own.batch, own.events),
        "input_exchange": 2 * latency + samples * sample.ids / rate,
        "output_exchange": latency + samples * sample.pooled / rate,
        "gradient_exchange": latency + samples * sample.pooled / rate,
    }


def whole_step_ms(worker: dict[str, float], owners: list[dict[str, float]]) -> float:
    """Ms of a step of a worker and the slowest rank with tables, whose works follow each other.

    The ids of the next batch travel meanwhile, so of that exchange counts only what is longer than the rest.
    """
    whole = {name: max(rank[name] for rank in [worker, *owners]) for name in worker}
    rest = sum(ms for name, ms in whole.items() if name != "input_exchange")
    return max(rest, whole["input_exchange"])


def _worker_reserved(inputs: PlanInputs) -> dict[str, int]:
    """Bytes that a worker needs, by purpose; PlanError where it has less. A GPU's are not planned."""
    own = worker_side(inputs)
    reserved = {**dense_bytes(own), "staging": 0, "margin": 0}
    memory = fast_memory(own.hardware)
    need, have = sum(reserved.values()), memory_gib(own.hardware, memory) * GIB
    if need > have:
        raise PlanError(
            f"the dense part and its batches take {size_text(need)} of {memory.upper()} on a worker, which has "
            f"{size_text(have)}",
            hint=f"train.global_batch={max(inputs.batch // 2, own.world_size)}, or "
            f"hardware.{memory}_gib={need / GIB:.3g}",
        )
    return reserved if memory == "ddr" else {}


def _whole(hint: str, inputs: PlanInputs) -> str:
    """The remedies of the table side as settings of the whole cluster."""
    hardware = inputs.hardware
    others = hardware.hosts - hardware.embedding_hosts
    hint = re.sub(
        r"hardware\.hosts=(\d+)",
        lambda found: f"hardware.hosts={int(found[1]) + others} hardware.embedding_hosts={found[1]}",
        hint,
    )
    return hint.replace("hardware.ddr_gib=", "hardware.embedding_ddr_gib=")
