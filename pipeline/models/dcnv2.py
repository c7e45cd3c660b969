"""DCN-V2 (Wang et al. 2021, arXiv 2008.13535): its settings, and how it is built. No torch at import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.fields import setting
from pipeline.models.settings import RankerConfig
from pipeline.specs import ModelInputs

if TYPE_CHECKING:
    from pipeline.models.layers import Ranker


@dataclass(kw_only=True)
class DcnV2Config(RankerConfig):
    """DCN-V2: cross layers x <- x0 * f(x) + x on everything side by side, before or beside an MLP."""

    name: str = setting("dcnv2", choices=("dcnv2",), doc="Ranking model to train.")
    cross: str = setting(
        "full",
        choices=("full", "low_rank", "mixture"),
        doc="What a cross layer multiplies by: a whole matrix, one of rank `cross_rank`, or a mixture of such experts.",
    )
    cross_layers: int = setting(3, low=1, high=16, doc="Number of cross layers, one after the other.")
    cross_rank: int = setting(64, low=1, doc="Rank of cross layers that have no whole matrix.")
    cross_experts: int = setting(4, low=1, high=64, doc="Number of experts in a mixture.")
    cross_structure: str = setting(
        "stacked",
        choices=("stacked", "parallel"),
        doc="Whether parts follow each other, or stand side by side and are joined before the last layers.",
    )


class DcnV2Model:
    """``dcnv2`` as a choice of ``model``."""

    name = "dcnv2"
    config = DcnV2Config

    def build(self, config: DcnV2Config, inputs: ModelInputs) -> Ranker:
        """The module, its weights drawn from ``inputs.seed``."""
        from pipeline.models.layers import initialise
        from pipeline.models.rankers.dcnv2 import DcnV2

        return initialise(DcnV2(config, inputs), inputs.seed)


DCNV2 = DcnV2Model()
