"""The choice ``shampoo`` of ``train.dense_optimizer``: its options. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.specs.optimizers import DenseOptimizer, ParameterGroup

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Shampoo(DenseOptimizer):
    """Distributed Shampoo (Gupta et al., ICML'18; Shi et al., arXiv 2309.06497): gradients preconditioned by matrices.

    L^-1/4 G R^-1/4 by blocks of each layer, as long as Adagrad's or Adam's step of the block; decoupled decay.

    ``shampoo_steps.py`` has the formulas. ``beta2`` 1: L and R are sums over all steps; below, means of recent ones.
    """

    beta1: float = 0.9
    beta2: float = 1.0
    eps: float = 1e-6
    block_size: int = 64
    factor_every: int = 4
    root_every: int = 100
    start_step: int = 20
    grafting: str = "adagrad"
    name = "shampoo"
    classes = ("ShampooSteps",)
    # float32 values per parameter, with square blocks: two factors in float64 and their roots, a mean of gradients
    # and a sum of their squares.
    state_values = 8.0
    lock_free = False

    def build(self, groups: Sequence[ParameterGroup], own: Sequence[torch.nn.Parameter] = ()) -> torch.optim.Optimizer:
        from pipeline.plugins.shampoo.shampoo_steps import Formula, ShampooSteps

        formula = Formula(
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            factor_every=self.factor_every,
            root_every=self.root_every,
            start_step=self.start_step,
            grafting=self.grafting,
        )
        return ShampooSteps([group.settings() for group in groups], formula, self.block_size, own)


SHAMPOO = Shampoo()
