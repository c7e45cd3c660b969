"""Quantised incremental checkpoints: rows by (table, global row), committed last, read by any world size.

Names are imported when they are first used: listing checkpoints needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.checkpoint.checkpointer import Checkpointer, Model, latest
    from pipeline.checkpoint.fault_points import FaultPoint, OnPoint, ignore
    from pipeline.checkpoint.index import committed, restore_order
    from pipeline.checkpoint.naming import find_checkpoint
    from pipeline.checkpoint.reader import Target, restore, restore_newest
    from pipeline.checkpoint.state import TrainState
    from pipeline.checkpoint.warm import warm_start

_HOMES = {
    "Checkpointer": "checkpointer",
    "Model": "checkpointer",
    "latest": "checkpointer",
    "committed": "index",
    "restore_order": "index",
    "find_checkpoint": "naming",
    "OnPoint": "fault_points",
    "FaultPoint": "fault_points",
    "ignore": "fault_points",
    "Target": "reader",
    "restore": "reader",
    "restore_newest": "reader",
    "TrainState": "state",
    "warm_start": "warm",
}

__all__ = [
    "Checkpointer",
    "Model",
    "OnPoint",
    "FaultPoint",
    "Target",
    "TrainState",
    "committed",
    "find_checkpoint",
    "ignore",
    "latest",
    "restore",
    "restore_newest",
    "restore_order",
    "warm_start",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
