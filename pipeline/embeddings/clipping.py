"""Gradient clipping by value for the tables, the same on every tier, sharding and number of ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.embeddings.tables import kernels, table_group


def clip_table_gradients(dmp: DistributedModelParallel, limit: float) -> None:
    """Clamp every value of the gradient that a lookup adds to its rows to [-limit, limit].

    ``limit`` is for the gradient of the mean loss over the global batch. A row that a batch looks up n times can
    therefore move by n times the limit: FBGEMM's own ``gradient_clipping`` means the same, but it reaches fused kernels
    only, and not the data-parallel tables, whose gradient is averaged over the ranks after the lookup.
    """
    ranks = dist.get_world_size(table_group(dmp))
    for kernel in kernels(dmp):
        # What reaches a fused kernel is the mean already; a replica has its own rank's gradient.
        kernel.module.register_forward_hook(_Clip(limit if kernel.fused else limit * ranks))


class _Clip:
    """The hook: clamps the gradient of a kernel's output before the kernel sees it."""

    def __init__(self, limit: float) -> None:
        self._limit = limit

    def __call__(self, module: Any, args: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient.clamp(-self._limit, self._limit))
