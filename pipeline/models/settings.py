"""Settings that built-in rankers share: their MLPs, and how these are regularised. No torch at import."""

from __future__ import annotations

from dataclasses import dataclass, fields

from pipeline.config import ModelConfig
from pipeline.config.fields import setting
from pipeline.errors import ConfigError

NORMS = ("none", "batch", "layer")


@dataclass(kw_only=True)
class RankerConfig(ModelConfig):
    """What every built-in ranker has: an MLP that leads to the logit."""

    top_mlp: list[int] = setting(
        factory=lambda: [512, 256],
        doc="Hidden widths of the MLP that leads to the logit; a last layer of width 1 follows.",
    )
    dropout: float = setting(
        0.0,
        low=0.0,
        high=0.95,
        quiet=True,
        doc="Probability with which training sets a value of the hidden layers that lead to the logit to zero.",
    )
    norm: str = setting(
        "none",
        choices=NORMS,
        quiet=True,
        doc="Normalisation of the hidden layers that lead to the logit, before ReLU. batch takes mean and variance "
        "over the global batch, of all ranks, and running ones in evaluation; layer takes them over a sample's values.",
    )

    def check(self, path: str) -> None:
        """ConfigError for a layer without width."""
        super().check(path)
        for each in fields(self):
            widths = getattr(self, each.name)
            if isinstance(widths, list) and any(isinstance(width, int) and width < 1 for width in widths):
                raise ConfigError(
                    f"{path}.{each.name} is {widths}, expected widths of at least 1",
                    hint=f"{path}.{each.name}=[512,256]",
                )


@dataclass(kw_only=True)
class VectorRankerConfig(RankerConfig):
    """What rankers have that take the numeric features as vectors beside the embeddings."""

    bottom_mlp: list[int] = setting(
        factory=lambda: [512, 256],
        doc="Hidden widths of the MLP on the numeric features; a last layer as wide as an embedding follows.",
    )
