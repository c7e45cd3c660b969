"""Values of events without padding: every sample has its own number of them, one sample after the other.

In attention among the events of each sample, products of events with weights cover all events at once. Products of
events with events are quadratic in a sample's length, so samples of similar length are taken together and padded to the
longest of them (``Grids``). This bounds the padding by the step between two lengths, whatever the longest sample is.
Where only the newest event has a query, as in the last layer of a model that needs one vector per sample, the work is
linear and nothing is padded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from pipeline.models.layers.perceptron import mlp


@dataclass(frozen=True)
class Jagged:
    """The places of n events. ``rows`` [n] int64 has each one's sample, rising; ``lengths`` [B] int64, none is 0.

    ``offsets`` [B] has the first event of each sample. ``even``: results for a sample must not depend on other samples,
    not even by rounding.
    """

    rows: Tensor
    lengths: Tensor
    offsets: Tensor
    even: bool = False

    @staticmethod
    def of(rows: Tensor, samples: int, *, even: bool = False) -> Jagged:
        """Find the places of events.

        Args:
            rows: The sample of each event, int64 [n], rising; every sample has at least one event.
            samples: The number of samples.
            even: See the class.
        """
        # Do not use ``bincount``: its result's size depends on values, which export does not know.
        lengths = torch.zeros(samples, dtype=torch.int64, device=rows.device)
        lengths = lengths.index_add(0, rows, torch.ones_like(rows))
        return Jagged(rows, lengths, lengths.cumsum(0) - lengths, even)

    def of_samples(self, values: Tensor) -> Tensor:
        """Return for each event what ``values`` [B, D] have for its sample: [n, D]."""
        return cast(Tensor, _Spread.apply(values, self.rows, self.offsets))

    def sum(self, values: Tensor) -> Tensor:
        """Return the sums of the events' ``values`` [n, D] by sample: [B, D]."""
        return cast(Tensor, _Sum.apply(values, self.rows, self.offsets))

    def softmax(self, scores: Tensor) -> Tensor:
        """Return the softmax of ``scores`` [n, H] within every sample: [n, H]."""
        # Subtract the highest score, so that no power overflows. It cancels out, so it needs no gradient.
        highest = scores.detach().new_full((self.lengths.shape[0], scores.shape[1]), -torch.inf)
        highest = highest.scatter_reduce(0, self.rows[:, None].expand_as(scores), scores.detach(), "amax")
        powers = (scores - highest.index_select(0, self.rows)).exp()
        return powers / self.of_samples(self.sum(powers))

    def newest(self, values: Tensor) -> Tensor:
        """Return the ``values`` [n, D] of each sample's newest event: [B, D]."""
        return values.index_select(0, self.offsets + self.lengths - 1)

    def followed_by(self, values: Tensor, last: Tensor) -> tuple[Tensor, Jagged]:
        """Append one event, ``last`` [B, D], to each sample's ``values`` [n, D]; also returns the new places."""
        samples = torch.arange(self.lengths.shape[0], device=self.rows.device)
        events = torch.arange(self.rows.shape[0], device=self.rows.device)
        # Sample s has s new events before it, so its events move by s places; its own new event follows them.
        places = torch.cat([events + self.rows, self.offsets + self.lengths + samples])
        # Invert the permutation: for each place, find its row in the concatenation of ``values`` and ``last``.
        source = torch.zeros_like(places).scatter(0, places, torch.arange(places.shape[0], device=places.device))
        rows = torch.cat([self.rows, samples]).index_select(0, source)
        joined = torch.cat([values, last]).index_select(0, source)
        return joined, Jagged(rows, self.lengths + 1, self.offsets + samples, self.even)

    @property
    def ages(self) -> Tensor:
        """Return how many events of the same sample are newer than each, [n] int64: 0 is the newest."""
        ends = self.offsets + self.lengths
        return ends[self.rows] - 1 - torch.arange(self.rows.shape[0], device=self.rows.device)

    @cached_property
    def grids(self) -> Grids:
        """The samples in grids, which are made once for all layers."""
        return Grids.of(self.lengths, self.offsets, even=self.even)


