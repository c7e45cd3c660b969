"""What ranks with towers spend beyond the plan of their own tower hosts: exchanges with the others, and the dense part.

The plan of one group of tower hosts covers its tables, its ranks and their batch. The model's dense part is another:
its ranking takes what all towers put out for one rank's samples, and its gradients are reduced over all hosts.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config import HardwareConfig, ModelConfig
from pipeline.models.costs import model_costs
from pipeline.planning.cost import BYTES_PER_MS, FLOAT, dense_costs, dense_ms, local_batch
from pipeline.records import PHASES, DatasetSchema
from pipeline.specs import ModelInputs


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """What one sample sends between tower hosts.

    ``ids``: values to other tower hosts, a length for each feature included; ``own``: vectors of width ``dim`` that
    this rank's tower hosts put out, out of all ``vectors`` (names); ``groups``: of tower hosts there are.
    """

    ids: float
    own: int
    vectors: tuple[str, ...]
    dim: int
    groups: int


def beyond_tower_ms(
    model: ModelConfig,
    batch: int,
    hardware: HardwareConfig,
    own_hardware: HardwareConfig,
    own_schema: DatasetSchema,
    crossing: Crossing,
) -> dict[str, float]:
    """Ms a step by phase to add to the plan of one group of tower hosts, in a step of ``batch`` samples on all ranks.

    ``own_*``: what that plan is made for: the group's hosts, and its tables beside all dense features. Vectors travel
    as float32. Tower modules are not counted.
    """
    phases, samples = dict.fromkeys(PHASES, 0.0), local_batch(batch, hardware.world_size)
    ranking = model_costs(model, ModelInputs(dense=own_schema.dense, vectors=crossing.vectors, dim=crossing.dim))
    alone = dense_ms(dense_costs(model, own_schema), own_hardware, batch)
    phases["dense"] = dense_ms(ranking, hardware, batch) - alone
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
