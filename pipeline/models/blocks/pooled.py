"""The sum of the events."""

from __future__ import annotations

from torch import Tensor, nn

from pipeline.models.layers import Jagged


class EventSum(nn.Module):
    """forward(events [n, D], their places, target) -> [B, D]."""

    def forward(self, events: Tensor, jagged: Jagged, target: Tensor | None) -> Tensor:
        return jagged.sum(events)
