"""The module of DHEN (Zhang et al. 2022, arXiv 2203.11014, section 3): layers of ensembles of interactions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from pipeline.models.layers.interaction import DotInteraction, LowRankCross, VectorLinear, Vectors
from pipeline.models.layers.jagged import SelfAttention
from pipeline.models.layers.perceptron import HeadedRanker, Logit, mlp
from pipeline.models.settings import check_heads
from pipeline.specs.model import ModelInputs


class Dot(nn.Module):
    """[B, m, D] -> [B, l, D]: the dot products of all pairs, and a linear layer on them (advanced DLRM)."""

    def __init__(self, count: int, dim: int, outputs: int) -> None:
        super().__init__()
        self.shape = outputs, dim
        self.interaction = DotInteraction(count, dim)
        self.linear = nn.Linear(self.interaction.width, outputs * dim)

    def forward(self, vectors: Tensor) -> Tensor:
        result: Tensor = self.linear(self.interaction(vectors)).unflatten(1, self.shape)
        return result


class Attention(nn.Sequential):
    """[B, m, D] -> [B, l, D]: a layer of a transformer's encoder, and a linear layer over the vectors."""

    def __init__(self, count: int, dim: int, outputs: int, heads: int) -> None:
        # The settings check embedding_dim, but vectors of towers have another width, so check again.
        check_heads("model", heads, dim)
        super().__init__(SelfAttention(dim, heads), VectorLinear(count, outputs))


class Convolution(nn.Module):
    """[B, m, D] -> [B, l, D]: a 3 x 3 convolution over the vectors as an image, and a linear layer over its rows."""

    def __init__(self, count: int, outputs: int, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, channels, 3, padding=1)
        self.linear = VectorLinear(channels * count, outputs)

    def forward(self, vectors: Tensor) -> Tensor:
        result: Tensor = self.linear(self.convolution(vectors[:, None]).flatten(1, 2))
        return result


class Crossed(nn.Module):
    """[B, m, D] -> [B, l, D]: a cross layer on the flattened vectors, and a linear layer over them."""

    def __init__(self, count: int, dim: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.cross = LowRankCross(count * dim, rank)
        self.linear = VectorLinear(count, outputs)

    def forward(self, vectors: Tensor) -> Tensor:
        flat = vectors.flatten(1)
        result: Tensor = self.linear(self.cross(flat, flat).view_as(vectors))
        return result


class ConcatEnsemble(nn.Module):
    """The ensemble ``concat``: concatenates [B, l, D] of each module to ``count`` vectors."""

    def __init__(self, modules: int, vectors: int) -> None:
        super().__init__()
        self.count = modules * vectors

    def forward(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, dim=1)


class SumEnsemble(nn.Module):
    """The ensemble ``sum``: adds up the outputs of the modules."""

    def __init__(self, modules: int, vectors: int) -> None:
        super().__init__()
        self.count = vectors

    def forward(self, parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).sum(0)


class WeightedSumEnsemble(nn.Module):
    """The ensemble ``weighted_sum``: a learnt weight for each module."""

    def __init__(self, modules: int, vectors: int) -> None:
        super().__init__()
        self.count = vectors
        self.weights = nn.Parameter(torch.ones(modules))

    def forward(self, parts: list[Tensor]) -> Tensor:
        return (torch.stack(parts) * self.weights[:, None, None, None]).sum(0)


ENSEMBLES: dict[str, Callable[[int, int], nn.Module]] = {
    "concat": ConcatEnsemble,
    "sum": SumEnsemble,
    "weighted_sum": WeightedSumEnsemble,
}


class DhenLayer(nn.Module):
    """[B, m, D] -> [B, count, D]: LN(Ensemble_i Interaction_i(X) + Shortcut(X)) (equations 1 to 3).

    The shortcut is X itself, or W X where the number of vectors changes.
    """

    def __init__(self, interactions: Sequence[nn.Module], ensemble: nn.Module, count: int, dim: int) -> None:
        super().__init__()
        self.interactions = nn.ModuleList(interactions)
        self.ensemble = ensemble
        self.count: int = ensemble.count  # type: ignore[assignment]
        self.shortcut: nn.Module = nn.Identity()
        # A residual sum needs the same number of vectors on both sides.
        if count != self.count:
            self.shortcut = VectorLinear(count, self.count)
        self.norm = nn.LayerNorm(dim)

    def forward(self, vectors: Tensor) -> Tensor:
        joined = self.ensemble([interaction(vectors) for interaction in self.interactions])
        result: Tensor = self.norm(joined + self.shortcut(vectors))
        return result


class Dhen(HeadedRanker):
    """forward(dense [B, n], embeddings [B, V, D]) -> logits [B] in float32."""

    def __init__(
        self,
        inputs: ModelInputs,
        *,
        layers: int,
        modules: Sequence[str],
        ensemble: str,
        module_vectors: int,
        cross_rank: int,
        heads: int,
        channels: int,
        bottom_mlp: Sequence[int],
        top_mlp: Sequence[int],
        norm: str = "none",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        dim = inputs.dim
        self.vectors = Vectors(len(inputs.dense), len(inputs.vectors), dim, bottom_mlp)
        makers: dict[str, Callable[[int], nn.Module]] = {
            "dot": lambda count: Dot(count, dim, module_vectors),
            "attention": lambda count: Attention(count, dim, module_vectors, heads),
            "convolution": lambda count: Convolution(count, module_vectors, channels),
            "linear": lambda count: VectorLinear(count, module_vectors),
            "cross": lambda count: Crossed(count, dim, module_vectors, cross_rank),
        }
        # Layers change the number of vectors, so modules are made once the number of their inputs is known.
        count = self.vectors.count
        self.layers = nn.Sequential()
        for _ in range(layers):
            interactions = [makers[name](count) for name in modules]
            layer = DhenLayer(interactions, ENSEMBLES[ensemble](len(modules), module_vectors), count, dim)
            self.layers.append(layer)
            count = layer.count
        widths = [count * dim, *top_mlp]
        self.top = mlp(widths, last_activation=True, norm=norm, dropout=dropout)
        self.head = Logit(widths[-1])

    def last_hidden(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """See ``Ranker.last_hidden``."""
        vectors = self.layers(self.vectors(dense, embeddings))
        hidden: Tensor = self.top(vectors.flatten(1))
        return hidden
