"""Adagrad (Duchi et al., JMLR'11)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.specs.dense_optimizer import DenseOptimizer

if TYPE_CHECKING:
    import torch


class Adagrad(DenseOptimizer):
    """A sum of squared gradients for each parameter; weight decay is added to the gradient."""

    name = "adagrad"
    classes = ("Adagrad",)
    state_values = 1.0

    def build(self, parameters: list[torch.nn.Parameter], lr: float, weight_decay: float) -> torch.optim.Optimizer:
        """See ``DenseOptimizer.build``. PyTorch's fused kernel exists for the CPU only."""
        import torch

        fused = all(parameter.device.type == "cpu" for parameter in parameters)
        return torch.optim.Adagrad(parameters, lr=lr, weight_decay=weight_decay, fused=fused)


SPEC = Adagrad()
