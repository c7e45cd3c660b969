"""Online max-normalisation with a trainable bias, as in Twitter's sparse linear layer (2020): a layer before the model.

norm(V_i) = V_i / running max |V_i| + b_i, and 0 for a missing value, so that b_i separates it from a zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


class MaxNorm(nn.Module):
    """forward(dense [B, n]) -> [B, n]: ``columns`` normalised, the others as they are; NaN is a missing value.

    ``largest`` is a parameter without a gradient, so that checkpoints have it; it grows in training only. ``combine``
    reduces the maxima of all ranks to one.
    """

    columns: Tensor

    def __init__(self, columns: Sequence[int], combine: Callable[[Tensor], Tensor] = lambda values: values) -> None:
        super().__init__()
        self.register_buffer("columns", torch.tensor(list(columns), dtype=torch.int64), persistent=False)
        self.largest = nn.Parameter(torch.zeros(len(columns)), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(len(columns)))
        self.combine = combine

    def forward(self, dense: Tensor) -> Tensor:
        picked = dense[:, self.columns]
        present = ~torch.isnan(picked)
        values = torch.where(present, picked, 0.0)
        if self.training:
            with torch.no_grad():
                seen = values.abs().amax(0) if len(values) else torch.zeros_like(self.largest)
                self.largest.copy_(torch.maximum(self.largest, self.combine(seen)))
        scaled = values / self.largest.clamp(min=torch.finfo(torch.float32).tiny)
        return dense.index_copy(1, self.columns, torch.where(present, scaled + self.bias, 0.0))
