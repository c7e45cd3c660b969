"""Adam (Kingma and Ba, ICLR'15); AdamW (Loshchilov and Hutter, ICLR'19) where weight decay is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.specs.dense_optimizer import DenseGroup, DenseOptimizer

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Adam(DenseOptimizer):
    """Two moments for each parameter; weight decay is decoupled from the gradient."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    name = "adam"
    classes = ("Adam", "AdamW")
    state_values = 2.0

    def build(self, groups: Sequence[DenseGroup], own: Sequence[torch.nn.Parameter] = ()) -> torch.optim.Optimizer:
        """See ``DenseOptimizer.build``."""
        import torch

        kind = torch.optim.AdamW if any(group.weight_decay for group in groups) else torch.optim.Adam
        betas = (self.beta1, self.beta2)
        return kind([group.settings() for group in groups], betas=betas, eps=self.eps, fused=True)


SPEC = Adam()
