"""Quantised incremental checkpoints: rows by (table, global row), committed last, read by any world size."""

from __future__ import annotations

from pipeline.checkpoint.checkpointer import Checkpointer, Model, latest
from pipeline.checkpoint.index import committed, restore_order
from pipeline.checkpoint.phases import OnPhase, Phase, ignore
from pipeline.checkpoint.restore import Target, restore, restore_newest
from pipeline.checkpoint.state import TrainState

__all__ = [
    "Checkpointer",
    "Model",
    "OnPhase",
    "Phase",
    "Target",
    "TrainState",
    "committed",
    "ignore",
    "latest",
    "restore",
    "restore_newest",
    "restore_order",
]
