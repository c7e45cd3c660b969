"""The ``model`` group: what the settings of every ranking model have in common."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING


@dataclass(kw_only=True)
class ModelConfig:
    """The ranking model. Each model's own settings are a dataclass derived from this one, beside its spec.

    ``name``: of a registered model; ``nightjar doctor`` lists them. ``embedding_dim``: width of every embedding, a
    multiple of 4.
    """

    name: str = MISSING
    embedding_dim: int = 16
