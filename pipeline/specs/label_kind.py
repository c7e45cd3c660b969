"""The protocol of a label's kind: how its column is read, its loss, its predictions and its figures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.core.registry import Registry, expect_instance

if TYPE_CHECKING:
    import numpy as np
    import polars as pl
    from torch import Tensor

# The name of the task that ``data.label`` gives.
MAIN_TASK = "click"


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A further label: its ``column`` of the log, and the task ``given`` without which it cannot be positive."""

    name: str
    column: str
    kind: LabelKind
    positive: str = "1"
    negative: str = "0"
    given: str | None = None


class TaskSums(NamedTuple):
    """Sums over the rows that have a label: weights; weighted labels, losses and squared errors of predictions."""

    weight: float = 0.0
    label: float = 0.0
    loss: float = 0.0
    square: float = 0.0

    def plus(self, other: TaskSums) -> TaskSums:
        """Return the sum of both."""
        return TaskSums(*(a + b for a, b in zip(self, other, strict=True)))


class LabelKind(ABC):
    """A kind of label, of ``ingest/label_kinds.py``, which imports torch, numpy and polars inside its methods.

    A model gives a number without bounds for each task, its logit; the kind's link makes the prediction of it.
    ``classes``: whether a label is 0 or 1 and a prediction the probability of 1. ``title``: of ``progress``.
    """

    name: str
    doc: str
    title: str
    classes = False

    @abstractmethod
    def read(self, values: pl.Series, text: pl.Series | None, task: TaskSpec, spec: Any, rejected: Any) -> pl.Series:
        """Read the labels (Float32, null if missing) from raw ``values``; ``text`` has the same values as text.

        ``spec``: the log's ``DataSpec``; ``rejected`` (``ingest.values.RejectedRows``) takes rows that do not parse.
        """

    @abstractmethod
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each row, differentiable; both are [b], and no label is missing."""

    @abstractmethod
    def predicted(self, logits: Any) -> Any:
        """Return predictions for logits, a NumPy array, in float64."""

    @abstractmethod
    def prediction(self, logits: Tensor) -> Tensor:
        """Predict like ``predicted`` in torch, in the dtype of the logits."""

    @abstractmethod
    def start(self, mean: float, rows: int) -> float:
        """Return the logit of an untrained model, which predicts the ``mean`` of ``rows`` labels."""

    @abstractmethod
    def progress(self, sums: TaskSums) -> float | None:
        """Return the figure of a progress line; None if it is not defined."""

    @abstractmethod
    def figures(self, labels: np.ndarray, logits: np.ndarray, weights: np.ndarray | None = None) -> dict[str, float]:
        """Return figures of held-out rows that have a label: ``samples`` and what ``records.TaskFigures`` lists."""


LABEL_KINDS: Registry[LabelKind] = Registry(
    "label kind",
    setting="data.tasks.<name>.kind",
    home="pipeline.ingest.label_kinds",
    group="nightjar.label_kinds",
    problem=expect_instance(LabelKind),
)
