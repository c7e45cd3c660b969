"""Adagrad: a sum of squared gradients for each weight (Duchi et al., JMLR'11)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.specs.table_optimizer import CompiledStep, StateColumn, TableOptimizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SUM = "squares"


@dataclass(frozen=True)
class Adagrad(TableOptimizer):
    """sum += g^2; row -= lr * g / (sqrt(sum) + eps), for each weight of the row."""

    eps: float = 1e-8
    name = "adagrad"
    devices = ("cpu", "cuda")
    columns = (StateColumn(SUM, per_value=True),)
    heat = SUM
    replica_passes = 7

    def fused(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """See ``TableOptimizer.fused``."""
        from torch.optim import Adagrad as Kernel

        return Kernel, {"eps": self.eps}

    def compiled_step(self, lr: float, step: int) -> CompiledStep | None:
        """See ``TableOptimizer.compiled_step``."""
        return CompiledStep("adagrad", (self.eps, -lr))

    def update(self, weights: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, step: int) -> None:
        """See ``TableOptimizer.update``."""
        sums = state[SUM].addcmul_(gradient, gradient)
        weights.addcdiv_(gradient, sums.sqrt().add_(self.eps), value=-lr)


SPEC = Adagrad()
