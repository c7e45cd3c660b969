"""Ranking models: ``SPECS`` lists the built-in ones, ``build_model`` builds any registered one. No torch at import."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from pipeline.config import ModelConfig
from pipeline.models.dcnv2 import DCNV2
from pipeline.models.deepfm import DEEPFM
from pipeline.models.dhen import DHEN
from pipeline.models.dlrm import DLRM
from pipeline.models.finalmlp import FINALMLP
from pipeline.models.masknet import MASKNET
from pipeline.models.mlp import MLP
from pipeline.models.wide_deep import WIDE_DEEP
from pipeline.models.wukong import WUKONG
from pipeline.specs import MODELS, ModelInputs

if TYPE_CHECKING:
    from pipeline.models.layers import Ranker

__all__ = ["SPECS", "build_model"]

SPECS = (DLRM, DCNV2, DEEPFM, WIDE_DEEP, FINALMLP, MASKNET, DHEN, WUKONG, MLP)


def build_model(config: ModelConfig, inputs: ModelInputs) -> Ranker:
    """The model that ``config`` (checked) names, for ``inputs``; ConfigError for an unknown name.

    Its initial weights depend on ``inputs.seed`` alone. The CPU's global random state stays as it is.
    """
    import torch

    spec = MODELS.get(config.name)
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(inputs.seed)
        return cast("Ranker", spec.build(config, inputs))
