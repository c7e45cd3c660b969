"""What the events of one held-out row weigh, seen while the rows are scored: an example for the report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.models.layers.jagged import EventWeights, fillers
from pipeline.training.sequence_vectors import SequenceEncoders

# Events of the example, where some row of the first batch has no more.
MOST_EVENTS = 12


@dataclass(frozen=True)
class EventAttention:
    """``weights`` float32 [L] of the events of row ``row`` of the split, the oldest first; of several heads the mean.

    ``target``: the weight of the target, where the block takes it as one more event.
    """

    row: int
    weights: np.ndarray
    target: float | None = None


@dataclass
class Watched:
    """What was seen of the first batch: by sequence the sample of each event, and the weights of the events [m, H]."""

    rows: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, list[Tensor]] = field(default_factory=dict)

    def examples(self, rows: int) -> dict[str, EventAttention]:
        """A row for each sequence whose block has weights: one of the batch's samples, which are the first ``rows``."""
        return {
            name: _example(self.rows[name].cpu(), torch.cat(parts).float().mean(1).cpu(), rows)
            for name, parts in self.weights.items()
            if parts
        }


@contextmanager
def watching(histories: SequenceEncoders | None) -> Iterator[Watched]:
    """See the first pass of ``histories``; with None there is nothing to see."""
    seen, hooks = Watched(), list[Any]()
    if histories is not None:
        for name, vector in histories.vectors.items():
            seen.weights[name], given = [], list[int]()
            hooks.append(vector.register_forward_pre_hook(partial(_record_events, given)))
            hooks += [
                module.register_forward_hook(partial(_keep, seen.weights[name], given))
                for module in vector.modules()
                if isinstance(module, EventWeights)
            ]

        def end(module: SequenceEncoders, given: tuple[Any, ...], made: Tensor) -> None:
            seen.rows.update(zip(module.vectors, given[1], strict=True))
            while hooks:
                hooks.pop().remove()

        hooks.append(histories.register_forward_hook(end))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _record_events(into: list[int], module: torch.nn.Module, given: tuple[Any, ...]) -> None:
    """Keep the numbers of events and samples that a sequence's vectors are made of."""
    _, rows, _, samples = given
    into[:] = [len(rows), samples]


def _keep(
    into: list[Tensor], counts: list[int], module: torch.nn.Module, given: tuple[Tensor, ...], made: Tensor
) -> None:
    """Keep the weights without those of what filled up the batch, which are the last ones."""
    events, samples = counts
    # Else every sample's target is behind its events.
    alone = len(made) == events + fillers(events, samples)[0]
    into.append(made.detach()[: events if alone else events + samples])


def _example(sample: Tensor, weights: Tensor, rows: int) -> EventAttention:
    """The sample with most events, but not more than ``MOST_EVENTS`` where there is one; ``sample``: of each event."""
    lengths = torch.bincount(sample)
    among = lengths[:rows]
    # Beyond ``MOST_EVENTS``, the shorter the better.
    fits = torch.where(among <= MOST_EVENTS, among, -among)
    # ``argmax`` returns the first of several.
    row = int(fits.numpy().argmax())
    # 1 where every sample's target is behind its events.
    behind = (len(weights) - len(sample)) // len(lengths)
    start = int(lengths[:row].sum()) + behind * row
    own = weights[start : start + int(lengths[row])]
    target = float(weights[start + int(lengths[row])]) if behind else None
    return EventAttention(row, own.numpy().astype(np.float32), target)
