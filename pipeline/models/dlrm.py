"""DLRM (Naumov et al. 2019): bottom MLP, dot interaction, top MLP. Pure torch, no distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipeline.models.interaction import DotInteraction


def mlp(widths: Sequence[int], *, last_activation: bool) -> nn.Sequential:
    """Linear layers from ``widths[0]`` through ``widths[-1]`` with ReLU between them."""
    layers: list[nn.Module] = []
    for i in range(len(widths) - 1):
        layers.append(nn.Linear(widths[i], widths[i + 1]))
        if last_activation or i < len(widths) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class Dlrm(nn.Module):
    """forward(dense [B, n], embeddings [B, F, D]) -> logits [B] in float32.

    With ``dense`` 0 there is no bottom MLP and the first embedding takes the place of its output
    beside the dot products; the ``dense`` argument of forward is then [B, 0] and is not read.
    """

    def __init__(self, *, dense: int, tables: int, dim: int, bottom: Sequence[int], top: Sequence[int]) -> None:
        super().__init__()
        vectors = tables + (dense > 0)
        self.bottom = mlp([dense, *bottom, dim], last_activation=True) if dense else None
        self.interaction = DotInteraction(vectors, dim)
        widths = [self.interaction.width, *top]
        self.top = mlp(widths, last_activation=True)
        self.head = nn.Linear(widths[-1], 1)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Logits [B], float32 whatever the autocast dtype of the layers before is."""
        if self.bottom is not None:
            first = self.bottom(dense)
            vectors = torch.cat([first[:, None], embeddings.to(first.dtype)], dim=1)
        else:
            vectors = embeddings.to(_compute_dtype(embeddings))
        hidden = self.top(self.interaction(vectors))
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.float(), self.head.weight, self.head.bias).squeeze(1)

    @torch.no_grad()
    def start_at(self, logit: float) -> None:
        """Set the last layer's bias, so that an untrained model's logits lie around ``logit``."""
        self.head.bias.fill_(logit)


def _compute_dtype(like: Tensor) -> torch.dtype:
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype


def log_odds(rate: float, rows: int) -> float:
    """The logit of ``rate``, a share of ``rows``; finite for 0 and 1, where half a row more is taken to be the other.

    Krichevsky and Trofimov (1981): (clicks + 1/2) / (rows + 1).
    """
    clicks = rate * rows
    return math.log((clicks + 0.5) / (rows - clicks + 0.5))


def initialise(module: nn.Module, seed: int) -> None:
    """Draw every linear layer from ``seed`` alone: weights N(0, 2 / (in + out)), biases N(0, 1 / out), in module order.

    The global random state is neither read nor moved.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                spread = math.sqrt(2.0 / (layer.in_features + layer.out_features))
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) * spread)
                layer.bias.copy_(torch.randn(layer.bias.shape, generator=generator) / math.sqrt(layer.out_features))
