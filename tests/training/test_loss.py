"""The loss of a step by its formulas: several tasks, missing labels, weights, smoothing, sizes of embeddings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.config import TaskTraining, TrainConfig
from pipeline.embeddings.collection import penalised
from pipeline.records import DatasetSchema, TaskColumn
from pipeline.training.tasks import TaskLoss

TASKS = (TaskColumn(name="buy", kind="binary", given="click"), TaskColumn(name="items", kind="count"))
SCHEMA = DatasetSchema(dense=(), sparse=(), rows={}, files={}, groups={}, tasks=TASKS)
LABELS = [[1.0, 0.0, 3.0], [0.0, float("nan"), 0.0], [1.0, 1.0, float("nan")], [0.0, 0.0, 1.0]]
WEIGHTS = [0.25, 0.5, 0.125, 0.0]  # the last row only fills the batch up


def step(train: TrainConfig, **more: torch.Tensor) -> tuple[float, np.ndarray]:
    """The loss of four rows whose logits are 0.1, 0.2, ..., and its gradient."""
    logits = (torch.arange(12.0).reshape(4, 3) / 10 + 0.1).requires_grad_()
    loss = TaskLoss.of(SCHEMA, train)(logits, torch.tensor(LABELS), torch.tensor(WEIGHTS), **more)
    loss.backward()
    assert logits.grad is not None
    return loss.item(), logits.grad.numpy()


def expected(buy: float, smoothing: float, offset: float = 0.0, others: float = 1.0) -> float:
    """The same in plain numbers."""
    total = 0.0
    for row, (labels, weight) in enumerate(zip(LABELS, WEIGHTS, strict=True)):
        for task, label in enumerate(labels):
            logit = (3 * row + task) / 10 + 0.1 + (offset if task == 0 else 0.0)
            if np.isnan(label):
                continue
            if task == 2:
                loss = np.exp(logit) - label * logit
            else:
                target = label * (1 - smoothing) + smoothing / 2
                loss = np.log1p(np.exp(logit)) - target * logit
            total += loss * weight * (1.0, buy, 1.0)[task] * (others if task else 1.0)
    return total


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("buy", [1.0, 0.5, 0.0])
def test_it_is_the_weighted_sum_over_the_labels_that_are_there(buy: float, smoothing: float) -> None:
    train = TrainConfig(tasks={"buy": TaskTraining(weight=buy)}, label_smoothing=smoothing)
    assert step(train)[0] == pytest.approx(expected(buy, smoothing), rel=1e-6)
    more = {"offset": torch.full((4,), -0.7), "others": torch.full((4,), 3.0)}
    assert step(train, **more)[0] == pytest.approx(expected(buy, smoothing, -0.7, 3.0), rel=1e-6)


def test_a_task_without_weight_and_a_label_that_is_missing_teach_nothing() -> None:
    _, gradient = step(TrainConfig(tasks={"buy": TaskTraining(weight=0.0)}))
    assert (gradient[:, 1] == 0).all() and (gradient[:3, 0] != 0).all()
    _, gradient = step(TrainConfig())
    assert (gradient == 0).tolist() == [[False] * 3, [False, True, False], [False, False, True], [True] * 3]


def test_with_smoothing_a_logit_rests_where_its_probability_is_the_smoothed_label() -> None:
    smooth = TaskLoss.of(SCHEMA, TrainConfig(label_smoothing=0.4))
    logits = torch.tensor([[np.log(4.0), -np.log(4.0), 0.0]], requires_grad=True)  # probabilities .8 and .2
    smooth(logits, torch.tensor([[1.0, 0.0, 1.0]]), torch.ones(1)).backward()
    assert logits.grad is not None and logits.grad.abs().max() < 1e-6


def test_the_penalty_adds_the_embeddings_themselves_to_their_gradient_and_nothing_to_the_loss() -> None:
    embeddings = torch.arange(12.0).reshape(2, 3, 2).requires_grad_()
    factors = torch.tensor([0.5, 0.25])
    out = penalised(embeddings, factors)
    assert torch.equal(out, embeddings)
    out.sum().backward()
    assert embeddings.grad is not None
    torch.testing.assert_close(embeddings.grad, 1 + factors[:, None, None] * embeddings.detach())
