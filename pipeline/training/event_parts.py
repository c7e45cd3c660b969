"""A sequence's block on a bounded number of events at a time (``train.max_events``).

The lookup stays one, and so does the step: consecutive samples are taken together as long as their events are few
enough, and what the block keeps for the backward pass is computed again there (Chen et al. 2016, arXiv 1604.06174).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Part = tuple[int, int]  # samples, events


def in_parts(
    vector: nn.Module,
    most: int | None,
    columns: Sequence[Tensor],
    rows: Tensor,
    candidates: Sequence[Tensor | None],
    samples: int,
) -> Tensor:
    """What the ``SequenceVector`` gives of all ``samples``, [B, D], working on ``most`` events at a time (None: all).

    Sums over samples, as in the gradients of parameters, are added up in another order; the rest is the same.
    """
    if most is None or len(rows) <= most:
        vectors: Tensor = vector(columns, rows, candidates, samples)
        return vectors
    parts = parts_of(torch.bincount(rows, minlength=samples).cpu().numpy(), most)
    counts, events = [part[0] for part in parts], [part[1] for part in parts]
    # One split, not slices: the gradients of its parts are joined once.
    by_column = [column.split(events) for column in columns]
    by_candidate = [[None] * len(parts) if each is None else each.split(counts) for each in candidates]
    firsts = np.cumsum([0, *counts])
    found = []
    for number, (own, first) in enumerate(zip(rows.split(events), firsts[:-1].tolist(), strict=True)):
        given = ([each[number] for each in by_column], own - first, [each[number] for each in by_candidate])
        found.append(_again(vector, *given, counts[number]))
    return torch.cat(found)


def parts_of(lengths: np.ndarray, most: int) -> list[Part]:
    """Consecutive samples of these ``lengths``, at most ``most`` events in all and at least one sample a part."""
    ends, parts, start = np.cumsum(lengths), list[Part](), 0
    while start < len(lengths):
        before = int(ends[start - 1]) if start else 0
        stop = max(int(np.searchsorted(ends, before + most, side="right")), start + 1)
        parts.append((stop - start, int(ends[stop - 1]) - before))
        start = stop
    return parts


def _again(
    vector: nn.Module, columns: Sequence[Tensor], rows: Tensor, candidates: Sequence[Tensor | None], samples: int
) -> Tensor:
    """The vectors of a part, with activations that the backward pass computes again, from the same random state."""
    if not torch.is_grad_enabled():
        return vector(columns, rows, candidates, samples)  # type: ignore[no-any-return]
    return checkpoint(vector, columns, rows, candidates, samples, use_reentrant=False)  # type: ignore[no-any-return]
