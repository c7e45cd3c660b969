"""The loss of several tasks, and the sums behind their figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.config.train import TrainConfig
from pipeline.records.dataset import DatasetSchema, TaskColumn
from pipeline.specs.label_kind import LABEL_KINDS, MAIN_TASK, LabelKind, TaskSums


@dataclass(frozen=True)
class TaskLoss:
    """The sum of the tasks' losses, each times its weight. A row without a task's label adds nothing to that task's.

    Each loss is a mean over the rows of the global batch, those without the label included: then a label counts the
    same in every batch, whatever the number of labels beside it and of ranks.
    """

    kinds: tuple[LabelKind, ...]
    weights: tuple[float, ...]
    smoothing: float

    @classmethod
    def of(cls, schema: DatasetSchema, train: TrainConfig) -> TaskLoss:
        """The loss of the main task and of those of ``schema``."""
        kinds = (next(iter(LABEL_KINDS)), *(LABEL_KINDS.get(task.kind) for task in schema.tasks))
        names = (MAIN_TASK, *(task.name for task in schema.tasks))
        return cls(kinds, tuple(train.task_weight(name) for name in names), train.label_smoothing)

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        weights: Tensor,
        offset: Tensor | None = None,
        others: Tensor | None = None,
    ) -> Tensor:
        """The rank's part of the loss: logits and labels [b, T], a missing label NaN; ``weights`` [b] of ``Batch``.

        ``offset`` [b]: added to the main task's logits. ``others`` [b]: factors of the other tasks' weights.
        """
        columns = list(logits.unbind(1))
        if offset is not None:
            columns[0] = columns[0] + offset
        counts = [weights, *[weights if others is None else weights * others] * (len(columns) - 1)]
        parts = zip(self.kinds, self.weights, columns, labels.unbind(1), counts, strict=True)
        return torch.stack([factor * self._one(kind, x, y, w) for kind, factor, x, y, w in parts]).sum()

    def _one(self, kind: LabelKind, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        present = ~torch.isnan(labels)
        known = torch.where(present, labels, 0.0)
        if self.smoothing and kind.classes:
            known = known.lerp(torch.full_like(known, 0.5), self.smoothing)
        # Where the label is missing the logit is too: 0 times a loss that overflows would not be 0.
        losses = kind.loss(torch.where(present, logits, 0.0), known)
        return (losses * (weights * present)).sum()


def join_labels(labels: Tensor, extra: Tensor, tasks: int) -> Tensor:
    """Labels of all tasks [b, 1 + ``tasks``] from those of the main one [b] and from ``Batch.extra``."""
    return torch.cat([labels[:, None], extra[:, :tasks]], dim=1)


def main_sums(logits: Tensor, labels: Tensor, weights: Tensor) -> list[Tensor]:
    """The figures of ``metrics.Sums`` of real rows [n], each of them times its weight in ``weights``."""
    exact, each = weights.double(), logits.double()
    losses = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    rows = torch.full((), float(len(exact)), dtype=torch.float64, device=logits.device)
    return [
        exact.sum(),
        (exact * labels).sum(),
        (exact * losses).sum(),
        (exact * each).sum(),
        (exact * each.square()).sum(),
        (~torch.isfinite(logits)).sum(),
        rows,
    ]


def task_sums(tasks: Sequence[TaskColumn], logits: Tensor, labels: Tensor, weights: Tensor) -> list[Tensor]:
    """The figures of ``TaskSums`` of each further task, one after the other; columns of logits and labels are tasks."""
    sums = []
    for task, each, known in zip(tasks, logits[:, 1:].unbind(1), labels[:, 1:].unbind(1), strict=True):
        kind, there = LABEL_KINDS.get(task.kind), ~torch.isnan(known)
        x, y, w = each[there], known[there], weights[there].double()
        error = kind.prediction(x.double()) - y
        sums += [w.sum(), (w * y).sum(), (w * kind.loss(x, y)).sum(), (w * error.square()).sum()]
    return sums


def task_figures(tasks: Sequence[TaskColumn], sums: Sequence[TaskSums]) -> dict[str, dict[str, float | None]]:
    """By task its figure, ``ne`` or ``rmse``, and its mean ``loss``; None where it is not defined."""
    figures = {}
    for task, each in zip(tasks, sums, strict=True):
        kind = LABEL_KINDS.get(task.kind)
        mean = each.loss / each.weight if each.weight else None
        figures[task.name] = {kind.title.lower(): kind.progress(each), "loss": mean}
    return figures
