"""Values of events of which every sample has its own number, one after the other: no padding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from pipeline.models.layers.grids import Grids


@dataclass(frozen=True)
class Jagged:
    """The places of n events. ``rows`` [n] int64: each one's sample, rising; ``lengths`` [B] int64, none is 0.

    ``offsets`` [B]: the first event of each sample. ``even``: what is made of a sample must not depend on the others by
    as much as a rounding.
    """

    rows: Tensor
    lengths: Tensor
    offsets: Tensor
    even: bool = False

    @staticmethod
    def of(rows: Tensor, samples: int, *, even: bool = False) -> Jagged:
        """The places of events of these ``rows`` of ``samples`` samples."""
        lengths = torch.zeros(samples, dtype=torch.int64, device=rows.device)
        lengths = lengths.index_add(0, rows, torch.ones_like(rows))
        return Jagged(rows, lengths, lengths.cumsum(0) - lengths, even)

    def of_samples(self, values: Tensor) -> Tensor:
        """[n, D]: for each event what ``values`` [B, D] have of its sample."""
        return cast(Tensor, _Spread.apply(values, self.rows, self.offsets))

    def sum(self, values: Tensor) -> Tensor:
        """[B, D]: the sums of the events' ``values`` [n, D] by sample."""
        return cast(Tensor, _Sum.apply(values, self.rows, self.offsets))

    def softmax(self, scores: Tensor) -> Tensor:
        """[n, H]: of ``scores`` [n, H] within every sample."""
        highest = scores.detach().new_full((self.lengths.shape[0], scores.shape[1]), -torch.inf)
        highest = highest.scatter_reduce(0, self.rows[:, None].expand_as(scores), scores.detach(), "amax")
        powers = (scores - highest.index_select(0, self.rows)).exp()
        return powers / self.of_samples(self.sum(powers))

    def newest(self, values: Tensor) -> Tensor:
        """[B, D]: the ``values`` [n, D] of each sample's newest event."""
        return values.index_select(0, self.offsets + self.lengths - 1)

    def followed_by(self, values: Tensor, last: Tensor) -> tuple[Tensor, Jagged]:
        """The events' ``values`` [n, D] with one more event a sample behind them, ``last`` [B, D], and their places."""
        samples = torch.arange(self.lengths.shape[0], device=self.rows.device)
        events = torch.arange(self.rows.shape[0], device=self.rows.device)
        places = torch.cat([events + self.rows, self.offsets + self.lengths + samples])
        source = torch.zeros_like(places).scatter(0, places, torch.arange(places.shape[0], device=places.device))
        rows = torch.cat([self.rows, samples]).index_select(0, source)
        joined = torch.cat([values, last]).index_select(0, source)
        return joined, Jagged(rows, self.lengths + 1, self.offsets + samples, self.even)

    @property
    def ages(self) -> Tensor:
        """How many events of the same sample are newer than each, [n] int64: 0 is the newest."""
        ends = self.offsets + self.lengths
        return ends[self.rows] - 1 - torch.arange(self.rows.shape[0], device=self.rows.device)

    @cached_property
    def grids(self) -> Grids:
        """The samples in grids, made once for all layers."""
        return Grids.of(self.lengths, self.offsets, even=self.even)


def wide(values: Tensor) -> Tensor:
    """``values`` in float32 at least: what layers under autocast give is bf16."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


class EventWeights(nn.Module):
    """forward(weights [n, H]) -> the same: what events weigh in their samples' vectors. A hook sees them here."""

    def forward(self, weights: Tensor) -> Tensor:
        return weights


class _Sum(torch.autograd.Function):
    """A sum by sample whose backward pass is a copy; PyTorch's own sorts the indices."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(rows, offsets)
        return _summed(values, rows, offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


class _Spread(torch.autograd.Function):
    """A copy for each event whose backward pass is a sum by sample."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(rows, offsets)
        return values.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _summed(grads[0].contiguous(), *ctx.saved_tensors), None, None


def _summed(values: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """[B, D], every sample's events in their order."""
    if torch.compiler.is_exporting() or values.is_meta:  # embedding_bag would fix the number of samples
        return values.new_zeros(offsets.shape[0], values.shape[1]).index_add(0, rows, values)
    places = torch.arange(rows.shape[0], device=rows.device)
    return torch.nn.functional.embedding_bag(places, values, offsets, mode="sum")
