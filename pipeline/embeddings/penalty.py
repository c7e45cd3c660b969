"""L2 on the embeddings that a batch looks up, through their gradient: alike for every tier, sharding and optimizer."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


class _Penalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(embeddings, factors)
        return embeddings.view_as(embeddings)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        embeddings, factors = ctx.saved_tensors
        return torch.addcmul(grads[0], embeddings, factors.view(-1, *[1] * (embeddings.dim() - 1))), None


def penalised(embeddings: Tensor, factors: Tensor) -> Tensor:
    """``embeddings`` as they are; backward, each gets the gradient of factor [B] / 2 times its squared norm.

    They are [B, F, D], or side by side [B, sum of widths].
    The penalty reaches the rows that a batch looks up, whatever holds and trains them, and is not part of the loss
    that is reported. Of an embedding that is a sum of several rows, the sum is penalised.
    """
    return cast(Tensor, _Penalised.apply(embeddings, factors))
