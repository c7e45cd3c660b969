"""PLE (Tang et al., RecSys'20): levels of experts, of which each task has some of its own and all share others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.specs.task_architecture import TaskArchitecture, TaskInput

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Ple(TaskArchitecture):
    """``levels`` of ``experts`` shared ones and ``own_experts`` of each task; one level is CGC, of the same paper."""

    levels: int = 2
    experts: int = 2
    own_experts: int = 2
    expert_mlp: Sequence[int] = (128,)
    task_mlp: Sequence[int] = (64,)
    name = "ple"
    chained = False

    def build(self, width: int, tasks: Sequence[TaskInput]) -> nn.Module:
        """See ``TaskArchitecture.build``."""
        from pipeline.models.layers.tasks import Extraction, TaskHeads

        mix = Extraction(width, len(tasks), self.levels, self.experts, self.own_experts, self.expert_mlp)
        return TaskHeads(mix.width, len(tasks), self.task_mlp, mix)


SPEC = Ple()
