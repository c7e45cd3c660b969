"""Shared bottom (Caruana 1997): the tasks share the ranker's hidden layers, and each has an MLP of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.specs.task_architecture import TaskArchitecture, TaskInput

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class SharedBottom(TaskArchitecture):
    """``task_mlp``: hidden widths of each task's MLP, between the shared layers and its logit."""

    task_mlp: Sequence[int] = (64,)
    name = "shared_bottom"
    chained = False

    def build(self, width: int, tasks: Sequence[TaskInput]) -> nn.Module:
        """See ``TaskArchitecture.build``."""
        from pipeline.models.layers.tasks import TaskHeads

        return TaskHeads(width, len(tasks), self.task_mlp)


SPEC = SharedBottom()
