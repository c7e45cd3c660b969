"""The module of DHEN (Zhang et al. 2022, arXiv 2203.11014, section 3): layers of ensembles of interactions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pipeline.models.layers.interaction import DotInteraction, LowRankCross, VectorLinear, Vectors
from pipeline.models.layers.jagged import SelfAttention
from pipeline.models.layers.mlp import HeadedRanker, Logit, top_mlp
from pipeline.specs.model import ModelInputs

if TYPE_CHECKING:
    from pipeline.models.settings import DhenConfig


class Dot(nn.Module):
    """[B, m, D] -> [B, l, D]: the dot products of all pairs, and a linear layer on them (advanced DLRM)."""

    def __init__(self, count: int, dim: int, config: DhenConfig) -> None:
        super().__init__()
        self.shape = config.module_vectors, dim
        self.interaction = DotInteraction(count, dim)
        self.linear = nn.Linear(self.interaction.width, config.module_vectors * dim)

    def forward(self, vectors: Tensor) -> Tensor:
        result: Tensor = self.linear(self.interaction(vectors)).unflatten(1, self.shape)
        return result


class Attention(nn.Sequential):
    """[B, m, D] -> [B, l, D]: a layer of a transformer's encoder, and a linear layer over the vectors."""

    def __init__(self, count: int, dim: int, config: DhenConfig) -> None:
        config.check_heads("model", dim)
        super().__init__(SelfAttention(dim, config.heads), VectorLinear(count, config.module_vectors))


class Convolution(nn.Module):
    """[B, m, D] -> [B, l, D]: a 3 x 3 convolution over the vectors as an image, and a linear layer over its rows."""

    def __init__(self, count: int, dim: int, config: DhenConfig) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, config.channels, 3, padding=1)
        self.linear = VectorLinear(config.channels * count, config.module_vectors)

    def forward(self, vectors: Tensor) -> Tensor:
        result: Tensor = self.linear(self.convolution(vectors[:, None]).flatten(1, 2))
        return result


class Mixed(VectorLinear):
    """[B, m, D] -> [B, l, D]: a linear layer over the vectors."""

    def __init__(self, count: int, dim: int, config: DhenConfig) -> None:
        super().__init__(count, config.module_vectors)


class Crossed(nn.Module):
    """[B, m, D] -> [B, l, D]: a cross layer on the flattened vectors, and a linear layer over them."""

    def __init__(self, count: int, dim: int, config: DhenConfig) -> None:
        super().__init__()
        self.cross = LowRankCross(count * dim, config.cross_rank)
        self.linear = VectorLinear(count, config.module_vectors)

    def forward(self, vectors: Tensor) -> Tensor:
        flat = vectors.flatten(1)
        result: Tensor = self.linear(self.cross(flat, flat).view_as(vectors))
        return result


MODULES: dict[str, Callable[[int, int, DhenConfig], nn.Module]] = {
    "dot": Dot,
    "attention": Attention,
    "convolution": Convolution,
    "linear": Mixed,
    "cross": Crossed,
}


class Joined(nn.Module):
    """Ensemble ``concat``: [B, l, D] of each module side by side; ``count`` vectors come out."""

    def __init__(self, modules: int, vectors: int) -> None:
        super().__init__()
        self.count = modules * vectors

    def forward(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, dim=1)


class Summed(nn.Module):
    """Ensemble ``sum``."""

    def __init__(self, modules: int, vectors: int) -> None:
        super().__init__()
        self.count = vectors

    def forward(self, parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).sum(0)


class Weighted(nn.Module):
    """Ensemble ``weighted_sum``: a learnt weight for each module."""

    def __init__(self, modules: int, vectors: int) -> None:
        super().__init__()
        self.count = vectors
        self.weights = nn.Parameter(torch.ones(modules))

    def forward(self, parts: list[Tensor]) -> Tensor:
        return (torch.stack(parts) * self.weights[:, None, None, None]).sum(0)


ENSEMBLES: dict[str, Callable[[int, int], nn.Module]] = {"concat": Joined, "sum": Summed, "weighted_sum": Weighted}


class DhenLayer(nn.Module):
    """[B, m, D] -> [B, count, D]: LN(Ensemble_i Interaction_i(X) + Shortcut(X)) (equations 1 to 3).

    The shortcut is X itself, or W X where the number of vectors changes.
    """

    def __init__(self, count: int, dim: int, config: DhenConfig) -> None:
        super().__init__()
        self.interactions = nn.ModuleList(MODULES[name](count, dim, config) for name in config.modules)
        self.ensemble = ENSEMBLES[config.ensemble](len(config.modules), config.module_vectors)
        self.count: int = self.ensemble.count  # type: ignore[assignment]
        self.shortcut = nn.Identity() if count == self.count else VectorLinear(count, self.count)
        self.norm = nn.LayerNorm(dim)

    def forward(self, vectors: Tensor) -> Tensor:
        joined = self.ensemble([interaction(vectors) for interaction in self.interactions])
        result: Tensor = self.norm(joined + self.shortcut(vectors))
        return result


class Dhen(HeadedRanker):
    """forward(dense [B, n], embeddings [B, V, D]) -> logits [B] in float32."""

    def __init__(self, config: DhenConfig, inputs: ModelInputs) -> None:
        super().__init__()
        self.vectors = Vectors(len(inputs.dense), len(inputs.vectors), inputs.dim, config.bottom_mlp)
        count, layers = self.vectors.count, []
        for _ in range(config.layers):
            layers.append(DhenLayer(count, inputs.dim, config))
            count = layers[-1].count
        self.layers = nn.Sequential(*layers)
        self.top, width = top_mlp(count * inputs.dim, config)
        self.head = Logit(width)

    def last_hidden(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """See ``Ranker.last_hidden``."""
        vectors = self.layers(self.vectors(dense, embeddings))
        hidden: Tensor = self.top(vectors.flatten(1))
        return hidden
