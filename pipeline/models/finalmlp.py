"""The module of FinalMLP (Mao et al. 2023, arXiv 2304.00902, section 3): two gated streams, fused bilinearly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.core.errors import ConfigError
from pipeline.models.layers.interaction import BilinearLogit, concat_vectors
from pipeline.models.layers.perceptron import FeatureGate, Ranker, mlp
from pipeline.specs.model import ModelInputs


class FinalMlp(Ranker):
    """forward(dense [B, n], embeddings [B, V, D]) -> logits [B] in float32."""

    def __init__(
        self,
        inputs: ModelInputs,
        *,
        second_mlp: Sequence[int],
        gate_hidden: int,
        heads: int,
        top_mlp: Sequence[int],
        first_gate: Sequence[str] = (),
        second_gate: Sequence[str] = (),
        norm: str = "none",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        # Each stream is gated by its own features, so that the two learn different views (section 3.2).
        self.contexts = [
            gate_positions("first_gate", first_gate, inputs),
            gate_positions("second_gate", second_gate, inputs),
        ]
        self.first_gate = FeatureGate(inputs.width, len(self.contexts[0]) * inputs.dim, gate_hidden)
        self.second_gate = FeatureGate(inputs.width, len(self.contexts[1]) * inputs.dim, gate_hidden)
        first = [inputs.width, *top_mlp]
        second = [inputs.width, *second_mlp]
        self.first = mlp(first, last_activation=True, norm=norm, dropout=dropout)
        self.second = mlp(second, last_activation=True, norm=norm, dropout=dropout)
        self.fusion = BilinearLogit(first[-1], second[-1], heads)
        self.width = first[-1] + second[-1]

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        first, second = self.streams(dense, embeddings)
        logits: Tensor = self.fusion(first, second)
        return logits

    def streams(self, dense: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of both streams, [B, w] each."""
        inputs = concat_vectors(dense, embeddings)
        first_context = embeddings[:, self.contexts[0]].flatten(1)
        second_context = embeddings[:, self.contexts[1]].flatten(1)
        first = self.first(self.first_gate(inputs, first_context))
        second = self.second(self.second_gate(inputs, second_context))
        return first, second

    def last_hidden(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Return both streams, concatenated; several tasks have no bilinear fusion."""
        return torch.cat(self.streams(dense, embeddings), dim=1)

    def drop_head(self) -> int:
        """See ``Ranker.drop_head``."""
        del self.fusion
        return self.width

    def start_at(self, logit: float) -> None:
        """See ``Ranker.start_at``."""
        self.fusion.start_at(logit)


def gate_positions(setting: str, features: Sequence[str], inputs: ModelInputs) -> list[int]:
    """Return the positions of ``features`` among the vectors; ``setting`` names them in messages.

    Raises:
        ConfigError: A feature is not one of the model's vectors.
    """
    for feature in features:
        if feature not in inputs.vectors:
            raise ConfigError(
                f"model.{setting} names {feature!r}, expected some of: {', '.join(inputs.vectors)}",
                hint=f"model.{setting}=[{inputs.vectors[0]}]",
            )
    return [inputs.vectors.index(feature) for feature in features]
