"""The module of ``factor_mlp``."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.models.layers import Logit, Ranker, mlp


class FactorMlp(Ranker):
    """forward(dense [B, n], embeddings [B, V, D]) -> logits [B] in float32."""

    def __init__(self, dense: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.hidden = mlp([dense + dim, hidden], last_activation=True)
        self.head = Logit(hidden)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        # The sum of all pairs' products, by the square of the sum (Rendle 2010, lemma 3.1).
        products = 0.5 * (embeddings.sum(1) ** 2 - (embeddings**2).sum(1))
        logits: Tensor = self.head(self.hidden(torch.cat([dense, products], dim=1)))
        return logits

    def start_at(self, logit: float) -> None:
        """Nightjar sets the bias, so that training starts at the label rate of the logs."""
        self.head.start_at(logit)
