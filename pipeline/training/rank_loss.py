"""The ranking loss beside the log loss: is a clicked row ahead of the other rows of its group?

For the clicked rows i of a global batch with n rows, and the other rows j of the group of each:

    pairwise   sum_i w_i mean_j log(1 + exp(x_j - x_i)) / n      RankNet (Burges et al., ICML 2005); j: without a click
    listwise   sum_i w_i log mean_j exp(x_j - x_i) / n           softmax cross entropy; j: all rows of the group

x are logits and w the rows' weights, which also count in means over j. Log mean exp is the cross entropy minus the log
of the number of rows, which has no gradient. Added to the log loss, they are the combined losses of Li et al.,
"Click-through Prediction for Advertising in Twitter Timeline" (KDD 2015), and Sheng et al., "Joint Optimization of
Ranking and Calibration with Contextualized Hybrid Model" (KDD 2023). A sum over clicks per row, and not per pair, gives
each click the same weight in every batch, as in the log loss, however many clicks and groups the batch has.

Groups are those of the global batch, so the loss does not depend on the number of ranks. Ranks gather the logits of
all, divide the clicked rows among them, and add up the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from pipeline.config.train import LISTWISE, RankLossConfig
from pipeline.embeddings.workers import Workers
from pipeline.training.callbacks import Callback, IntervalRecord
from pipeline.training.distributed import add_up

# The number of clicked rows that are compared with all others of their groups at once, which bounds the memory.
BLOCK = 64


@dataclass(frozen=True)
class Rows:
    """The rows of a global batch, [n] each: logits, whether they were clicked, weights, and groups."""

    logits: Tensor
    clicked: Tensor
    weights: Tensor
    groups: Tensor


@dataclass(frozen=True)
class RankLoss:
    """The loss of ``config`` over the global batch of ``workers``.

    ``parts`` has this rank's part of the loss for each step that no interval has reported yet, without
    ``config.weight``.
    """

    config: RankLossConfig
    workers: Workers
    parts: list[Tensor] = field(default_factory=list)

    def __call__(self, logits: Tensor, labels: Tensor, weights: Tensor, groups: Tensor | None) -> Tensor:
        """Compute this rank's part of the loss. Collective where there are several workers.

        Args:
            logits: Logits of the main task, [b].
            labels: [b].
            weights: As in ``Batch``, [b]; 0 is padding.
            groups: The group of each row, [b], negative where it has none; None: all rows are one group.

        Returns:
            A scalar whose mean over the ranks is the loss, and whose gradients the mean over the ranks completes.
        """
        rank, ranks = 0, self.workers.count
        if ranks > 1:
            rank = dist.get_rank()
        every = self._gather(logits.detach(), labels, weights, groups)
        loss, gradient = _loss_of_rank(self.config.kind == LISTWISE, every, rank, ranks)
        if ranks > 1:
            dist.all_reduce(gradient, group=self.workers.group)
        self.parts.append(loss)
        own = gradient.view(ranks, -1)[rank]
        # The gradient is known already, so pass it to the logits without a second pass through the pairs.
        return self.config.weight * (loss + ((logits - logits.detach()) * own).sum())

    def _gather(self, logits: Tensor, labels: Tensor, weights: Tensor, groups: Tensor | None) -> Rows:
        if groups is None:
            groups = torch.zeros_like(logits)
        # float64 holds logits and table row numbers exactly.
        own = torch.stack([each.double() for each in (logits, labels, weights, groups)])
        if self.workers.count > 1:
            parts = own.new_empty(self.workers.count * len(own), own.shape[1])
            dist.all_gather_into_tensor(parts, own, group=self.workers.group)
            own = parts.view(self.workers.count, len(own), -1).transpose(0, 1).flatten(1)
        every, clicked, counted, group = own
        return Rows(every.to(logits.dtype), clicked > 0, counted.to(logits.dtype), group.long())


class RankLossMeter(Callback):
    """Reports the ranking ``loss`` of an interval's steps, which the interval's log loss and NE do not include."""

    def __init__(self, loss: RankLoss) -> None:
        self._loss = loss

    def on_interval(self, interval: IntervalRecord) -> None:
        """Add ``rank_loss``, its mean over the interval's steps, without its weight."""
        parts = self._loss.parts
        mean = torch.stack(parts).double().mean() if parts else torch.zeros((), dtype=torch.float64)
        # The loss is the mean over the ranks with rows (``RankLoss``).
        interval.figures["rank_loss"] = add_up(mean[None]).item() / self._loss.workers.count
        parts.clear()


def _loss_of_rank(listwise: bool, rows: Rows, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Compute the loss of every ``ranks``-th block of clicked rows, from block ``rank`` on.

    Returns:
        The sum over these rows, and its gradient with respect to the logits of all rows, [n].
    """
    # 1. Sort the clicked rows, and those that they are compared with, by group.
    counted = (rows.weights > 0) & (rows.groups >= 0)
    order = torch.argsort(rows.groups, stable=True)
    order = order[counted[order]]
    clicked = order[rows.clicked[order]]
    others = order if listwise else order[~rows.clicked[order]]

    # 2. Find where the group of each clicked row begins and ends among the others.
    groups, among = rows.groups[clicked], rows.groups[others]
    first, last = torch.searchsorted(among, groups), torch.searchsorted(among, groups, right=True)
    compared = last > first
    clicked, groups, first, last = clicked[compared], groups[compared], first[compared], last[compared]

    # 3. Process the clicked rows block by block.
    begins, ends = first.tolist(), last.tolist()
    loss, gradient = rows.logits.new_zeros(()), torch.zeros_like(rows.logits)
    for start in range(rank * BLOCK, len(clicked), ranks * BLOCK):
        block = slice(start, min(start + BLOCK, len(clicked)))
        columns = slice(begins[block.start], ends[block.stop - 1])
        rows_of_block, compared_with = clicked[block], others[columns]
        with torch.enable_grad():
            ahead = rows.logits[rows_of_block].requires_grad_()
            behind = rows.logits[compared_with].requires_grad_()
            shares = rows.weights[compared_with] * (among[columns] == groups[block, None])
            shares = shares / shares.sum(1, keepdim=True)
            leads = behind - ahead[:, None]
            losses = (leads + shares.log()).logsumexp(1) if listwise else (functional.softplus(leads) * shares).sum(1)
            part = (rows.weights[rows_of_block] * losses).sum()
        of_ahead, of_behind = torch.autograd.grad(part, (ahead, behind))
        loss += part.detach()
        # ``+=`` at an index is safe, since no row occurs twice in a block or among its others.
        gradient[rows_of_block] += of_ahead
        gradient[compared_with] += of_behind
    return loss, gradient
