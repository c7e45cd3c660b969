"""DeepFM (Guo et al. 2017, arXiv 1703.04247): its settings, and how it is built. No torch at import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.fields import setting
from pipeline.models.settings import VectorRankerConfig
from pipeline.specs import ModelInputs

if TYPE_CHECKING:
    from pipeline.models.layers import Ranker


@dataclass(kw_only=True)
class DeepFmConfig(VectorRankerConfig):
    """DeepFM: a factorisation machine and an MLP over the same embeddings."""

    name: str = setting("deepfm", choices=("deepfm",), doc="Ranking model to train.")


class DeepFmModel:
    """``deepfm`` as a choice of ``model``."""

    name = "deepfm"
    config = DeepFmConfig

    def build(self, config: DeepFmConfig, inputs: ModelInputs) -> Ranker:
        """The module, its weights drawn from ``inputs.seed``."""
        from pipeline.models.layers import initialise
        from pipeline.models.rankers.deepfm import DeepFm

        return initialise(DeepFm(config, inputs), inputs.seed)


DEEPFM = DeepFmModel()
