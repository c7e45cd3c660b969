"""Attention of a target over events that differ in number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipeline.models.layers import EventWeights, Jagged, mlp


class TargetAttention(nn.Module):
    """forward(events [n, D], their places, target [B, D]) -> [B, D]: the events' sum, weighed by an MLP.

    It takes event, target, their difference and their product (DIN, section 4.3). ``softmax``: the weights of a sample
    add up to one.
    """

    def __init__(self, dim: int, hidden: Sequence[int], *, softmax: bool) -> None:
        super().__init__()
        self.weigh = mlp([4 * dim, *hidden, 1], last_activation=False)
        self.softmax, self.seen = softmax, EventWeights()

    def forward(self, events: Tensor, jagged: Jagged, target: Tensor | None) -> Tensor:
        assert target is not None
        own = jagged.of_samples(target)
        scores = self.weigh(torch.cat([events, own, events - own, events * own], dim=1)).to(events.dtype)
        weights = self.seen(jagged.softmax(scores) if self.softmax else scores)
        return jagged.sum(events * weights)
