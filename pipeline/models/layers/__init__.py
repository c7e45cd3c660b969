"""Torch modules: the parts that rankers are composed of, and the rankers' own. Importing this package loads torch."""

from __future__ import annotations

from pipeline.models.layers.interaction import DotInteraction
from pipeline.models.layers.mlp import Logit, Ranker, compute_dtype, initialise, log_odds, mlp
from pipeline.models.layers.normalise import MaxNorm

__all__ = ["DotInteraction", "Logit", "MaxNorm", "Ranker", "compute_dtype", "initialise", "log_odds", "mlp"]
