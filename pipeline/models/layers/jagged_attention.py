"""Attention among the events of each sample, of which every sample has its own number.

Products of events with weights are over all events at once and need no padding. Products of events with events are
quadratic in a sample's length: samples of like length are taken together and filled up to the longest of them, so that
what is padded is bounded by the step between two lengths, whatever the longest sample is. Where only the newest event
asks, as in the last layer of a model that wants one vector a sample, the work is linear and nothing is padded.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from pipeline.models.layers.jagged import Jagged, wide

_STEPS = 4  # lengths between two powers of two, from the fourth on


class Weights(Protocol):
    """What scores of keys become as weights of their values."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
        """[b, H, L, d]: the ``value``s [b, H, L, d] up to each place, weighed; ``lengths`` [b, 1, 1, 1] of samples."""

    def among(self, scores: Tensor, distance: Tensor, known: Tensor, lengths: Tensor) -> Tensor:
        """Weights of ``scores`` [..., keys], 0 where not ``known``; ``distance``: events from key to query.

        ``lengths``: events of the sample; these three broadcast with the scores.
        """

    def of_newest(self, scores: Tensor, jagged: Jagged) -> Tensor:
        """Weights [n, H] of the ``scores`` [n, H] that every event has for its sample's newest one."""


def causal(query: Tensor, key: Tensor, value: Tensor, jagged: Jagged, weights: Weights, longest: int) -> Tensor:
    """[n, H, d]: for each event the ``value``s [n, H, d] of the sample's events up to it, weighed.

    ``longest``: events of a sample at most.
    """
    if torch.compiler.is_exporting():  # groups depend on lengths, which a program does not know
        return _windows(query, key, value, jagged, weights, longest)
    parts, places = list[Tensor](), list[Tensor]()
    for samples, most in groups_of(jagged.lengths):
        grid = jagged.offsets[samples, None] + torch.arange(most, device=samples.device)
        real = torch.arange(most, device=samples.device) < jagged.lengths[samples, None]
        grid = torch.where(real, grid, jagged.offsets[samples, None])  # any event: no weight reaches it
        q, k, v = (_taken(each, grid).transpose(1, 2) for each in (query, key, value))  # [b, H, L, d]
        # What fills a sample up is behind its events, so that none of them sees it.
        seen = weights.attend(q, k, v, jagged.lengths[samples, None, None, None]).transpose(1, 2)
        parts.append(_taken(seen.flatten(0, 1), real.flatten().nonzero()[:, 0]))
        places.append(grid[real])
    order = torch.argsort(torch.cat(places))
    return torch.cat(parts).index_select(0, order)


def newest(query: Tensor, key: Tensor, value: Tensor, jagged: Jagged, weights: Weights) -> Tensor:
    """[B, H, d]: the ``value``s [n, H, d] of each sample's events, weighed for a ``query`` [B, H, d] of the newest."""
    heads = value.shape[1]
    own = jagged.of_samples(query.flatten(1)).view_as(key)
    shares = weights.of_newest((own * key).sum(2), jagged)
    return jagged.sum((value * shares[:, :, None].to(value.dtype)).flatten(1)).unflatten(1, (heads, -1))


def groups_of(lengths: Tensor) -> list[tuple[Tensor, int]]:
    """Samples of like length, with the longest length of each group: ``_STEPS`` groups between two powers of two."""
    power = torch.log2(lengths.float()).floor().clamp(min=2).long()
    step = _powers(power - 2)
    rounded = (lengths + step - 1) // step * step
    order = torch.argsort(rounded, stable=True)
    _, counts = torch.unique_consecutive(rounded[order], return_counts=True)
    parts = order.split(counts.tolist())
    return [(part, int(lengths[part].max())) for part in parts]


def _powers(exponents: Tensor) -> Tensor:
    return torch.bitwise_left_shift(torch.ones_like(exponents), exponents)


def _taken(values: Tensor, places: Tensor) -> Tensor:
    """``values[places]``, whose backward pass does not sort the places."""
    return values.index_select(0, places.flatten()).unflatten(0, places.shape)


def _windows(query: Tensor, key: Tensor, value: Tensor, jagged: Jagged, weights: Weights, longest: int) -> Tensor:
    """As ``causal``, over the ``longest`` events up to each: every event has as many keys."""
    place = torch.arange(key.shape[0], device=key.device)
    distance = torch.arange(longest, device=key.device)
    known = distance <= (place - jagged.offsets[jagged.rows])[:, None]
    keys = (place[:, None] - distance).clamp(min=0)
    scores = torch.einsum("nhd,nkhd->nhk", query, key[keys])
    lengths = jagged.lengths[jagged.rows][:, None, None]
    shares = weights.among(scores, distance, known[:, None, :], lengths)
    return torch.einsum("nhk,nkhd->nhd", shares.to(value.dtype), value[keys])


class SoftmaxWeights(nn.Module):
    """Shares of one, by the scores divided by the root of the ``width`` of a head (Vaswani et al. 2017)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = width**-0.5

    def attend(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
        """See ``Weights``."""
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)

    def among(self, scores: Tensor, distance: Tensor, known: Tensor, lengths: Tensor) -> Tensor:
        """See ``Weights``."""
        return (wide(scores) * self.scale).masked_fill(~known, -torch.inf).softmax(-1)

    def of_newest(self, scores: Tensor, jagged: Jagged) -> Tensor:
        """See ``Weights``."""
        return jagged.softmax(wide(scores) * self.scale)


class SiluWeights(nn.Module):
    """SiLU of score and a learned bias by distance, divided by the number of events (HSTU, arXiv 2402.17152, eq. 2).

    Such weights do not add up to one: how many events fit tells how strong an interest is.
    """

    def __init__(self, heads: int, longest: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(heads, longest))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
        """See ``Weights``."""
        steps = torch.arange(query.shape[2], device=query.device)
        distance = steps[:, None] - steps
        return self.among(query @ key.mT, distance.clamp(min=0), distance >= 0, lengths) @ value

    def among(self, scores: Tensor, distance: Tensor, known: Tensor, lengths: Tensor) -> Tensor:
        """See ``Weights``."""
        weights = nn.functional.silu(wide(scores) + _taken(self.bias.t(), distance).movedim(-1, 0))
        return weights.masked_fill(~known, 0.0) / lengths

    def of_newest(self, scores: Tensor, jagged: Jagged) -> Tensor:
        """See ``Weights``."""
        weights = nn.functional.silu(wide(scores) + _taken(self.bias.t(), jagged.ages))
        return weights / jagged.lengths[jagged.rows][:, None]
