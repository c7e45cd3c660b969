"""Rows of events of unlike lengths: sums over the events of a row, and dense blocks of rows of like length.

``values`` [E, D] holds the events of all rows one after the other; those of row i are ``offsets[i]`` to
``offsets[i + 1]``. What is done event by event needs no more. Attention between events of a row multiplies matrices,
which want dense operands: rows are sorted by length and cut into blocks, each padded to its own longest row, so a few
percent of the work is padding however long the longest row is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

_GROWTH = 1.2  # of the longest to the shortest row of a block; short rows differ by _STEP instead
_STEP = 3
_SCORES = 1 << 20  # of a block: its rows times the square of their length, so that scores stay in the cache


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, offsets: Tensor, owners: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        return rows.index_select(0, owners)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (offsets,) = ctx.saved_tensors
        return _sums(grads[0], offsets), None, None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, offsets: Tensor, owners: Tensor) -> Tensor:
        ctx.save_for_backward(owners)
        return _sums(values, offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (owners,) = ctx.saved_tensors
        return grads[0].index_select(0, owners), None, None


def _sums(values: Tensor, offsets: Tensor) -> Tensor:
    events = torch.arange(len(values), device=values.device, dtype=offsets.dtype)
    return functional.embedding_bag(events, values, offsets, mode="sum", include_last_offset=True)


def owners_of(offsets: Tensor, events: int) -> Tensor:
    """The row of each event, int64 [E]."""
    lengths = offsets.diff()
    return torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths, output_size=events)


def spread(rows: Tensor, offsets: Tensor, owners: Tensor) -> Tensor:
    """Each event's own row of ``rows`` [B, D]: [E, D]."""
    result: Tensor = _Spread.apply(rows, offsets, owners)
    return result


def segment_sum(values: Tensor, offsets: Tensor, owners: Tensor) -> Tensor:
    """The sum of each row's events of ``values`` [E, D]: [B, D], 0 for a row without any."""
    result: Tensor = _Sum.apply(values, offsets, owners)
    return result


@dataclass(frozen=True)
class Block:
    """``rows`` rows, padded to ``length``, from ``start`` on among all places; ``mask``: bool [rows, length]."""

    rows: int
    length: int
    start: int
    mask: Tensor

    @property
    def places(self) -> slice:
        """Those of the block."""
        return slice(self.start, self.start + self.rows * self.length)


class _Gather(Function):
    """Rows ``index`` of the values. Each value is at one place, ``inverse``; what else is gathered has no gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None


class Blocks:
    """The dense blocks of a batch. Lengths are read on the host: on a GPU that waits for ``offsets`` once."""

    def __init__(self, offsets: Tensor, scores: int = _SCORES) -> None:
        lengths = offsets.diff()
        ordered, rows = torch.sort(lengths.cpu(), stable=True)
        shapes = list(_shapes(ordered.tolist(), scores))
        device = offsets.device
        index, inverse, masks, start = [], torch.empty(int(ordered.sum()), dtype=torch.int64), [], 0
        begins = offsets[:-1].cpu()
        self.blocks: list[Block] = []
        for first, stop, length in shapes:
            own, steps = rows[first:stop], torch.arange(length)
            last = ordered[first:stop, None] - 1
            places = begins[own][:, None] + torch.minimum(steps, last)
            mask = steps <= last
            inverse[places[mask]] = start + torch.nonzero(mask.flatten())[:, 0]
            index.append(places.flatten())
            masks.append(mask)
            self.blocks.append(Block(stop - first, length, start, mask.to(device)))
            start += mask.numel()
        self.index = torch.cat(index).to(device) if index else torch.empty(0, dtype=torch.int64, device=device)
        self.inverse = inverse.to(device)

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)

    def dense(self, values: Tensor) -> list[Tensor]:
        """``values`` [E, ...] as one [rows, length, ...] for each block; places behind a row's end repeat its last."""
        places: Tensor = _Gather.apply(values, self.index, self.inverse)
        return [places[each.places].unflatten(0, (each.rows, each.length)) for each in self.blocks]

    def jagged(self, blocks: list[Tensor]) -> Tensor:
        """What ``dense`` makes ``blocks`` of, [E, ...]; places behind the ends are dropped."""
        if not blocks:
            raise ValueError("there are no events")
        return torch.cat([each.flatten(0, 1) for each in blocks]).index_select(0, self.inverse)


def _shapes(lengths: list[int], scores: int) -> Iterator[tuple[int, int, int]]:
    """Blocks of rows that are sorted by length: first row, the one behind the last, length of the longest."""
    first = next((place for place, length in enumerate(lengths) if length), len(lengths))
    while first < len(lengths):
        shortest, stop = lengths[first], first
        longest = max(shortest * _GROWTH, shortest + _STEP)
        while (
            stop < len(lengths)
            and lengths[stop] <= longest
            and (stop + 1 - first) * lengths[stop] ** 2 <= max(scores, lengths[stop] ** 2)
        ):
            stop += 1
        yield first, stop, lengths[stop - 1]
        first = stop
