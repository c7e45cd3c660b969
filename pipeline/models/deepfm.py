"""The module of DeepFM (Guo et al. 2017, arXiv 1703.04247, section 2.1): first order, pairs, and an MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pipeline.models.layers.interaction import Vectors, pair_products, with_own_weights
from pipeline.models.layers.mlp import HeadedRanker, Logit, top_mlp
from pipeline.specs.model import ModelInputs

if TYPE_CHECKING:
    from pipeline.models.settings import DeepFmConfig


class DeepFm(HeadedRanker):
    """forward(dense [B, n], embeddings [B, V, D]) -> logits [B] in float32.

    The first value of each embedding is the id's first-order weight; the other D - 1 are its latent vector. The numeric
    features have weights of their own, and together one latent vector, which an MLP computes.
    """

    def __init__(self, config: DeepFmConfig, inputs: ModelInputs) -> None:
        super().__init__()
        dense, latent = len(inputs.dense), inputs.dim - 1
        self.first = nn.Linear(dense, 1, bias=False) if dense else None
        self.vectors = Vectors(dense, len(inputs.vectors), latent, config.bottom_mlp)
        self.top, width = top_mlp(self.vectors.count * latent, config)
        self.head = Logit(width)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        weights, latent = with_own_weights(embeddings)
        vectors = self.vectors(dense, latent)
        logits: Tensor = self.head(self.top(vectors.flatten(1)))
        logits = logits + pair_products(vectors.to(logits.dtype)) + weights.squeeze(1)
        return logits if self.first is None else logits + self.first(dense).squeeze(1)

    def last_hidden(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """The MLP's last layer, and what ``forward`` adds to the logit: of the pairs, and of the first order."""
        weights, latent = with_own_weights(embeddings)
        vectors = self.vectors(dense, latent)
        deep = self.top(vectors.flatten(1))
        first = weights if self.first is None else weights + self.first(dense)
        return torch.cat([deep, pair_products(vectors)[:, None].to(deep.dtype), first.to(deep.dtype)], dim=1)

    def drop_head(self) -> int:
        """See ``Ranker.drop_head``."""
        return super().drop_head() + 2
