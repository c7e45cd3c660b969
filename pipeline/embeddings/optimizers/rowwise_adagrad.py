"""Row-wise Adagrad: one sum of squared gradients a row (Duchi et al., JMLR'11; Gupta et al., 2014)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.specs.table_optimizer import StateColumn, TableOptimizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SUM = "adagrad_sum"


@dataclass(frozen=True)
class RowwiseAdagrad(TableOptimizer):
    """sum += mean(g^2) over the row; row -= lr * g / (sqrt(sum) + eps)."""

    eps: float = 1e-8
    name = "rowwise_adagrad"
    devices = ("cpu", "cuda")
    columns = (StateColumn(SUM),)
    heat = SUM
    compiled = "adagrad"
    replica_passes = 6

    def fused(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """See ``TableOptimizer.fused``."""
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

        return RowWiseAdagrad, {"eps": self.eps}

    def update(self, weights: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, step: int) -> None:
        """See ``TableOptimizer.update``."""
        sums = state[SUM].add_(gradient.square().mean(dim=1))
        scale = sums.sqrt().add_(self.eps).reciprocal_().mul_(lr)
        weights.addcmul_(gradient, scale[:, None], value=-1.0)


SPEC = RowwiseAdagrad()
