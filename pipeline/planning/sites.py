"""What ranks with towers spend besides their site's own plan: exchanges between sites, and the dense part. No torch.

A site's plan knows the site alone: its tables, its ranks, the batch of all of them. Its dense part is not the model's,
whose ranking takes what all towers put out for one rank's samples, and whose gradients are reduced over all hosts.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config import Config
from pipeline.models.costs import model_costs
from pipeline.planning.cost import BYTES_PER_MS, FLOAT, dense_costs, dense_ms, local_batch
from pipeline.records import PHASES, DatasetSchema
from pipeline.specs import ModelInputs


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """What one sample sends across: ``ids`` to other sites, with a length for each feature (values); ``own`` vectors
    of width ``dim`` that the site puts out, of those of the names ``vectors``; ``sites``: how many there are."""

    ids: float
    own: int
    vectors: tuple[str, ...]
    dim: int
    sites: int


def beyond_site_ms(
    config: Config, schema: DatasetSchema, site: Config, own: DatasetSchema, crossing: Crossing
) -> dict[str, float]:
    """Ms a step by phase to add to those of the plan of ``site``, whose tables are ``own``; float32 between the sites.

    Tower modules are not counted.
    """
    phases, samples = dict.fromkeys(PHASES, 0.0), local_batch(config)
    inputs = ModelInputs(dense=schema.dense, vectors=crossing.vectors, dim=crossing.dim)
    ranking = model_costs(config.model, inputs)
    phases["dense"] = dense_ms(config, ranking) - dense_ms(site, dense_costs(site, own))
    if crossing.sites == 1:
        return phases
    hardware = config.hardware
    latency, rate = hardware.inter_host_latency_us / 1e3, hardware.inter_host_gb_per_s * BYTES_PER_MS
    values = {
        "input_exchange": crossing.ids,
        # For the peers' samples there, of the other sites' vectors back.
        "output_exchange": (crossing.sites - 1) * crossing.own * crossing.dim,
        "gradient_exchange": (len(crossing.vectors) - crossing.own) * crossing.dim,
    }
    for phase, count in values.items():
        phases[phase] = latency * (2 if phase == "input_exchange" else 1) + samples * count * FLOAT / rate
    return phases
