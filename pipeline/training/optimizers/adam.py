"""Adam (Kingma and Ba, ICLR'15); AdamW (Loshchilov and Hutter, ICLR'19) where weight decay is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.specs.dense_optimizer import DenseOptimizer

if TYPE_CHECKING:
    import torch


class Adam(DenseOptimizer):
    """Two moments for each parameter; weight decay is decoupled from the gradient."""

    name = "adam"
    classes = ("Adam", "AdamW")
    state_values = 2.0

    def build(self, parameters: list[torch.nn.Parameter], lr: float, weight_decay: float) -> torch.optim.Optimizer:
        """See ``DenseOptimizer.build``."""
        import torch

        if weight_decay:
            return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, fused=True)
        return torch.optim.Adam(parameters, lr=lr, fused=True)


SPEC = Adam()
