"""What several tasks share behind a ranker's last hidden layer: ``SPECS`` lists it. No torch at import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.specs.model import TaskArchitecture, TaskInput

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class SharedBottom(TaskArchitecture):
    """Shared bottom (Caruana 1997): the tasks share the ranker's hidden layers, and each has an MLP of its own.

    ``task_mlp``: hidden widths of each task's MLP, between the shared layers and its logit.
    """

    task_mlp: Sequence[int] = (64,)
    name = "shared_bottom"
    chained = False

    def build(self, width: int, tasks: Sequence[TaskInput]) -> nn.Module:
        """See ``TaskArchitecture.build``."""
        from pipeline.models.layers.multi_task import TaskHeads

        return TaskHeads(width, len(tasks), self.task_mlp)


SHARED_BOTTOM = SharedBottom()


@dataclass(frozen=True)
class Mmoe(TaskArchitecture):
    """MMoE (Ma et al., KDD'18): experts that all tasks share, mixed by a gate of each task.

    ``experts`` MLPs of hidden widths ``expert_mlp``; ``task_mlp`` as in ``shared_bottom``.
    """

    experts: int = 4
    expert_mlp: Sequence[int] = (128,)
    task_mlp: Sequence[int] = (64,)
    name = "mmoe"
    chained = False

    def build(self, width: int, tasks: Sequence[TaskInput]) -> nn.Module:
        """See ``TaskArchitecture.build``."""
        from pipeline.models.layers.multi_task import MixtureOfExperts, TaskHeads

        mix = MixtureOfExperts(width, len(tasks), self.experts, self.expert_mlp)
        return TaskHeads(mix.width, len(tasks), self.task_mlp, mix)


MMOE = Mmoe()


@dataclass(frozen=True)
class Ple(TaskArchitecture):
    """PLE (Tang et al., RecSys'20): levels of experts, of which each task has some and all share others.

    ``levels`` of ``experts`` shared ones and ``own_experts`` of each task; one level is CGC, of the same paper.
    """

    levels: int = 2
    experts: int = 2
    own_experts: int = 2
    expert_mlp: Sequence[int] = (128,)
    task_mlp: Sequence[int] = (64,)
    name = "ple"
    chained = False

    def build(self, width: int, tasks: Sequence[TaskInput]) -> nn.Module:
        """See ``TaskArchitecture.build``."""
        from pipeline.models.layers.multi_task import Extraction, TaskHeads

        mix = Extraction(width, len(tasks), self.levels, self.experts, self.own_experts, self.expert_mlp)
        return TaskHeads(mix.width, len(tasks), self.task_mlp, mix)


PLE = Ple()


@dataclass(frozen=True)
class Esmm(TaskArchitecture):
    """ESMM (Ma et al., SIGIR'18, arXiv 1804.07931): P(click and conversion) = P(click) * P(conversion | click).

    Both factors are trained on all rows, by the labels click and click-and-conversion; the conditional probability has
    no loss of its own, so it does not learn from clicked rows alone.

    ``shared_bottom`` whose tasks multiply the probability of the task that they are ``given``.
    """

    task_mlp: Sequence[int] = (64,)
    name = "esmm"
    chained = True

    def build(self, width: int, tasks: Sequence[TaskInput]) -> nn.Module:
        """See ``TaskArchitecture.build``."""
        from pipeline.models.layers.multi_task import ChainedHeads

        return ChainedHeads(width, tasks, self.task_mlp)


ESMM = Esmm()


SPECS: tuple[TaskArchitecture, ...] = (SHARED_BOTTOM, MMOE, PLE, ESMM)
