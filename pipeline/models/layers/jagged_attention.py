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

from pipeline.models.layers.jagged import EventWeights, Jagged, wide

_NEVER = -1e4  # a score whose SiLU is 0


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
    if torch.compiler.is_exporting():  # grids depend on lengths, which a program does not know
        return _windows(query, key, value, jagged, weights, longest)
    grids, widths = jagged.grids, [query.shape[2], key.shape[2], value.shape[2]]
    filled = torch.cat([query, key, value], dim=2).index_select(0, grids.events)
    parts = list[Tensor]()
    for part, (samples, most), lengths in zip(grids.split(filled), grids.sizes, grids.lengths, strict=True):
        q, k, v = part.view(samples, most, *filled.shape[1:]).transpose(1, 2).split(widths, dim=3)  # [b, H, L, d]
        # What fills a sample up is behind its events, so that none of them sees it.
        parts.append(weights.attend(q, k, v, lengths[:, None, None, None]).transpose(1, 2).flatten(0, 1))
    return torch.cat(parts).index_select(0, grids.cells)


def newest(query: Tensor, key: Tensor, value: Tensor, jagged: Jagged, weights: Weights) -> Tensor:
    """[B, H, d]: the ``value``s [n, H, d] of each sample's events, weighed for a ``query`` [B, H, d] of the newest."""
    heads = value.shape[1]
    own = jagged.of_samples(query.flatten(1)).view_as(key)
    shares = weights.of_newest((own * key).sum(2), jagged)
    return jagged.sum((value * shares[:, :, None].to(value.dtype)).flatten(1)).unflatten(1, (heads, -1))


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

    Such weights do not add up to one: how many events fit tells how strong an interest is.
    """

    def __init__(self, heads: int, longest: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(heads, longest))
        self.seen = EventWeights()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
        """See ``Weights``."""
        scores = wide(query @ key.mT).add_(self._bias_of(query.shape[2]))
        return (nn.functional.silu(scores).to(value.dtype) @ value) / lengths

    def _bias_of(self, events: int) -> Tensor:
        """[H, L, L] for that many ``events``, from query to key; ``_NEVER`` for keys after the query.

        No sample has distances beyond those with a bias: what has is behind its last event.
        """
        later = self.bias.new_full((self.bias.shape[0], events - 1), _NEVER)
        known = nn.functional.pad(self.bias[:, :events], (0, max(0, events - self.bias.shape[1])))
        by_distance = torch.cat([known.flip(1), later], dim=1)  # from the farthest key to the last one
        return by_distance.unfold(1, events, 1).flip(1)

    def among(self, scores: Tensor, distance: Tensor, known: Tensor, lengths: Tensor) -> Tensor:
        """See ``Weights``."""
        weights = nn.functional.silu(wide(scores) + _taken(self.bias.t(), distance).movedim(-1, 0))
        return weights.masked_fill(~known, 0.0) / lengths

    def of_newest(self, scores: Tensor, jagged: Jagged) -> Tensor:
        """See ``Weights``."""
        weights = nn.functional.silu(wide(scores) + _taken(self.bias.t(), jagged.ages))
        shares: Tensor = self.seen(weights / jagged.lengths[jagged.rows][:, None])
        return shares
