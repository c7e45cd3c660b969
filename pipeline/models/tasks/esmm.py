"""ESMM (Ma et al., SIGIR'18, arXiv 1804.07931): P(click and conversion) = P(click) * P(conversion | click).

Both factors are trained on all rows, by the labels click and click-and-conversion; the conditional probability has no
loss of its own, so it does not learn from clicked rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.specs.task_architecture import TaskArchitecture, TaskInput

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Esmm(TaskArchitecture):
    """``shared_bottom`` whose tasks multiply the probability of the task that they are ``given``."""

    task_mlp: Sequence[int] = (64,)
    name = "esmm"
    chained = True

    def build(self, width: int, tasks: Sequence[TaskInput]) -> nn.Module:
        """See ``TaskArchitecture.build``."""
        from pipeline.models.layers.tasks import ChainedHeads

        return ChainedHeads(width, tasks, self.task_mlp)


SPEC = Esmm()
