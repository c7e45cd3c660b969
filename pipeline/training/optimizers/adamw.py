"""AdamW (Loshchilov and Hutter, ICLR'19), whatever the weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.specs.dense_optimizer import DenseGroup, DenseOptimizer

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class AdamW(DenseOptimizer):
    """Adam with a weight decay that is decoupled from the gradient."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    name = "adamw"
    classes = ("AdamW",)
    state_values = 2.0

    def build(self, groups: Sequence[DenseGroup], own: Sequence[torch.nn.Parameter] = ()) -> torch.optim.Optimizer:
        """See ``DenseOptimizer.build``."""
        import torch

        settings = [group.settings() for group in groups]
        return torch.optim.AdamW(settings, betas=(self.beta1, self.beta2), eps=self.eps, fused=True)


SPEC = AdamW()
