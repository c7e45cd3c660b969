"""Torch modules that rankers are composed of. Importing this package loads torch."""

from __future__ import annotations

from pipeline.models.layers.attention import SelfAttention
from pipeline.models.layers.bilinear import BilinearLogit
from pipeline.models.layers.cross import CrossNet
from pipeline.models.layers.events import SequenceVector
from pipeline.models.layers.factors import pair_products, with_own_weights
from pipeline.models.layers.gates import FeatureGate, MaskBlock
from pipeline.models.layers.interaction import DotInteraction
from pipeline.models.layers.jagged import EventWeights, Jagged, wide
from pipeline.models.layers.mlp import (
    HeadedRanker,
    Logit,
    Ranker,
    compute_dtype,
    initialise,
    log_odds,
    mlp,
    top_mlp,
)
from pipeline.models.layers.normalise import MaxNorm
from pipeline.models.layers.norms import BatchNorm, batch_norms
from pipeline.models.layers.vectors import VectorLinear, Vectors, concat_vectors

__all__ = [
    "BatchNorm",
    "BilinearLogit",
    "CrossNet",
    "DotInteraction",
    "EventWeights",
    "FeatureGate",
    "HeadedRanker",
    "Jagged",
    "Logit",
    "MaskBlock",
    "MaxNorm",
    "Ranker",
    "SelfAttention",
    "SequenceVector",
    "VectorLinear",
    "Vectors",
    "batch_norms",
    "compute_dtype",
    "initialise",
    "log_odds",
    "mlp",
    "pair_products",
    "concat_vectors",
    "top_mlp",
    "wide",
    "with_own_weights",
]
