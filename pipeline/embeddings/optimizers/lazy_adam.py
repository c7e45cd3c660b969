"""Lazy Adam: Adam (Kingma and Ba, ICLR'15) of which only the rows of a batch take a step, as in TensorFlow's LazyAdam.

The moments of other rows stay as they are. The bias is corrected by the number of all steps. FBGEMM has it on GPUs
only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.specs.table_optimizer import CompiledStep, StateColumn, TableOptimizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MEAN, SQUARE = "adam_mean", "adam_square"


@dataclass(frozen=True)
class LazyAdam(TableOptimizer):
    """m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; row -= lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps).

    That is PyTorch's SparseAdam. FBGEMM's kernel adds eps to the corrected sqrt(v).
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    name = "lazy_adam"
    devices = ("cuda",)
    columns = (StateColumn(MEAN, per_value=True), StateColumn(SQUARE, per_value=True))
    lazy = True
    replica_passes = 9

    def fused(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """See ``TableOptimizer.fused``."""
        from torch.optim import Adam

        return Adam, {"beta1": self.beta1, "beta2": self.beta2, "eps": self.eps}

    def compiled_step(self, lr: float, step: int) -> CompiledStep | None:
        """See ``TableOptimizer.compiled_step``."""
        new1, new2 = 1.0 - self.beta1, 1.0 - self.beta2
        return CompiledStep("lazy_adam", (new1, self.beta2, new2, self.eps, -lr * self._correction(step)))

    def update(self, weights: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, step: int) -> None:
        """See ``TableOptimizer.update``."""
        mean, square = state[MEAN], state[SQUARE]
        mean.lerp_(gradient, 1.0 - self.beta1)
        square.mul_(self.beta2).addcmul_(gradient, gradient, value=1.0 - self.beta2)
        weights.addcdiv_(mean, square.sqrt().add_(self.eps), value=-lr * self._correction(step))

    def _correction(self, step: int) -> float:
        return float((1.0 - self.beta2**step) ** 0.5) / (1.0 - self.beta1**step)


SPEC = LazyAdam()
