"""The columns of a sequence's events as one vector an event, and the block on them as one vector a sample."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipeline.models.layers.jagged import Jagged, wide

EVEN_ROWS = 64  # more than a kernel's tile has


def fillers(events: int, samples: int) -> tuple[int, int]:
    """Events and samples to be added, of one event or two each, so that both become multiples of ``EVEN_ROWS``.

    Kernels multiply the last few rows of a matrix by other steps, whose sums may differ in the last bit. Where all
    samples have one event, so have the added ones.
    """
    more = -samples % EVEN_ROWS + EVEN_ROWS
    return more + -(events + more) % EVEN_ROWS, more


class SequenceVector(nn.Module):
    """forward(columns [n, w] each, rows [n], candidates [B, w] or None each, B) -> [B, ``dim``] float32.

    An event's columns, side by side, are brought to width ``dim``; to this comes a vector of its place, counted from
    the newest event. The target is what the same projection makes of the candidate's embeddings in the tables that the
    events share; columns without such have zeros. ``age``: the column of the ages, where ``block`` wants them too.
    """

    def __init__(
        self,
        widths: Sequence[int],
        dim: int,
        max_length: int,
        block: nn.Module,
        *,
        targeted: bool,
        places: bool,
        age: int | None = None,
    ) -> None:
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
        """A vector of each sample, [samples, D], of its events' ``columns`` [n, width] and its ``candidates``.

        Out of training it does not depend on the other samples by as much as a rounding.
        """
        if self.training or torch.compiler.is_exporting():
            return self._vectors(columns, rows, candidates, Jagged.of(rows, samples))
        events, more = fillers(len(rows), samples)
        columns = [nn.functional.pad(each, (0, 0, 0, events)) for each in columns]
        candidates = [None if each is None else nn.functional.pad(each, (0, 0, 0, more)) for each in candidates]
        own = torch.arange(samples, samples + more, device=rows.device)
        twice = (torch.arange(more, device=rows.device) < events - more) + 1
        rows = torch.cat([rows, own.repeat_interleave(twice)])
        return self._vectors(columns, rows, candidates, Jagged.of(rows, samples + more, even=True))[:samples]

    def _vectors(
        self, columns: Sequence[Tensor], rows: Tensor, candidates: Sequence[Tensor | None], jagged: Jagged
    ) -> Tensor:
        samples = jagged.lengths.shape[0]
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
