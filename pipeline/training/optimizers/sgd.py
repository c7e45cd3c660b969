"""Gradient descent with momentum (Sutskever et al., ICML'13)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.specs.dense_optimizer import DenseGroup, DenseOptimizer

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DenseSgd(DenseOptimizer):
    """A velocity for each parameter; weight decay is added to the gradient. ``nesterov``: looks a step ahead."""

    momentum: float = 0.9
    nesterov: bool = False
    name = "sgd"
    classes = ("SGD",)
    state_values = 1.0

    def build(self, groups: Sequence[DenseGroup], own: Sequence[torch.nn.Parameter] = ()) -> torch.optim.Optimizer:
        """See ``DenseOptimizer.build``."""
        import torch

        settings = [group.settings() for group in groups]
        nesterov = self.nesterov and self.momentum > 0
        return torch.optim.SGD(settings, momentum=self.momentum, nesterov=nesterov, fused=True)


SPEC = DenseSgd()
