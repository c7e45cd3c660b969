"""Gradient clipping by value for the tables, the same on every tier, sharding and number of ranks."""

from __future__ import annotations

from functools import partial
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
        # The gradient that reaches a fused kernel is the mean already; a replica has the gradient of its own rank.
        kernel.module.register_forward_hook(partial(_clip, limit if kernel.fused else limit * ranks))


def _clip(limit: float, module: Any, args: tuple[Any, ...], output: Tensor) -> None:
    """The hook: clamps the gradient of a kernel's output before the kernel sees it."""
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient.clamp(-limit, limit))
