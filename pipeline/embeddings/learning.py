"""The optimizer of the tables TorchRec cannot fuse it into, and the learning rate of all tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.embeddings.collection import ADAGRAD_EPS
from pipeline.embeddings.tables import ADAGRAD_SUM, kernels


class DenseTableAdagrad(torch.optim.Optimizer):
    """Row-wise Adagrad over the data-parallel tables, the same formula as FBGEMM's fused one.

    sum += mean(g^2) per row; row -= lr * g / (sqrt(sum) + eps). Data-parallel tables are ordinary
    parameters to TorchRec: their gradient is dense and averaged over the ranks, so ``step`` costs
    O(rows * dim) and must be called after each backward pass. The sums lie on the kernel, where
    ``RowAccess`` reads them; ``state_dict`` holds none.
    """

    def __init__(self, modules: list[Any], lr: float) -> None:
        self._parts: list[tuple[Tensor, Tensor]] = []
        for module in modules:
            dims = {dim for _, dim in module.embedding_specs}
            if len(dims) != 1:
                raise ValueError(f"tables of one kernel have widths {sorted(dims)}, expected one width")
            rows = sum(rows for rows, _ in module.embedding_specs)
            setattr(module, ADAGRAD_SUM, torch.zeros(rows, device=module.weights.device))
            self._parts.append((module.weights, getattr(module, ADAGRAD_SUM)))
        super().__init__([weights for weights, _ in self._parts], {"lr": lr, "eps": ADAGRAD_EPS})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply the gradients of the last backward pass."""
        lr, eps = self.param_groups[0]["lr"], self.param_groups[0]["eps"]
        for weights, sums in self._parts:
            if weights.grad is not None:
                grad = weights.grad.view(len(sums), -1)
                sums.add_(grad.square().mean(dim=1))
                scale = sums.sqrt().add_(eps).reciprocal_().mul_(lr)
                weights.view_as(grad).addcmul_(grad, scale[:, None], value=-1.0)


def make_dense_optimizer(modules: list[Any], lr: float, *, adagrad: bool) -> torch.optim.Optimizer:
    """Row-wise Adagrad or SGD for the data-parallel tables of ``modules``."""
    return DenseTableAdagrad(modules, lr) if adagrad else torch.optim.SGD([m.weights for m in modules], lr=lr)


def dense_table_optimizer(dmp: DistributedModelParallel) -> torch.optim.Optimizer | None:
    """The optimizer of the data-parallel tables that ``shard_model`` made; None where there are none.

    The training loop calls its ``zero_grad`` and ``step`` beside those of the dense part.
    """
    return getattr(dmp, "dense_tables", None)


def set_sparse_lr(dmp: DistributedModelParallel, lr: float) -> None:
    """Set the learning rate of all tables, fused or not, from the next backward pass on.

    Writing ``param_groups`` of the fused optimizer alone reaches the kernel only at its next
    ``zero_grad`` or ``step``; writing the kernel alone is undone there. So both are written.
    """
    for group in dmp.fused_optimizer.param_groups:
        group["lr"] = lr
    for kernel in kernels(dmp):
        if kernel.fused:
            kernel.module.set_learning_rate(lr)
    dense = dense_table_optimizer(dmp)
    if dense is not None:
        dense.param_groups[0]["lr"] = lr
