"""The loss of several tasks, and the sums from which their figures are computed."""

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
    """The weighted sum of the tasks' losses. A row without a task's label adds nothing to that task's loss.

    Each loss is a mean over all rows of the global batch, including those without the label, so that a label counts the
    same in every batch, whatever the number of other labels and of ranks.
    """

    kinds: tuple[LabelKind, ...]
    weights: tuple[float, ...]
    smoothing: float

    @classmethod
    def of(cls, schema: DatasetSchema, train: TrainConfig) -> TaskLoss:
        """Build the loss of the main task and of the tasks of ``schema``."""
        # The main task predicts clicks, the first kind of label.
        kinds, weights = [next(iter(LABEL_KINDS))], [train.task_weight(MAIN_TASK)]
        for task in schema.tasks:
            kinds.append(LABEL_KINDS.get(task.kind))
            weights.append(train.task_weight(task.name))
        return cls(tuple(kinds), tuple(weights), train.label_smoothing)

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        weights: Tensor,
        offset: Tensor | None = None,
        others: Tensor | None = None,
    ) -> Tensor:
        """Return the rank's part of the loss, for logits and labels [b, T] (NaN: missing) and ``Batch.weights`` [b].

        ``offset`` [b] is added to the main task's logits. ``others`` [b] are factors of the other tasks' weights.
        """
        other_weights, losses = weights, []
        if others is not None:
            other_weights = weights * others
        columns = zip(self.kinds, self.weights, logits.unbind(1), labels.unbind(1), strict=True)
        for number, (kind, factor, task_logits, task_labels) in enumerate(columns):
            # If rows without a click were left out, the main task corrects for it by its logit, the others by weights.
            counts = other_weights
            if number == 0:
                counts = weights
                if offset is not None:
                    task_logits = task_logits + offset
            present = ~torch.isnan(task_labels)
            known = torch.where(present, task_labels, 0.0)
            if self.smoothing and kind.classes:
                known = known.lerp(torch.full_like(known, 0.5), self.smoothing)
            # Replace the logit where the label is missing, since 0 times a loss that overflows would not be 0.
            of_rows = kind.loss(torch.where(present, task_logits, 0.0), known)
            losses.append(factor * (of_rows * (counts * present)).sum())
        return torch.stack(losses).sum()


def join_labels(labels: Tensor, extra: Tensor, tasks: int) -> Tensor:
    """Join the labels of the main task [b] with those in ``Batch.extra`` to labels of all tasks [b, 1 + ``tasks``]."""
    return torch.cat([labels[:, None], extra[:, :tasks]], dim=1)


def main_sums(logits: Tensor, labels: Tensor, weights: Tensor) -> list[Tensor]:
    """Compute the figures of ``train_metrics.Sums`` for real rows [n], each times its weight in ``weights``."""
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
    """Compute ``TaskSums`` of each further task, one after the other; columns of logits and labels are tasks."""
    sums = []
    for task, each, known in zip(tasks, logits[:, 1:].unbind(1), labels[:, 1:].unbind(1), strict=True):
        kind, there = LABEL_KINDS.get(task.kind), ~torch.isnan(known)
        x, y, w = each[there], known[there], weights[there].double()
        error = kind.prediction(x.double()) - y
        sums += [w.sum(), (w * y).sum(), (w * kind.loss(x, y)).sum(), (w * error.square()).sum()]
    return sums


def task_figures(tasks: Sequence[TaskColumn], sums: Sequence[TaskSums]) -> dict[str, dict[str, float | None]]:
    """Return each task's figure, ``ne`` or ``rmse``, and its mean ``loss``; None where it is not defined."""
    figures = {}
    for task, each in zip(tasks, sums, strict=True):
        kind, mean = LABEL_KINDS.get(task.kind), None
        # A window may have no label of a task at all.
        if each.weight:
            mean = each.loss / each.weight
        figures[task.name] = {kind.title.lower(): kind.progress(each), "loss": mean}
    return figures
