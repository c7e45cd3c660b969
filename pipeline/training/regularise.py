"""What regularises a model over several ranks: statistics of all of them, and seeds of dropout."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.models.layers.mlp import BatchNorm, MaxNorm


class _SumOfRanks(torch.autograd.Function):
    """The sum of a tensor over a group's ranks; the loss of each depends on it, so the gradients add up as well."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group, total = group, values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


@torch.compiler.disable
def sum_of_ranks(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """``values`` added up over the ranks of ``group`` (None: all), differentiably.

    Collective, in the backward pass too.
    """
    return cast(Tensor, _SumOfRanks.apply(values, group))


@torch.compiler.disable
def largest_of_ranks(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The elementwise maximum over the ranks of ``group`` (None: all), in place. Collective where there are several."""
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    return values


def synchronise(ranking: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Have the layers of ``ranking`` that look at a whole batch look at that of all ranks of ``group`` (None: all)."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for layer in ranking.modules():
        if isinstance(layer, BatchNorm):
            layer.combine = partial(sum_of_ranks, group=group)
        elif isinstance(layer, MaxNorm):
            layer.combine = partial(largest_of_ranks, group=group)


def seed_step(seed: int, step: int) -> None:
    """Make what this rank draws in training step ``step`` a function of (seed, rank, step): a resumed run draws alike.

    Sets the global random state of all devices that this process uses.
    """
    mixed = np.random.SeedSequence([seed, dist.get_rank(), step])
    # Without CUDA, torch.manual_seed would take a millisecond a step to note from where it was called.
    set_state = torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed
    set_state(int(mixed.generate_state(1, np.uint64)[0] >> 1))
