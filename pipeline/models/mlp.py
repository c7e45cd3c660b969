"""The module of ``mlp``: one MLP on the dense features and all embeddings, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pipeline.models.layers.interaction import concat_vectors
from pipeline.models.layers.perceptron import HeadedRanker, Logit, mlp
from pipeline.specs.model import ModelInputs


class MlpRanker(HeadedRanker):
    """forward(dense [B, n], embeddings [B, V, D]) -> logits [B] in float32."""

    def __init__(
        self, inputs: ModelInputs, *, top_mlp: Sequence[int], norm: str = "none", dropout: float = 0.0
    ) -> None:
        super().__init__()
        widths = [inputs.width, *top_mlp]
        self.top = mlp(widths, last_activation=True, norm=norm, dropout=dropout)
        self.head = Logit(widths[-1])

    def last_hidden(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """See ``Ranker.last_hidden``."""
        hidden: Tensor = self.top(concat_vectors(dense, embeddings))
        return hidden
