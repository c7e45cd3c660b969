"""The protocol of an architecture for several tasks: what the tasks share behind a ranking model's last hidden layer.

A spec is a frozen dataclass, whose fields are the options of ``model.task_options`` that it uses. Its module must not
import torch at its top.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pipeline.records import TaskColumn
from pipeline.specs.label_kind import MAIN_TASK

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class TaskInput:
    """A task of a model: its ``name``, and the task ``given`` without which it cannot happen."""

    name: str
    given: str | None = None


def all_tasks(further: Sequence[TaskInput]) -> tuple[TaskInput, ...]:
    """The tasks of a model: the main one, then the ``further`` ones."""
    return (TaskInput(name=MAIN_TASK), *further)


def task_inputs(columns: Sequence[TaskColumn]) -> tuple[TaskInput, ...]:
    """The further tasks of a dataset's schema as a model's inputs name them."""
    return tuple(TaskInput(name=column.name, given=column.given) for column in columns)


class TaskArchitecture(Protocol):
    """An architecture, of ``models/task_architectures.py``.

    ``chained``: it needs tasks that are ``given`` others.
    """

    name: str
    chained: bool

    @abstractmethod
    def build(self, width: int, tasks: Sequence[TaskInput]) -> nn.Module:
        """The layers behind ``hidden`` [B, width]: a ``layers.TaskHeads`` for ``tasks``, the main one first."""
