"""The fusion of two streams by a bilinear form of several heads (FinalMLP, arXiv 2304.00902, section 3.3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.models.layers.mlp import Logit


class BilinearLogit(nn.Module):
    """forward(a [B, m], b [B, k]) -> logits [B] in float32: bias + w1 a + w2 b + sum over heads of a_h^T W_h b_h.

    ``heads`` divides both widths.
    """

    def __init__(self, first: int, second: int, heads: int) -> None:
        super().__init__()
        self.sizes = first // heads, second // heads
        self.linear = Logit(first + second)
        self.heads = nn.ModuleList(nn.Linear(self.sizes[1], self.sizes[0], bias=False) for _ in range(heads))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        logits: Tensor = self.linear(torch.cat([first, second], dim=1))
        pairs = zip(self.heads, first.split(self.sizes[0], 1), second.split(self.sizes[1], 1), strict=True)
        for head, one, other in pairs:
            logits = logits + (one * head(other)).sum(1)
        return logits

    def start_at(self, logit: float) -> None:
        """Set the bias to ``logit``."""
        self.linear.start_at(logit)
