"""Inputs as vectors of one width: the numeric features beside the embeddings; linear layers over the vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipeline.models.layers.mlp import compute_dtype, mlp


class Vectors(nn.Module):
    """forward(dense [B, n], embeddings [B, V, D]) -> [B, V + 1, D]: an MLP's output on the dense features comes first.

    Without dense features it is [B, V, D]. ``count``: of the vectors that come out.
    """

    def __init__(self, dense: int, vectors: int, dim: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.bottom = mlp([dense, *hidden, dim], last_activation=False) if dense else None
        self.count = vectors + (dense > 0)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        if self.bottom is None:
            return embeddings.to(compute_dtype(embeddings))
        first = self.bottom(dense)
        return torch.cat([first[:, None], embeddings.to(first.dtype)], dim=1)


class VectorLinear(nn.Linear):
    """forward(vectors [B, m, D]) -> [B, k, D]: sums of the vectors, by learnt weights and a bias for each."""

    def forward(self, vectors: Tensor) -> Tensor:
        return super().forward(vectors.mT).mT


def concat_vectors(dense: Tensor, embeddings: Tensor) -> Tensor:
    """dense [B, n] and the flattened embeddings [B, V, D]: [B, n + V * D]."""
    return torch.cat([dense.to(embeddings.dtype), embeddings.flatten(1)], dim=1)
