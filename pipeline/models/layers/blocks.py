"""Dense blocks of samples that have alike many events.

Attention between the events of a sample multiplies matrices, which want dense operands. So samples are sorted by
length and cut into blocks, each padded to its own longest sample: a few percent of the work is padding, however long
the longest sample of a batch is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

_GROWTH = 1.2  # of the longest to the shortest sample of a block; short ones differ by _STEP instead
_STEP = 3
_SCORES = 1 << 20  # of a block: its samples times the square of their length, so that scores stay in the cache


@dataclass(frozen=True)
class Block:
    """``samples``: their numbers [b]; ``mask``: bool [b, length], the places that have an event."""

    samples: Tensor
    mask: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Samples and length."""
        return self.mask.shape[0], self.mask.shape[1]


class Blocks:
    """The blocks of a batch of ``lengths`` [B] int64; samples without events are in none.

    Lengths are read on the host: on a GPU, that waits for them once.
    """

    def __init__(self, lengths: Tensor, scores: int = _SCORES) -> None:
        device, lengths = lengths.device, lengths.cpu()
        begins = lengths.cumsum(0) - lengths
        ordered, samples = torch.sort(lengths, stable=True)
        self.blocks: list[Block] = []
        index, inverse, start = (
            [torch.empty(0, dtype=torch.int64)],
            torch.empty(int(lengths.sum()), dtype=torch.int64),
            0,
        )
        for first, stop, length in _shapes(ordered.tolist(), scores):
            own, steps = samples[first:stop], torch.arange(length)
            last = ordered[first:stop, None] - 1
            places, mask = begins[own][:, None] + torch.minimum(steps, last), steps <= last
            inverse[places[mask]] = start + torch.nonzero(mask.flatten())[:, 0]
            index.append(places.flatten())
            self.blocks.append(Block(own.to(device), mask.to(device)))
            start += mask.numel()
        self._index, self._inverse = torch.cat(index).to(device), inverse.to(device)

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)

    @property
    def places(self) -> int:
        """Places of all blocks, padding included."""
        return len(self._index)

    def dense(self, values: Tensor) -> list[Tensor]:
        """Events' ``values`` [n, ...] as one [b, length, ...] for each block.

        Places behind a sample's last event repeat it; what comes back from them has no gradient.
        """
        whole = cast(Tensor, _Gather.apply(values, self._index, self._inverse))
        parts = whole.split([each.mask.numel() for each in self.blocks])
        return [part.unflatten(0, each.shape) for part, each in zip(parts, self.blocks, strict=True)]

    def jagged(self, blocks: list[Tensor]) -> Tensor:
        """What ``dense`` makes ``blocks`` of, [n, ...]; places behind the last events are dropped."""
        return torch.cat([each.flatten(0, 1) for each in blocks]).index_select(0, self._inverse)


class _Gather(torch.autograd.Function):
    """Rows ``index`` of the values, each of which is at ``inverse``: the backward pass is a copy, too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


def _shapes(lengths: list[int], scores: int) -> Iterator[tuple[int, int, int]]:
    """Blocks of samples that are sorted by length: the first one, that behind the last, the length of the longest."""
    first = next((place for place, length in enumerate(lengths) if length), len(lengths))
    while first < len(lengths):
        longest, stop = max(lengths[first] * _GROWTH, lengths[first] + _STEP), first + 1
        while stop < len(lengths) and lengths[stop] <= longest and (stop + 1 - first) * lengths[stop] ** 2 <= scores:
            stop += 1
        yield first, stop, lengths[stop - 1]
        first = stop
