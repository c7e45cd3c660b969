"""Ranking models: pure torch, no distribution. ``build_model`` makes the configured one."""

from __future__ import annotations

from pipeline.config import ModelConfig
from pipeline.errors import ConfigError
from pipeline.models.dlrm import Dlrm, initialise, log_odds
from pipeline.models.interaction import DotInteraction
from pipeline.models.normalise import MaxNorm

__all__ = ["Dlrm", "DotInteraction", "MaxNorm", "build_model", "initialise", "log_odds"]


def build_model(config: ModelConfig, dense: int, tables: int, seed: int = 0) -> Dlrm:
    """The model ``config`` names, for ``dense`` numeric features and ``tables`` embeddings, drawn from ``seed``.

    forward(dense [B, n], embeddings [B, F, D]) -> logits [B] float32. ConfigError for layers no model can have.
    """
    for name, widths in (("bottom_mlp", config.bottom_mlp), ("top_mlp", config.top_mlp)):
        if any(width < 1 for width in widths):
            raise ConfigError(
                f"model.{name} is {list(widths)}, expected widths of at least 1", hint=f"model.{name}=[512,256]"
            )
    model = Dlrm(
        dense=dense, tables=tables, dim=config.embedding_dim, bottom=list(config.bottom_mlp), top=list(config.top_mlp)
    )
    initialise(model, seed)
    return model
