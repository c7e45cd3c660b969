"""The protocol of a table optimizer: its kernel, its update of replicas, and its state in memory and checkpoints."""

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
    """A float32 state value of every row, 0 in a row that was never trained.

    ``name``: its permanent name in checkpoints. ``per_value``: one value per weight instead of one per row. If a table
    is cut by columns, a value per row belongs to the cut, and that of the whole row is the mean over the columns.
    ``exact``: stays float32 whatever ``checkpoint.state`` says, as a counter needs.
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
        """ConfigError if FBGEMM has no fused kernel for ``device``."""
        if device not in self.devices:
            raise ConfigError(
                f"train.sparse_optimizer={self.name} has no kernel for device {device}, only for "
                f"{' and '.join(self.devices)}",
                hint=f"hardware.device={self.devices[0]}, or another train.sparse_optimizer",
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of state per row, without those per weight."""
        return FLOAT * sum(not column.per_value for column in self.columns)

    @property
    def value_bytes(self) -> int:
        """Bytes of state per weight."""
        return FLOAT * sum(column.per_value for column in self.columns)

    def state_bytes(self, width: int) -> int:
        """Bytes of state of a row of ``width`` weights."""
        return self.row_bytes + width * self.value_bytes

    @property
    def fits_ssd(self) -> bool:
        """Whether tables can be on tier ssd, whose records have room for one value per row besides the weights."""
        return self.row_bytes <= FLOAT and not self.value_bytes
