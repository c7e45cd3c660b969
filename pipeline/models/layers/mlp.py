"""Parts that most rankers share: the MLP, the layer that gives the logit, and initial values drawn from a seed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Ranker(nn.Module, ABC):
    """What a model's ``build`` returns: forward(dense [B, n], embeddings [B, V, D]) -> logits [B] in float32."""

    @abstractmethod
    def start_at(self, logit: float) -> None:
        """Set the last bias, so that an untrained model's logits are near ``logit``."""


class Logit(nn.Linear):
    """forward(hidden [B, width]) -> logits [B], computed in float32 under autocast too."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        # The meta device, on which a model's FLOP are counted, has no autocast.
        with torch.autocast("cpu" if hidden.is_meta else hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.float(), self.weight, self.bias).squeeze(1)

    @torch.no_grad()
    def start_at(self, logit: float) -> None:
        """Set the bias to ``logit``."""
        self.bias.fill_(logit)


def mlp(widths: Sequence[int], *, last_activation: bool) -> nn.Sequential:
    """Linear layers from ``widths[0]`` through ``widths[-1]`` with ReLU between them."""
    layers: list[nn.Module] = []
    for i in range(len(widths) - 1):
        layers.append(nn.Linear(widths[i], widths[i + 1]))
        if last_activation or i < len(widths) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def compute_dtype(like: Tensor) -> torch.dtype:
    """The dtype of products with ``like``: autocast's where it is enabled, else its own."""
    if like.is_meta:
        return like.dtype
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype


def log_odds(rate: float, rows: int) -> float:
    """The logit of ``rate``, a share of ``rows``, estimated as (clicks + 1/2) / (rows + 1), so that 0 and 1 are finite.

    Krichevsky and Trofimov (1981).
    """
    clicks = rate * rows
    return math.log((clicks + 0.5) / (rows - clicks + 0.5))


def initialise(module: nn.Module, seed: int) -> None:
    """Draw every linear layer from ``seed`` alone: weights N(0, 2 / (in + out)), biases N(0, 1 / out), in module order.

    The global random state is neither read nor changed.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                spread = math.sqrt(2.0 / (layer.in_features + layer.out_features))
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) * spread)
                layer.bias.copy_(torch.randn(layer.bias.shape, generator=generator) / math.sqrt(layer.out_features))
