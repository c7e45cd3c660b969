"""Adagrad (Duchi et al., JMLR'11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.specs.dense_optimizer import DenseGroup, DenseOptimizer

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DenseAdagrad(DenseOptimizer):
    """A sum of squared gradients for each parameter; weight decay is added to the gradient."""

    eps: float = 1e-10
    name = "adagrad"
    classes = ("Adagrad",)
    state_values = 1.0

    def build(self, groups: Sequence[DenseGroup], own: Sequence[torch.nn.Parameter] = ()) -> torch.optim.Optimizer:
        """See ``DenseOptimizer.build``. PyTorch's fused kernel exists for the CPU only."""
        import torch

        fused = all(parameter.device.type == "cpu" for group in groups for parameter in group.parameters)
        return torch.optim.Adagrad([group.settings() for group in groups], eps=self.eps, fused=fused)


SPEC = DenseAdagrad()
