"""FTRL-proximal: Adagrad's rates, and weights of exactly 0 by L1 (McMahan et al., KDD'13, algorithm 1).

The paper computes a weight from its state z and n at the rate alpha. Here the rate follows a schedule, and a weight
starts from an initial value, so the weight itself is part of the state: z is what gives the weight at this step's rate,
and its column counts only where the weight is 0. At a constant rate, from weights 0, that is the paper's algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.specs.table_optimizer import CompiledStep, StateColumn, TableOptimizer

if TYPE_CHECKING:
    from torch import Tensor

Z, N = "ftrl_z", "ftrl_n"


@dataclass(frozen=True)
class Ftrl(TableOptimizer):
    """z += g - w (sqrt(n + g^2) - sqrt(n)) / lr; n += g^2; w = -(z - sign(z) l1) / ((beta + sqrt(n)) / lr + l2).

    w is 0 where abs(z) <= l1. ``l1``, ``l2``, ``beta`` are on the scale of the gradient of the mean loss of a batch.
    """

    l1: float = 0.0
    l2: float = 0.0
    beta: float = 1e-8
    name = "ftrl"
    columns = (StateColumn(Z, per_value=True), StateColumn(N, per_value=True))
    heat = N
    lazy = True
    replica_passes = 10

    def compiled_step(self, lr: float, step: int) -> CompiledStep | None:
        """See ``TableOptimizer.compiled_step``."""
        return CompiledStep("ftrl", (lr, self.l1, self.l2, self.beta, -1.0 / lr)) if lr else None

    def update(self, weights: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, step: int) -> None:
        """See ``TableOptimizer.update``. At a rate of 0 nothing moves."""
        if lr == 0.0:
            return
        z, n = state[Z], state[N]
        before = n.sqrt()
        n.addcmul_(gradient, gradient)
        after = n.sqrt()
        curvature = (before + self.beta).div_(lr).add_(self.l2)
        implied = weights.mul(curvature).add_(weights.sign(), alpha=self.l1).neg_()
        z.copy_(implied.where(weights != 0, z))
        z.add_(gradient).addcmul_(weights, after - before, value=-1.0 / lr)
        shrunk = z.sign().mul_((z.abs() - self.l1).clamp_(min=0.0))
        weights.copy_(shrunk.div_((after + self.beta).div_(lr).add_(self.l2)).neg_())


SPEC = Ftrl()
