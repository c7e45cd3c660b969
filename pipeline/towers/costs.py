"""What tower modules cost, for the planner: counted on the built modules, as a ranking model's costs are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from pipeline.records import TowerModuleSpec
from pipeline.specs import ModelCosts


def modules_costs(spec: TowerModuleSpec, features: Sequence[int], width: int) -> ModelCosts:
    """The costs of a sample in the modules of towers with so many ``features`` each, of embeddings of ``width``."""
    each = [_tower_costs(spec, count, width) for count in features]
    return ModelCosts(
        flop=sum(one.flop for one in each),
        parameters=sum(one.parameters for one in each),
        activations=sum(one.activations for one in each),
    )


@lru_cache(maxsize=256)
def _tower_costs(spec: TowerModuleSpec, features: int, width: int) -> ModelCosts:
    if spec.name == "pass_through":
        return ModelCosts(flop=0.0, parameters=0, activations=0)
    import torch

    from pipeline.models.costs import SAMPLES, module_costs
    from pipeline.towers.modules import tower_module

    with torch.device("meta"):
        module = tower_module(spec, features, width)
        embeddings = torch.zeros(SAMPLES, features, width, requires_grad=True)
    return module_costs(module, embeddings)
