"""The module of ``mlp``: one MLP on the dense features and all embeddings, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from pipeline.models.layers.interaction import concat_vectors
from pipeline.models.layers.mlp import HeadedRanker, Logit, top_mlp
from pipeline.specs.model import ModelInputs

if TYPE_CHECKING:
    from pipeline.models.settings import MlpConfig


class MlpRanker(HeadedRanker):
    """forward(dense [B, n], embeddings [B, V, D]) -> logits [B] in float32."""

    def __init__(self, config: MlpConfig, inputs: ModelInputs) -> None:
        super().__init__()
        self.top, width = top_mlp(inputs.width, config)
        self.head = Logit(width)

    def last_hidden(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """See ``Ranker.last_hidden``."""
        hidden: Tensor = self.top(concat_vectors(dense, embeddings))
        return hidden
