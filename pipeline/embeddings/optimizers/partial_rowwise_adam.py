"""Partial row-wise Adam: Adam's first moment for each weight, and one second moment a row (FBGEMM's, on GPUs only).

Like lazy Adam it moves only the rows of a batch, and corrects the bias by the number of all steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.specs.table_optimizer import CompiledStep, StateColumn, TableOptimizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MEAN, SQUARE = "adam_mean", "adam_row_square"


@dataclass(frozen=True)
class PartialRowwiseAdam(TableOptimizer):
    """As ``LazyAdam`` with v = b2 v + (1 - b2) mean(g^2) over the row."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    name = "partial_rowwise_adam"
    devices = ("cuda",)
    columns = (StateColumn(MEAN, per_value=True), StateColumn(SQUARE))
    lazy = True
    replica_passes = 8

    def fused(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """See ``TableOptimizer.fused``."""
        from torchrec.optim import PartialRowWiseAdam

        return PartialRowWiseAdam, {"beta1": self.beta1, "beta2": self.beta2, "eps": self.eps}

    def compiled_step(self, lr: float, step: int) -> CompiledStep | None:
        """See ``TableOptimizer.compiled_step``."""
        new1, new2, unbiased = 1.0 - self.beta1, 1.0 - self.beta2, 1.0 - self.beta2**step
        return CompiledStep("partial_rowwise_adam", (new1, new2, unbiased, self.eps, -lr / (1.0 - self.beta1**step)))

    def update(self, weights: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, step: int) -> None:
        """See ``TableOptimizer.update``."""
        mean, square = state[MEAN], state[SQUARE]
        mean.lerp_(gradient, 1.0 - self.beta1)
        square.lerp_(gradient.square().mean(dim=1), 1.0 - self.beta2)
        spread = square.div(1.0 - self.beta2**step).sqrt_().add_(self.eps)
        weights.addcdiv_(mean, spread[:, None], value=-lr / (1.0 - self.beta1**step))


SPEC = PartialRowwiseAdam()
