"""The protocol of a dense optimizer: how it is built, and its state in memory and in checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class DenseOptimizer(Protocol):
    """An optimizer of the dense parameters, one file in ``training/optimizers/``.

    ``classes``: names of the PyTorch classes that ``build`` may return; checkpoints record them with the state.
    ``state_values``: float32 values of state per parameter.
    """

    name: str
    classes: tuple[str, ...]
    state_values: float

    @abstractmethod
    def build(self, parameters: list[torch.nn.Parameter], lr: float, weight_decay: float) -> torch.optim.Optimizer:
        """Build the optimizer of ``parameters``. The schedule sets its learning rate before each step."""
