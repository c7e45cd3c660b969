"""What regularises a model over several ranks: statistics of all of them, and seeds of dropout."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.models.layers import BatchNorm, MaxNorm


class _SumOfRanks(torch.autograd.Function):
    """The sum of a tensor over all ranks; each rank's loss depends on it, so the gradients add up as well."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].clone()
        dist.all_reduce(total)
        return total


@torch.compiler.disable
def sum_of_ranks(values: Tensor) -> Tensor:
    """``values`` added up over all ranks, differentiably. Collective, in the backward pass too."""
    return cast(Tensor, _SumOfRanks.apply(values))


@torch.compiler.disable
def largest_of_ranks(values: Tensor) -> Tensor:
    """The elementwise maximum over all ranks, in place. Collective where there are several."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX)
    return values


def synchronise(ranking: nn.Module) -> None:
    """Have the layers of ``ranking`` that look at a whole batch look at that of all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for layer in ranking.modules():
        if isinstance(layer, BatchNorm):
            layer.combine = sum_of_ranks
        elif isinstance(layer, MaxNorm):
            layer.combine = largest_of_ranks


def seed_step(seed: int, step: int) -> None:
    """Make what this rank draws in training step ``step`` a function of (seed, rank, step): a resumed run draws alike.

    Sets the global random state of all devices.
    """
    mixed = np.random.SeedSequence([seed, dist.get_rank(), step])
    torch.manual_seed(int(mixed.generate_state(1, np.uint64)[0] >> 1))
