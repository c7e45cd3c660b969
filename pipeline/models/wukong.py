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

    name: str = setting("wukong", choices=("wukong",), doc="Ranking model to train.")
    layers: int = setting(2, low=1, high=32, doc="Number of layers of interactions, one after the other.")
    products: int = setting(
        8,
        low=1,
        doc="Number of sums of all vectors that the factorisation machine of a layer multiplies every vector with.",
    )
    products_mlp: list[int] = setting(factory=lambda: [128], doc="Hidden widths of the MLP on the products of a layer.")
    product_vectors: int = setting(8, low=1, doc="Number of vectors that the MLP on the products of a layer puts out.")
    linear_vectors: int = setting(
        8, low=1, doc="Number of linear sums of its vectors that a layer has beside the products."
    )


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
