"""Wukong (Zhang et al. 2024, arXiv 2403.02545): its settings, and how it is built. No torch at import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.fields import setting
from pipeline.models.settings import VectorRankerConfig
from pipeline.specs import ModelInputs

if TYPE_CHECKING:
    from pipeline.models.layers import Ranker


@dataclass(kw_only=True)
class WukongConfig(VectorRankerConfig):
    """Wukong: layers of factorisation machines, whose products feed an MLP, beside linear sums of the vectors."""

    name: str = setting("wukong", choices=("wukong",), doc="This model is trained.")
    layers: int = setting(2, low=1, high=32, doc="This many layers of interactions follow each other.")
    products: int = setting(
        8, low=1, doc="The factorisation machine of a layer multiplies every vector with this many sums of all vectors."
    )
    products_mlp: list[int] = setting(
        factory=lambda: [128], doc="The MLP on the products of a layer has these hidden widths."
    )
    product_vectors: int = setting(8, low=1, doc="The MLP on the products of a layer puts out this many vectors.")
    linear_vectors: int = setting(8, low=1, doc="A layer has this many linear sums of its vectors beside the products.")


class WukongModel:
    """``wukong`` as a choice of ``model``."""

    name = "wukong"
    config = WukongConfig

    def build(self, config: WukongConfig, inputs: ModelInputs) -> Ranker:
        """The module, its weights drawn from ``inputs.seed``."""
        from pipeline.models.layers import initialise
        from pipeline.models.rankers.wukong import Wukong

        return initialise(Wukong(config, inputs), inputs.seed)


WUKONG = WukongModel()
