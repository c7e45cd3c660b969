"""Torch modules that rankers are composed of. Importing this package loads torch."""

from __future__ import annotations

from pipeline.models.layers.interaction import (
    BilinearLogit,
    CrossNet,
    DotInteraction,
    VectorLinear,
    Vectors,
    concat_vectors,
    pair_products,
    with_own_weights,
)
from pipeline.models.layers.jagged import EventWeights, Jagged, SelfAttention, SequenceVector, wide
from pipeline.models.layers.perceptron import (
    BatchNorm,
    FeatureGate,
    HeadedRanker,
    Logit,
    MaskBlock,
    MaxNorm,
    Ranker,
    batch_norms,
    compute_dtype,
    initialise,
    log_odds,
    mlp,
)

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
    "wide",
    "with_own_weights",
]
