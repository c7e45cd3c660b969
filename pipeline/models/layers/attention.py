"""Self-attention between the vectors of a sample (Vaswani et al. 2017, arXiv 1706.03762, section 3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pipeline.models.layers.mlp import mlp


class SelfAttention(nn.Module):
    """forward(vectors [B, m, D]) -> [B, m, D]: a layer of a transformer's encoder; ``heads`` divides D.

    Written as plain products, which the planner counts alike on every device.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs, self.output = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.first_norm, self.second_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.forward_part = mlp([dim, 2 * dim, dim], last_activation=False)

    def forward(self, vectors: Tensor) -> Tensor:
        query, key, value = (self._by_head(part) for part in self.inputs(vectors).chunk(3, dim=2))
        scores = torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]), dim=-1)
        joined = (scores @ value).transpose(1, 2).flatten(2)
        seen = self.first_norm(vectors + self.output(joined))
        result: Tensor = self.second_norm(seen + self.forward_part(seen))
        return result

    def _by_head(self, values: Tensor) -> Tensor:
        """[B, m, D] -> [B, heads, m, D / heads]."""
        return values.unflatten(2, (self.heads, -1)).transpose(1, 2)
