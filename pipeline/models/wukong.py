"""The module of Wukong (Zhang et al. 2024, arXiv 2403.02545, section 3): layers of factorisation machines."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipeline.models.layers.interaction import VectorLinear, Vectors
from pipeline.models.layers.perceptron import HeadedRanker, Logit, mlp
from pipeline.specs.model import ModelInputs


class FactorBlock(nn.Module):
    """[B, m, D] -> [B, n_F, D]: MLP(LN(flatten(X (X^T Y)))) with Y [m, k] learnt (section 3.4)."""

    def __init__(self, count: int, dim: int, products: int, hidden: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.shape = outputs, dim
        self.sums = VectorLinear(count, products, bias=False)
        self.norm = nn.LayerNorm(count * products)
        self.mlp = mlp([count * products, *hidden, outputs * dim], last_activation=False)

    def forward(self, vectors: Tensor) -> Tensor:
        # Compute [B, m, k], which is linear in the number of vectors m, instead of all m x m products.
        products = torch.bmm(vectors, self.sums(vectors).mT)
        result: Tensor = self.mlp(self.norm(products.flatten(1))).unflatten(1, self.shape)
        return result


class WukongLayer(nn.Module):
    """[B, m, D] -> [B, n_F + n_L, D]: LN(concat(FMB(X), LCB(X)) + X); X by a linear layer where the numbers differ."""

    def __init__(self, factors: FactorBlock, count: int, dim: int, linear_vectors: int) -> None:
        super().__init__()
        self.factors = factors
        self.linear = VectorLinear(count, linear_vectors)
        self.count = factors.shape[0] + linear_vectors
        self.shortcut: nn.Module = nn.Identity()
        # A residual sum needs the same number of vectors on both sides.
        if count != self.count:
            self.shortcut = VectorLinear(count, self.count)
        self.norm = nn.LayerNorm(dim)

    def forward(self, vectors: Tensor) -> Tensor:
        joined = torch.cat([self.factors(vectors), self.linear(vectors)], dim=1)
        result: Tensor = self.norm(joined + self.shortcut(vectors))
        return result


class Wukong(HeadedRanker):
    """forward(dense [B, n], embeddings [B, V, D]) -> logits [B] in float32."""

    def __init__(
        self,
        inputs: ModelInputs,
        *,
        layers: int,
        products: int,
        products_mlp: Sequence[int],
        product_vectors: int,
        linear_vectors: int,
        bottom_mlp: Sequence[int],
        top_mlp: Sequence[int],
        norm: str = "none",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.vectors = Vectors(len(inputs.dense), len(inputs.vectors), inputs.dim, bottom_mlp)
        count = self.vectors.count
        self.layers = nn.Sequential()
        for _ in range(layers):
            factors = FactorBlock(count, inputs.dim, products, products_mlp, product_vectors)
            layer = WukongLayer(factors, count, inputs.dim, linear_vectors)
            self.layers.append(layer)
            count = layer.count
        widths = [count * inputs.dim, *top_mlp]
        self.top = mlp(widths, last_activation=True, norm=norm, dropout=dropout)
        self.head = Logit(widths[-1])

    def last_hidden(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """See ``Ranker.last_hidden``."""
        vectors = self.layers(self.vectors(dense, embeddings))
        hidden: Tensor = self.top(vectors.flatten(1))
        return hidden
