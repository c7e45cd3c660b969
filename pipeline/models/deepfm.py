"""The module of DeepFM (Guo et al. 2017, arXiv 1703.04247, section 2.1): first order, pairs, and an MLP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipeline.models.layers.interaction import Vectors, pair_products, with_own_weights
from pipeline.models.layers.perceptron import HeadedRanker, Logit, mlp
from pipeline.specs.model import ModelInputs


class DeepFm(HeadedRanker):
    """forward(dense [B, n], embeddings [B, V, D]) -> logits [B] in float32.

    The first value of each embedding is the id's first-order weight; the other D - 1 are its latent vector. The numeric
    features have their own weights, and together one latent vector, which an MLP computes.
    """

    def __init__(
        self,
        inputs: ModelInputs,
        *,
        bottom_mlp: Sequence[int],
        top_mlp: Sequence[int],
        norm: str = "none",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        dense = len(inputs.dense)
        latent = inputs.dim - 1
        self.first = nn.Linear(dense, 1, bias=False) if dense else None
        self.vectors = Vectors(dense, len(inputs.vectors), latent, bottom_mlp)
        widths = [self.vectors.count * latent, *top_mlp]
        self.top = mlp(widths, last_activation=True, norm=norm, dropout=dropout)
        self.head = Logit(widths[-1])

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        weights, latent = with_own_weights(embeddings)
        vectors = self.vectors(dense, latent)
        # Only the MLP's output goes through a last layer; first order and pairs are added as they are (equation 1).
        logits: Tensor = self.head(self.top(vectors.flatten(1)))
        # Add in float32, the logit's dtype: the two squares of ``pair_products`` nearly cancel, which bf16 cannot
        # resolve.
        logits = logits + pair_products(vectors.to(logits.dtype)) + weights.squeeze(1)
        if self.first is not None:
            logits = logits + self.first(dense).squeeze(1)
        return logits

    def last_hidden(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Return the MLP's last layer, and the two terms of a logit without weights: pairs and first order."""
        weights, latent = with_own_weights(embeddings)
        vectors = self.vectors(dense, latent)
        deep = self.top(vectors.flatten(1))
        first_order = weights
        if self.first is not None:
            first_order = first_order + self.first(dense)
        pairs = pair_products(vectors)[:, None]
        return torch.cat([deep, pairs.to(deep.dtype), first_order.to(deep.dtype)], dim=1)

    def drop_head(self) -> int:
        """See ``Ranker.drop_head``."""
        # The head only takes the MLP's output; ``last_hidden`` also has the two terms that ``forward`` adds to the
        # logit.
        return super().drop_head() + 2
