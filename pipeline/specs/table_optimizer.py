"""What a table optimizer says of itself: its kernel, its state, its form on replicas, its columns in checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FLOAT = 4


@dataclass(frozen=True)
class StateColumn:
    """A figure that an optimizer keeps of every row, float32, 0 in a row that was never trained.

    ``name``: its name in checkpoints, for good. ``per_value``: one for each of the row's weights; else one a row,
    which where a table is cut by columns belongs to the cut, and of the whole row is the mean over its columns.
    ``exact``: ``checkpoint.state`` leaves it float32, as a counter needs.
    """

    name: str
    per_value: bool = False
    exact: bool = False


class TableOptimizer(Protocol):
    """How tables learn from the gradients of their lookups; one file each in ``embeddings/optimizers/``.

    ``devices``: those that FBGEMM has its fused kernel for; on the CPU there is none for Adam, LAMB and some others.
    ``columns``: its state, in the order of FBGEMM's ``split_optimizer_states``. ``heat``: the column that grows with
    each lookup of a row, '' where none does: checkpoints keep the rows with most of it in a finer coding.
    ``replica_passes``: how often a step goes over a data-parallel table: its gradient zeroed, scattered, read as often
    as ``update`` does, and the weights written.
    """

    name: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    columns: tuple[StateColumn, ...] = ()
    heat: str = ""
    replica_passes: int

    @abstractmethod
    def fused(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """The class that TorchRec knows FBGEMM's kernel by, and its parameters but the learning rate."""

    @abstractmethod
    def update(self, weights: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, step: int) -> None:
        """Apply ``gradient`` to all rows of a data-parallel table, in place, by the formula of the kernel.

        ``weights``, ``gradient``: [rows, dim]; ``state``: by column, [rows] or [rows, dim]; ``step``: the
        number of this step, from 1.
        """

    def check_device(self, device: str) -> None:
        """ConfigError where no fused kernel applies it on ``device``."""
        if device not in self.devices:
            raise ConfigError(
                f"train.sparse_optimizer={self.name} has no kernel for device {device}, only for "
                f"{' and '.join(self.devices)}",
                hint=f"hardware.device={self.devices[0]}, or another train.sparse_optimizer",
            )

    @property
    def row_bytes(self) -> int:
        """State of a row in bytes, whatever its width."""
        return FLOAT * sum(not column.per_value for column in self.columns)

    @property
    def value_bytes(self) -> int:
        """State of each weight in bytes."""
        return FLOAT * sum(column.per_value for column in self.columns)

    def state_bytes(self, width: int) -> int:
        """State of a row of ``width`` weights in bytes."""
        return self.row_bytes + width * self.value_bytes

    @property
    def fits_ssd(self) -> bool:
        """Whether tables may lie on tier ssd: a record there has room for one figure a row beside the weights."""
        return self.row_bytes <= FLOAT and not self.value_bytes
