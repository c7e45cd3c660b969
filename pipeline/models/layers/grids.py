"""Samples of like length in grids: what a product of events with events needs, with little padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_STEPS, _SHORTEST = 4, 8  # widths between two powers of two; the least step between two widths


@dataclass(frozen=True)
class Grids:
    """Grids of ``sizes`` (b samples, L events), one after the other; c cells in all.

    ``events`` [c]: the event in each cell; a cell that fills a sample up, behind its last event, has its first one.
    ``cells`` [n]: the cell of each event. ``lengths``: of the samples of each grid, [b].
    """

    sizes: tuple[tuple[int, int], ...]
    events: Tensor
    cells: Tensor
    lengths: tuple[Tensor, ...]

    @staticmethod
    def of(lengths: Tensor, offsets: Tensor, *, even: bool = False) -> Grids:
        """Of samples of ``lengths`` [B], whose first events are at ``offsets`` [B].

        A grid is wider than its shortest sample by a quarter, or by ``_SHORTEST`` - 1 events, at most. ``even``: the
        width of a sample's grid depends on its own length alone, not on what other samples there are.
        """
        rounded = _rounded(lengths)
        order = torch.argsort(rounded, stable=True)
        samples = torch.unique_consecutive(rounded[order], return_counts=True)[1].tolist()
        own = lengths[order].split(samples)
        longest = [int(each.max()) for each in (rounded[order].split(samples) if even else own)]
        sizes = tuple(zip(samples, longest, strict=True))
        widths = torch.tensor([width for _, width in sizes], device=order.device).repeat_interleave(
            torch.tensor(samples, device=order.device)
        )
        sample = torch.repeat_interleave(widths)
        place = torch.arange(sample.shape[0], device=order.device) - (widths.cumsum(0) - widths)[sample]
        real = place < lengths[order][sample]
        events = offsets[order][sample] + place * real
        cells = torch.empty(int(lengths.sum()), dtype=torch.int64, device=order.device)
        cells[events[real]] = real.nonzero()[:, 0]
        return Grids(sizes, events, cells, own)

    def split(self, values: Tensor) -> Sequence[Tensor]:
        """``values`` [c, ...] by grid."""
        return values.split([samples * width for samples, width in self.sizes])


def _rounded(lengths: Tensor) -> Tensor:
    """``lengths`` up to the next of ``_STEPS`` widths between two powers of two."""
    power = torch.log2(lengths.float()).floor().long()
    step = torch.bitwise_left_shift(torch.ones_like(lengths), power) // _STEPS
    step = step.clamp(min=_SHORTEST)
    return (lengths + step - 1) // step * step
