"""Plain gradient descent: no state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.specs.table_optimizer import TableOptimizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Sgd(TableOptimizer):
    """row -= lr * g."""

    name = "sgd"
    replica_passes = 5

    def fused(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """See ``TableOptimizer.fused``."""
        from torch.optim import SGD

        return SGD, {}

    def update(self, weights: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, step: int) -> None:
        """See ``TableOptimizer.update``."""
        weights.add_(gradient, alpha=-lr)


SPEC = Sgd()
