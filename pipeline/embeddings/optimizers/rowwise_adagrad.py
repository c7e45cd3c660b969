"""Row-wise Adagrad: one sum of squared gradients a row (Duchi et al., JMLR'11; Gupta et al., 2014)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.specs.table_optimizer import StateColumn, TableOptimizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

EPS = 1e-8
SUM = "adagrad_sum"


class RowwiseAdagrad(TableOptimizer):
    """sum += mean(g^2) over the row; row -= lr * g / (sqrt(sum) + eps)."""

    name = "rowwise_adagrad"
    columns = (StateColumn(SUM),)
    heat = SUM
    replica_passes = 6

    def fused(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """See ``TableOptimizer.fused``."""
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

        return RowWiseAdagrad, {"eps": EPS}

    def update(self, weights: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, step: int) -> None:
        """See ``TableOptimizer.update``."""
        sums = state[SUM].add_(gradient.square().mean(dim=1))
        scale = sums.sqrt().add_(EPS).reciprocal_().mul_(lr)
        weights.addcmul_(gradient, scale[:, None], value=-1.0)


SPEC = RowwiseAdagrad()
