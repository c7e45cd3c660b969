"""The columns of a sequence's events as one vector an event, and the block on them as one vector a sample."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipeline.models.layers.jagged import Jagged, wide


class SequenceVector(nn.Module):
    """forward(columns [n, w] each, rows [n], candidates [B, w] or None each, B) -> [B, ``dim``] float32.

    An event's columns, side by side, are brought to width ``dim``; to this comes a vector of its place, counted from
    the newest event. The target is what the same projection makes of the candidate's embeddings in the tables that the
    events share; columns without such have zeros. ``age``: the column of the ages, where ``block`` wants them too.
    """

    def __init__(
        self, widths: Sequence[int], dim: int, max_length: int, block: nn.Module, *, targeted: bool, places: bool,
        age: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.project = nn.Identity() if list(widths) == [dim] else nn.Linear(sum(widths), dim, bias=False)
        self.places = nn.Parameter(torch.zeros(max_length, dim)) if places else None
        self.block, self.targeted, self.age = block, targeted, age

    def start(self, seed: int) -> None:
        """Draw the vectors of the places from ``seed``: as large as those of events."""
        if self.places is not None and not self.places.is_meta:
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                drawn = torch.randn(self.places.shape, generator=generator)
                self.places.copy_(drawn / (10 * math.sqrt(self.places.shape[1])))

    def forward(
        self, columns: Sequence[Tensor], rows: Tensor, candidates: Sequence[Tensor | None], samples: int
    ) -> Tensor:
        """A vector of each sample, [samples, D], of its events' ``columns`` [n, width] and its ``candidates``."""
        jagged = Jagged.of(rows, samples)
        events = wide(self.project(torch.cat([*columns], dim=1)))
        if self.places is not None:
            events = events + self.places.index_select(0, jagged.ages)
        target = None
        if self.targeted:
            zeros = [each.new_zeros(samples, each.shape[1]) for each in columns]
            known = [zero if each is None else each for each, zero in zip(candidates, zeros, strict=True)]
            target = wide(self.project(torch.cat(known, dim=1)))
        ages = () if self.age is None else (columns[self.age],)
        vectors: Tensor = wide(self.block(events, jagged, target, *ages))
        return vectors