def wide(values: Tensor) -> Tensor:
    """Return ``values`` in at least float32, since layers under autocast return bf16."""
    if values.dtype in (torch.bfloat16, torch.float16):
        return values.float()
    return values


class EventWeights(nn.Module):
    """forward(weights [n, H]) -> the same: the weights of events in their samples' vectors. Hooks see them here."""

    def forward(self, weights: Tensor) -> Tensor:
        return weights


class _Sum(torch.autograd.Function):
    # A sum by sample whose backward pass is a copy; PyTorch's own sorts the indices.

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(rows, offsets)
        return _sum_by_sample(values, rows, offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


class _Spread(torch.autograd.Function):
    # A copy for each event whose backward pass is a sum by sample.

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(rows, offsets)
        return values.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _sum_by_sample(grads[0].contiguous(), *ctx.saved_tensors), None, None


def _sum_by_sample(values: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    # embedding_bag adds every sample's events in their order, but an export with it would fix the number of samples.
    if torch.compiler.is_exporting() or values.is_meta:
        return values.new_zeros(offsets.shape[0], values.shape[1]).index_add(0, rows, values)
    events = torch.arange(rows.shape[0], device=rows.device)
    return torch.nn.functional.embedding_bag(events, values, offsets, mode="sum")


# A score so low that its SiLU is 0.
_NEVER = -1e4


class Weights(Protocol):
    """Turns scores of keys into weights of their values."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
        """Weigh the values up to each place of a grid, which is padded.

        Args:
            query: [b, H, L, e], as ``key``.
            key: The keys, which queries are multiplied by.
            value: The values to weigh, [b, H, L, d].
            lengths: The events of each sample, [b, 1, 1, 1].

        Returns:
            [b, H, L, d].
        """

    def among(self, scores: Tensor, distance: Tensor, known: Tensor, lengths: Tensor) -> Tensor:
        """Turn scores of keys into weights; ``distance``, ``known`` and ``lengths`` broadcast with ``scores``.

        Args:
            scores: [..., keys].
            distance: The number of events from key to query.
            known: Whether there is a key; the weight is 0 elsewhere.
            lengths: The events of the sample.
        """

    def of_newest(self, scores: Tensor, jagged: Jagged) -> Tensor:
        """Return weights [n, H] from the ``scores`` [n, H] that every event has for its sample's newest one."""


def causal(query: Tensor, key: Tensor, value: Tensor, jagged: Jagged, weights: Weights, longest: int) -> Tensor:
    """For each event, weigh the values of its sample's events up to it.

    Args:
        query: [n, H, e], as ``key``.
        key: The keys, which queries are multiplied by.
        value: The values to weigh, [n, H, d].
        jagged: The places of the n events.
        weights: How scores become weights.
        longest: The most events of a sample.

    Returns:
        [n, H, d].
    """
    if torch.compiler.is_exporting():
        # Grids depend on lengths, which an exported program does not know.
        return _windows(query, key, value, jagged, weights, longest)
    grids, widths = jagged.grids, [query.shape[2], key.shape[2], value.shape[2]]
    filled = torch.cat([query, key, value], dim=2).index_select(0, grids.events)
    parts = list[Tensor]()
    for part, (samples, most), lengths in zip(grids.split(filled), grids.sizes, grids.lengths, strict=True):
        # The parts are [b, H, L, d] each. Padding follows a sample's events, so that none of them sees it.
        q, k, v = part.view(samples, most, *filled.shape[1:]).transpose(1, 2).split(widths, dim=3)
        attended = weights.attend(q, k, v, lengths[:, None, None, None])
        parts.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts).index_select(0, grids.cells)


def newest(query: Tensor, key: Tensor, value: Tensor, jagged: Jagged, weights: Weights) -> Tensor:
    """Weigh the values of each sample's events for its newest one alone, whose query is ``query`` [B, H, e].

    This equals ``causal`` for that event, but is linear in the number of events: n scores per head, and no padding.

    Returns:
        [B, H, d].
    """
    heads = value.shape[1]
    queries = jagged.of_samples(query.flatten(1)).view_as(key)
    shares = weights.of_newest((queries * key).sum(2), jagged)
    return jagged.sum((value * shares[:, :, None].to(value.dtype)).flatten(1)).unflatten(1, (heads, -1))


def _select_rows(values: Tensor, rows: Tensor) -> Tensor:
    # Returns values[rows]. The backward pass of an index would sort the rows, that of ``index_select`` does not.
    return values.index_select(0, rows.flatten()).unflatten(0, rows.shape)


def _windows(query: Tensor, key: Tensor, value: Tensor, jagged: Jagged, weights: Weights, longest: int) -> Tensor:
    # Does the same as ``causal`` over the ``longest`` events up to each, so that every event has as many keys.
    position = torch.arange(key.shape[0], device=key.device)
    distance = torch.arange(longest, device=key.device)
    known = distance <= (position - jagged.offsets[jagged.rows])[:, None]
    keys = (position[:, None] - distance).clamp(min=0)
    scores = torch.einsum("nhd,nkhd->nhk", query, key[keys])
    lengths = jagged.lengths[jagged.rows][:, None, None]
    shares = weights.among(scores, distance, known[:, None, :], lengths)
    return torch.einsum("nhk,nkhd->nhd", shares.to(value.dtype), value[keys])


class SoftmaxWeights(nn.Module):
    """Weights that add up to one, by the scores divided by the root of a head's ``width`` (Vaswani et al. 2017)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.seen = width**-0.5, EventWeights()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
        """See ``Weights``."""
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)

    def among(self, scores: Tensor, distance: Tensor, known: Tensor, lengths: Tensor) -> Tensor:
        """See ``Weights``."""
        return (wide(scores) * self.scale).masked_fill(~known, -torch.inf).softmax(-1)

    def of_newest(self, scores: Tensor, jagged: Jagged) -> Tensor:
        """See ``Weights``."""
        weights: Tensor = self.seen(jagged.softmax(wide(scores) * self.scale))
        return weights


class SiluWeights(nn.Module):
    """SiLU of score and a learned bias by distance, divided by the number of events (HSTU, arXiv 2402.17152, eq. 2).

    Such weights do not add up to one: how many events fit shows how strong an interest is.
    """

    def __init__(self, heads: int, longest: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(heads, longest))
        self.seen = EventWeights()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
        """See ``Weights``."""
        scores = wide(query @ key.mT)
        # The biases form a matrix from query to key, [H, L, L], with _NEVER for keys after the query. Distances beyond
        # those with a bias only occur in the padding, so their bias is 0.
        events = query.shape[2]
        later = self.bias.new_full((self.bias.shape[0], events - 1), _NEVER)
        known = nn.functional.pad(self.bias[:, :events], (0, max(0, events - self.bias.shape[1])))
        # Each row is the one above it shifted by one, so take windows of one vector, from the farthest key to the last
        # one.
        by_distance = torch.cat([known.flip(1), later], dim=1)
        scores = scores.add_(by_distance.unfold(1, events, 1).flip(1))
        return (nn.functional.silu(scores).to(value.dtype) @ value) / lengths

    def among(self, scores: Tensor, distance: Tensor, known: Tensor, lengths: Tensor) -> Tensor:
        """See ``Weights``."""
        weights = nn.functional.silu(wide(scores) + _select_rows(self.bias.t(), distance).movedim(-1, 0))
        return weights.masked_fill(~known, 0.0) / lengths

    def of_newest(self, scores: Tensor, jagged: Jagged) -> Tensor:
        """See ``Weights``."""
        weights = nn.functional.silu(wide(scores) + _select_rows(self.bias.t(), jagged.ages))
        shares: Tensor = self.seen(weights / jagged.lengths[jagged.rows][:, None])
        return shares


# Numbers of rows are padded to a multiple of this, which is more than the rows of a kernel's tile.
EVEN_ROWS = 64


def fillers(events: int, samples: int) -> tuple[int, int]:
    """Return the events and samples to add, of one event or two each, to make both multiples of ``EVEN_ROWS``."""
    # Kernels multiply the last few rows of a matrix in other steps, whose sums may differ in the last bit. If all
    # samples have one event, so have the added ones.
    added = -samples % EVEN_ROWS + EVEN_ROWS
    return added + -(events + added) % EVEN_ROWS, added


def add_samples(
    columns: Sequence[Tensor],
    rows: Tensor,
    candidates: Sequence[Tensor | None],
    samples: int,
    more_samples: int,
    more_events: int,
) -> tuple[list[Tensor], Tensor, list[Tensor | None]]:
    """Return columns, rows and candidates with ``more_samples`` samples of zeros behind the ``samples`` there are.

    The added samples share ``more_events`` events as evenly as possible; each needs one at least.
    """
    least, left = divmod(more_events, more_samples)
    numbers = torch.arange(more_samples, device=rows.device)
    added = (samples + numbers).repeat_interleave(least + (numbers < left))
    padded: list[Tensor | None] = []
    for candidate in candidates:
        if candidate is not None:
            candidate = nn.functional.pad(candidate, (0, 0, 0, more_samples))
        padded.append(candidate)
    columns = [nn.functional.pad(column, (0, 0, 0, more_events)) for column in columns]
    return columns, torch.cat([rows, added]), padded


class SequenceVector(nn.Module):
    """forward(columns [n, w] each, rows [n], candidates [B, w] or None each, B) -> [B, ``dim``] float32.

    The columns of an event, side by side, are projected to width ``dim``, and a vector of its place is added, counted
    from the newest event. The target is the same projection of the candidate's embeddings in the tables that the events
    share, with zeros for other columns. ``age`` is the column of the ages, if ``block`` uses them.
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
        """Draw the vectors of the places from ``seed``, as large as those of events."""
        if self.places is not None and not self.places.is_meta:
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                drawn = torch.randn(self.places.shape, generator=generator)
                self.places.copy_(drawn / (10 * math.sqrt(self.places.shape[1])))

    def forward(
        self, columns: Sequence[Tensor], rows: Tensor, candidates: Sequence[Tensor | None], samples: int
    ) -> Tensor:
        """Return a vector of each sample, [samples, D].

        Args:
            columns: Embeddings of the events [n, width].
            rows: The sample of each event, [n].
            candidates: The samples' embeddings in the tables that columns share, [samples, width].
            samples: The number of samples.
        """
        if self.training or torch.compiler.is_exporting():
            return self._encode(columns, candidates, Jagged.of(rows, samples))
        # Outside of training, a vector must not depend on the other samples, not even by rounding: a score must be the
        # same in a batch of one and in a file of millions.
        more_events, more_samples = fillers(len(rows), samples)
        columns, rows, candidates = add_samples(columns, rows, candidates, samples, more_samples, more_events)
        return self._encode(columns, candidates, Jagged.of(rows, samples + more_samples, even=True))[:samples]

    def _encode(self, columns: Sequence[Tensor], candidates: Sequence[Tensor | None], jagged: Jagged) -> Tensor:
        samples = jagged.lengths.shape[0]
        events = wide(self.project(torch.cat([*columns], dim=1)))
        if self.places is not None:
            events = events + self.places.index_select(0, jagged.ages)
        target = None
        if self.targeted:
            # Columns whose table no feature shares are zeros, because a target must be as wide as an event.
            zeros = [column.new_zeros(samples, column.shape[1]) for column in columns]
            known = []
            for candidate, zero in zip(candidates, zeros, strict=True):
                known.append(candidate if candidate is not None else zero)
            target = wide(self.project(torch.cat(known, dim=1)))
        # Only blocks with a bias by age take a fourth argument, so other blocks need not know about it.
        ages = [columns[self.age]] if self.age is not None else []
        vectors: Tensor = wide(self.block(events, jagged, target, *ages))
        return vectors


class SelfAttention(nn.Module):
    """Self-attention between the vectors of a sample (Vaswani et al. 2017, arXiv 1706.03762, section 3).

    forward(vectors [B, m, D]) -> [B, m, D]: a layer of a transformer's encoder; ``heads`` divides D.

    It uses plain products, which the planner counts alike on every device.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs, self.output = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.first_norm, self.second_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.forward_part = mlp([dim, 2 * dim, dim], last_activation=False)

    def forward(self, vectors: Tensor) -> Tensor:
        by_head = []
        for part in self.inputs(vectors).chunk(3, dim=2):
            # [B, m, D] -> [B, heads, m, D / heads]
            by_head.append(part.unflatten(2, (self.heads, -1)).transpose(1, 2))
        query, key, value = by_head
        scores = torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]), dim=-1)
        joined = (scores @ value).transpose(1, 2).flatten(2)
        # The norms come after the sums, as in the paper; sequence encoders have them before (``TransformerLayer``).
        seen = self.first_norm(vectors + self.output(joined))
        result: Tensor = self.second_norm(seen + self.forward_part(seen))
        return result


# The number of grid widths between two powers of two, and the least step between two widths.
_STEPS, _SHORTEST = 4, 8


@dataclass(frozen=True)
class Grids:
    """Grids of ``sizes`` (b samples, L events), one after the other; c cells in all.

    ``events`` [c] has the event in each cell; a padding cell, after a sample's last event, has its first one. ``cells``
    [n] has the cell of each event. ``lengths`` are those of the samples of each grid, [b].
    """

    sizes: tuple[tuple[int, int], ...]
    events: Tensor
    cells: Tensor
    lengths: tuple[Tensor, ...]

    @staticmethod
    def of(lengths: Tensor, offsets: Tensor, *, even: bool = False) -> Grids:
        """Make grids of samples of ``lengths`` [B], whose first events are at ``offsets`` [B].

        A grid is wider than its shortest sample by at most a quarter, or by ``_SHORTEST`` - 1 events. With ``even``,
        the width of a sample's grid depends only on its own length, and not on other samples.
        """
        # 1. Round lengths up to the next of _STEPS widths between two powers of two, and sort, so that samples of
        # similar length are neighbours.
        power = torch.log2(lengths.float()).floor().long()
        step = torch.bitwise_left_shift(torch.ones_like(lengths), power) // _STEPS
        step = step.clamp(min=_SHORTEST)
        rounded = (lengths + step - 1) // step * step
        order = torch.argsort(rounded, stable=True)
        samples = torch.unique_consecutive(rounded[order], return_counts=True)[1].tolist()

        # 2. Find the width of each grid.
        grid_lengths = lengths[order].split(samples)
        widest = rounded[order].split(samples) if even else grid_lengths
        longest = [int(part.max()) for part in widest]

        # 3. Find the sample and the position of each cell, and which cells have an event.
        counts = torch.tensor(samples, device=order.device)
        widths = torch.tensor(longest, device=order.device).repeat_interleave(counts)
        sample = torch.repeat_interleave(widths)
        position = torch.arange(sample.shape[0], device=order.device) - (widths.cumsum(0) - widths)[sample]
        real = position < lengths[order][sample]
        events = offsets[order][sample] + position * real
        cells = torch.empty(int(lengths.sum()), dtype=torch.int64, device=order.device)
        cells[events[real]] = real.nonzero()[:, 0]
        return Grids(tuple(zip(samples, longest, strict=True)), events, cells, grid_lengths)

    def split(self, values: Tensor) -> Sequence[Tensor]:
        """Split ``values`` [c, ...] by grid."""
        return values.split([samples * width for samples, width in self.sizes])
