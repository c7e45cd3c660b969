"""One MLP on everything side by side, the deep part of Cheng et al. (2016, arXiv 1606.07792, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.fields import setting
from pipeline.models.settings import RankerConfig
from pipeline.specs import ModelInputs

if TYPE_CHECKING:
    from pipeline.models.layers import Ranker


@dataclass(kw_only=True)
class MlpConfig(RankerConfig):
    """One MLP on the dense features and all embeddings, side by side."""

    name: str = setting("mlp", choices=("mlp",), doc="Ranking model to train.")


class MlpModel:
    """``mlp`` as a choice of ``model``."""

    name = "mlp"
    config = MlpConfig

    def build(self, config: MlpConfig, inputs: ModelInputs) -> Ranker:
        """The module, its weights drawn from ``inputs.seed``."""
        from pipeline.models.layers import initialise
        from pipeline.models.rankers.mlp import MlpRanker

        return initialise(MlpRanker(config, inputs), inputs.seed)


MLP = MlpModel()
