"""The protocol of a dense optimizer: how it is built, and its state in memory and in checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

# float32 values of state for each parameter that a plan has room for at least: a plan is the same for all optimizers
# that keep no more.
ORDINARY_STATE = 2.0


@dataclass(frozen=True)
class DenseGroup:
    """Parameters that share a learning rate and a weight decay."""

    parameters: Sequence[torch.nn.Parameter]
    lr: float
    weight_decay: float

    def settings(self) -> dict[str, Any]:
        """The parameter group of a PyTorch optimizer."""
        return {"params": list(self.parameters), "lr": self.lr, "weight_decay": self.weight_decay}


class DenseOptimizer(Protocol):
    """An optimizer of the dense parameters, of ``training/dense_optimizers.py``.

    A spec is a frozen dataclass, whose fields are the settings of ``train.dense_options`` that it uses.

    ``classes``: names of the PyTorch classes that ``build`` may return; checkpoints record them with the state.
    ``state_values``: float32 values of state per parameter. ``lock_free``: threads may update the same parameters and
    state at once, each with an optimizer of its own.
    """

    name: str
    classes: tuple[str, ...]
    state_values: float
    lock_free: bool = True

    @abstractmethod
    def build(self, groups: Sequence[DenseGroup], own: Sequence[torch.nn.Parameter] = ()) -> torch.optim.Optimizer:
        """The optimizer of ``groups``; the schedule sets the learning rates before each step.

        ``own``: parameters whose gradients only some ranks have (towers' modules). All others have equal gradients on
        all ranks, so an optimizer may deal its work on them to the ranks. Its parameter groups are ``groups`` in order.
        """
