"""The module of FinalMLP (Mao et al. 2023, arXiv 2304.00902, section 3): two gated streams, fused bilinearly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.errors import ConfigError
from pipeline.models.layers.interaction import BilinearLogit, concat_vectors
from pipeline.models.layers.mlp import FeatureGate, Ranker, mlp, top_mlp
from pipeline.specs.model import ModelInputs

if TYPE_CHECKING:
    from pipeline.models.settings import FinalMlpConfig


class FinalMlp(Ranker):
    """forward(dense [B, n], embeddings [B, V, D]) -> logits [B] in float32."""

    def __init__(self, config: FinalMlpConfig, inputs: ModelInputs) -> None:
        super().__init__()
        self.contexts = [
            _places("first_gate", config.first_gate, inputs),
            _places("second_gate", config.second_gate, inputs),
        ]
        widths = [len(places) * inputs.dim for places in self.contexts]
        self.first_gate, self.second_gate = (FeatureGate(inputs.width, w, config.gate_hidden) for w in widths)
        self.first, first = top_mlp(inputs.width, config)
        second = [inputs.width, *config.second_mlp]
        self.second = mlp(second, last_activation=True, norm=config.norm, dropout=config.dropout)
        self.fusion = BilinearLogit(first, second[-1], config.heads)
        self.width = first + second[-1]

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        logits: Tensor = self.fusion(*self._streams(dense, embeddings))
        return logits

    def _streams(self, dense: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        inputs = concat_vectors(dense, embeddings)
        one, other = (embeddings[:, places].flatten(1) for places in self.contexts)
        first = self.first(self.first_gate(inputs, one))
        return first, self.second(self.second_gate(inputs, other))

    def last_hidden(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Both streams side by side; several tasks have no bilinear fusion."""
        return torch.cat(self._streams(dense, embeddings), dim=1)

    def drop_head(self) -> int:
        """See ``Ranker.drop_head``."""
        del self.fusion
        return self.width

    def start_at(self, logit: float) -> None:
        """See ``Ranker.start_at``."""
        self.fusion.start_at(logit)


def _places(name: str, features: Sequence[str], inputs: ModelInputs) -> list[int]:
    """Where the vectors of ``features`` are; ConfigError for one that the model does not get as a vector of its own."""
    for feature in features:
        if feature not in inputs.vectors:
            raise ConfigError(
                f"model.{name} names {feature!r}, expected some of: {', '.join(inputs.vectors)}",
                hint=f"model.{name}=[{inputs.vectors[0]}]",
            )
    return [inputs.vectors.index(feature) for feature in features]
