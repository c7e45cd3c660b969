"""Where the optimizer's state of a kernel's tables lies: in FBGEMM's kernel, or in tensors of ours beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pipeline.embeddings.tables import Kernel
from pipeline.specs.optimizers import StateColumn

TableState = dict[str, Tensor]


def keep_state(module: Any, states: list[TableState]) -> None:
    """Make ``states``, by table and column, those of the kernel ``module``."""
    module.table_state = states


def kept_state(module: Any) -> list[TableState] | None:
    """What ``keep_state`` gave ``module``; None where FBGEMM's kernel has the state."""
    states: list[TableState] | None = getattr(module, "table_state", None)
    return states


def kernel_states(kernel: Kernel, columns: Sequence[StateColumn]) -> list[TableState]:
    """The optimizer's state in ``kernel``, by table and column: views [rows] or [rows, dim].

    ``columns``: of its tables, where FBGEMM has the state.
    """
    kept = kept_state(kernel.module)
    if kept is not None:
        return kept
    if not columns:
        return [{} for _ in kernel.tables]
    names = [column.name for column in columns]
    return [dict(zip(names, each, strict=True)) for each in kernel.module.split_optimizer_states()]
