"""MMoE (Ma et al., KDD'18): experts that all tasks share, mixed by a gate of each task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.specs.task_architecture import TaskArchitecture, TaskInput

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Mmoe(TaskArchitecture):
    """``experts`` MLPs of hidden widths ``expert_mlp``; ``task_mlp`` as in ``shared_bottom``."""

    experts: int = 4
    expert_mlp: Sequence[int] = (128,)
    task_mlp: Sequence[int] = (64,)
    name = "mmoe"
    chained = False

    def build(self, width: int, tasks: Sequence[TaskInput]) -> nn.Module:
        """See ``TaskArchitecture.build``."""
        from pipeline.models.layers.tasks import MixtureOfExperts, TaskHeads

        mix = MixtureOfExperts(width, len(tasks), self.experts, self.expert_mlp)
        return TaskHeads(mix.width, len(tasks), self.task_mlp, mix)


SPEC = Mmoe()
