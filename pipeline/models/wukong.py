"""The module of Wukong (Zhang et al. 2024, arXiv 2403.02545, section 3): layers of factorisation machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pipeline.models.layers.interaction import VectorLinear, Vectors
from pipeline.models.layers.mlp import HeadedRanker, Logit, mlp, top_mlp
from pipeline.specs.model import ModelInputs

if TYPE_CHECKING:
    from pipeline.models.settings import WukongConfig


class FactorBlock(nn.Module):
    """[B, m, D] -> [B, n_F, D]: MLP(LN(flatten(X (X^T Y)))) with Y [m, k] learnt (section 3.4)."""

    def __init__(self, count: int, dim: int, config: WukongConfig) -> None:
        super().__init__()
        self.shape = config.product_vectors, dim
        products = count * config.products
        self.sums = VectorLinear(count, config.products, bias=False)
        self.norm = nn.LayerNorm(products)
        self.mlp = mlp([products, *config.products_mlp, config.product_vectors * dim], last_activation=False)

    def forward(self, vectors: Tensor) -> Tensor:
        products = torch.bmm(vectors, self.sums(vectors).mT)
        result: Tensor = self.mlp(self.norm(products.flatten(1))).unflatten(1, self.shape)
        return result


class WukongLayer(nn.Module):
    """[B, m, D] -> [B, n_F + n_L, D]: LN(concat(FMB(X), LCB(X)) + X); X by a linear layer where the numbers differ."""

    def __init__(self, count: int, dim: int, config: WukongConfig) -> None:
        super().__init__()
        self.factors = FactorBlock(count, dim, config)
        self.linear = VectorLinear(count, config.linear_vectors)
        self.count = config.product_vectors + config.linear_vectors
        self.shortcut = nn.Identity() if count == self.count else VectorLinear(count, self.count)
        self.norm = nn.LayerNorm(dim)

    def forward(self, vectors: Tensor) -> Tensor:
        joined = torch.cat([self.factors(vectors), self.linear(vectors)], dim=1)
        result: Tensor = self.norm(joined + self.shortcut(vectors))
        return result


class Wukong(HeadedRanker):
    """forward(dense [B, n], embeddings [B, V, D]) -> logits [B] in float32."""

    def __init__(self, config: WukongConfig, inputs: ModelInputs) -> None:
        super().__init__()
        self.vectors = Vectors(len(inputs.dense), len(inputs.vectors), inputs.dim, config.bottom_mlp)
        counts = [self.vectors.count, *[config.product_vectors + config.linear_vectors] * config.layers]
        self.layers = nn.Sequential(*(WukongLayer(count, inputs.dim, config) for count in counts[:-1]))
        self.top, width = top_mlp(counts[-1] * inputs.dim, config)
        self.head = Logit(width)

    def last_hidden(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """See ``Ranker.last_hidden``."""
        vectors = self.layers(self.vectors(dense, embeddings))
        hidden: Tensor = self.top(vectors.flatten(1))
        return hidden
