"""What an optimizer of the dense part says of itself: how it is built, its state in memory and in checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class DenseOptimizer(Protocol):
    """How the dense parameters learn; one file each in ``training/optimizers/``.

    ``classes``: the PyTorch classes that ``build`` may make, by their names, which checkpoints record with the state
    of each parameter. ``state_values``: float32 values of state for each parameter.
    """

    name: str
    classes: tuple[str, ...]
    state_values: float

    @abstractmethod
    def build(self, parameters: list[torch.nn.Parameter], lr: float, weight_decay: float) -> torch.optim.Optimizer:
        """The optimizer of ``parameters``; the schedule sets its learning rate before each step."""
