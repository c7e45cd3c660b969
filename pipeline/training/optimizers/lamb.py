"""LAMB: Adam's step, scaled layer by layer to the norm of the weights (You et al., ICLR'20, algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.specs.dense_optimizer import DenseGroup, DenseOptimizer

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Lamb(DenseOptimizer):
    """For large batches: every layer moves by the same share of its norm. Weight decay is part of the step."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    name = "lamb"
    classes = ("LambSteps",)
    state_values = 2.0

    def build(self, groups: Sequence[DenseGroup], own: Sequence[torch.nn.Parameter] = ()) -> torch.optim.Optimizer:
        """See ``DenseOptimizer.build``."""
        from pipeline.training.optimizers.lamb_steps import LambSteps

        return LambSteps([group.settings() for group in groups], (self.beta1, self.beta2), self.eps)


SPEC = Lamb()
