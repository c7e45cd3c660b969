"""The protocols of the optimizers of tables and of the dense part: formula, state in memory and in checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.core.registry import Registry

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


@dataclass(frozen=True)
class CompiledStep:
    """A step by a compiled formula: its name in the kernels ``rowsteps``, and its figures in their order."""

    formula: str
    settings: tuple[float, ...]


class TableOptimizer(Protocol):
    """How tables learn from the gradients of their lookups: ``embeddings/table_optimizers.py``.

    A spec is a frozen dataclass, whose fields are the settings of ``train.sparse_options`` that it uses.

    ``devices``: those that FBGEMM has a fused kernel of it for. On the others ``update`` gets the rows that a batch
    touched. ``columns``: its state, in the order of FBGEMM's ``split_optimizer_states``. ``heat``: the column that
    grows with each lookup of a row, '' where none does: checkpoints keep the rows with most of it in a finer coding.
    ``lazy``: its formula would move a row even by a gradient of 0, as moments do, so ``update`` must get rows with
    another gradient alone.
    ``frozen``: rows never change. ``whole_rows``: an update needs all columns of a row.
    ``compiled``: the method of the compiled kernels' tables (``steps``) that applies it, '' where there is none.
    ``replica_passes``: how often a step goes over a data-parallel table: its gradient zeroed, scattered, read as often
    as ``update`` does, and the weights written.
    """

    name: str
    devices: tuple[str, ...] = ()
    columns: tuple[StateColumn, ...] = ()
    heat: str = ""
    lazy: bool = False
    frozen: bool = False
    whole_rows: bool = False
    compiled: str = ""
    replica_passes: int

    def fused(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """Return the class by which TorchRec knows FBGEMM's kernel, and its parameters except the learning rate.

        By default this is SGD's, whose kernel keeps no state besides that of ``columns``.
        """
        # Imported here, because specs are loaded to check a configuration, which should not wait for torch.
        from torch.optim import SGD

        return SGD, {}

    def compiled_step(self, lr: float, step: int) -> CompiledStep | None:
        """Return the compiled formula that does what ``update`` does on rows in CPU memory; None if there is none."""
        return None

    @abstractmethod
    def update(self, weights: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, step: int) -> None:
        """Apply ``gradient`` to the rows given, in place, by the formula of the kernel.

        ``weights``, ``gradient``: [rows, dim]; ``state``: by column, [rows] or [rows, dim]; ``step``: the
        number of this step, from 1.
        """

    def fused_on(self, device: str) -> bool:
        """Whether a kernel of FBGEMM applies it on ``device``, inside the backward pass."""
        return device in self.devices

    def tiers_on(self, device: str, tiers: tuple[str, ...]) -> tuple[str, ...]:
        """Return those of ``tiers`` whose rows it can train: without a kernel, not those that FBGEMM pages in."""
        if device == "cpu" or self.fused_on(device):
            return tiers
        # Only FBGEMM's kernels bring rows of these tiers to a GPU.
        return tuple(tier for tier in tiers if tier not in ("hbm_cached", "ddr"))

    @property
    def row_bytes(self) -> int:
        """Bytes of state per row, without those per weight."""
        return FLOAT * sum(not column.per_value for column in self.columns)

    @property
    def value_bytes(self) -> int:
        """Bytes of state per weight."""
        return FLOAT * sum(column.per_value for column in self.columns)

    def state_bytes(self, width: int) -> int:
        """Return the bytes of state of a row of ``width`` weights."""
        return self.row_bytes + width * self.value_bytes


# The least room that a plan reserves for each parameter's state, in float32 values. A plan is the same for all
# optimizers that keep no more state.
ORDINARY_STATE = 2.0


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a learning rate and a weight decay."""

    parameters: Sequence[torch.nn.Parameter]
    lr: float
    weight_decay: float

    def settings(self) -> dict[str, Any]:
        """Return the parameter group of a PyTorch optimizer."""
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
    def build(self, groups: Sequence[ParameterGroup], own: Sequence[torch.nn.Parameter] = ()) -> torch.optim.Optimizer:
        """Build the optimizer of ``groups``; the schedule sets the learning rates before each step.

        ``own``: parameters whose gradients only some ranks have (towers' modules). All others have equal gradients on
        all ranks, so an optimizer may deal its work on them to the ranks. Its parameter groups are ``groups`` in order.
        """


TABLE_OPTIMIZERS: Registry[TableOptimizer] = Registry(
    "table optimizer",
    setting="train.sparse_optimizer",
    home="pipeline.embeddings.table_optimizers",
    group="nightjar.table_optimizers",
    further=("model.tables.<table>.optimizer",),
)
DENSE_OPTIMIZERS: Registry[DenseOptimizer] = Registry(
    "dense optimizer",
    setting="train.dense_optimizer",
    home="pipeline.training.dense_optimizers",
    group="nightjar.dense_optimizers",
)
