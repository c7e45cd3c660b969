"""Plain gradient descent: no state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.specs.table_optimizer import TableOptimizer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sgd(TableOptimizer):
    """row -= lr * g."""

    name = "sgd"
    devices = ("cpu", "cuda")
    replica_passes = 5

    def update(self, weights: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, step: int) -> None:
        """See ``TableOptimizer.update``."""
        weights.add_(gradient, alpha=-lr)


SPEC = Sgd()
