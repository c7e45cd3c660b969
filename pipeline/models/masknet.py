"""MaskNet (Wang et al. 2021, arXiv 2102.07619): its settings, and how it is built. No torch at import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.fields import setting
from pipeline.models.settings import VectorRankerConfig
from pipeline.specs import ModelInputs

if TYPE_CHECKING:
    from pipeline.models.layers import Ranker


@dataclass(kw_only=True)
class MaskNetConfig(VectorRankerConfig):
    """MaskNet: blocks that multiply by a mask which the whole sample decides, in series or side by side."""

    name: str = setting("masknet", choices=("masknet",), doc="Ranking model to train.")
    block_structure: str = setting(
        "parallel",
        choices=("serial", "parallel"),
        doc="Whether parts follow each other, or stand side by side and are joined before the last layers.",
    )
    blocks: int = setting(3, low=1, high=64, doc="Number of mask blocks.")
    block_width: int = setting(128, low=1, doc="Width of what a mask block puts out.")
    mask_width: int = setting(128, low=1, doc="Width of the hidden layer that computes a mask.")


class MaskNetModel:
    """``masknet`` as a choice of ``model``."""

    name = "masknet"
    config = MaskNetConfig

    def build(self, config: MaskNetConfig, inputs: ModelInputs) -> Ranker:
        """The module, its weights drawn from ``inputs.seed``."""
        from pipeline.models.layers import initialise
        from pipeline.models.rankers.masknet import MaskNet

        return initialise(MaskNet(config, inputs), inputs.seed)


MASKNET = MaskNetModel()
