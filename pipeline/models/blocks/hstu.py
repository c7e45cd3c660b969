"""Hierarchical sequential transduction units over events that differ in number; the target is the last of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.models.layers import Jagged, wide
from pipeline.models.layers.jagged_attention import SiluWeights, causal, newest


class HstuLayer(nn.Module):
    """forward(values [n, D], their places, ages [n, w] or None) -> [n, D], or [B, D] of the newest events (``last``).

    U, V, Q, K = SiLU(W1 norm(X)); Y = W2 (norm(A V) * U) + X (arXiv 2402.17152, section 3.2). ``heads`` divides D;
    ``longest``: events of a sample at most. ``ages``: width w of the ages' embeddings, by which keys have a bias; or 0.
    """

    def __init__(self, dim: int, heads: int, longest: int, ages: int = 0) -> None:
        super().__init__()
        self.heads, self.longest = heads, longest
        self.asking, self.pair = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim)
        self.output = nn.Linear(dim, dim)
        self.norm, self.seen_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.weights = SiluWeights(heads, longest)
        self.age = nn.Linear(ages, heads, bias=False) if ages else None

    def forward(self, values: Tensor, jagged: Jagged, ages: Tensor | None = None, *, last: bool) -> Tensor:
        """New ``values`` [n, D]; with ``last`` only those of each sample's newest event, [B, D]."""
        normed = self.norm(values)
        key, value = (self._by_head(part) for part in self._silu(self.pair(normed)))
        gate, query = self._silu(self.asking(jagged.newest(normed) if last else normed))
        query = self._by_head(query)
        if self.age is not None and ages is not None:  # one more column of the keys, which every query takes as it is
            key = torch.cat([key, wide(self.age(ages))[:, :, None]], dim=2)
            query = torch.cat([query, torch.ones_like(query[:, :, :1])], dim=2)
        if last:
            seen = newest(query, key, value, jagged, self.weights)
        else:
            seen = causal(query, key, value, jagged, self.weights, self.longest)
        own = jagged.newest(values) if last else values
        result: Tensor = own + wide(self.output(self.seen_norm(seen.flatten(1)) * gate))
        return result

    def _silu(self, values: Tensor) -> tuple[Tensor, ...]:
        return nn.functional.silu(wide(values)).chunk(2, dim=1)

    def _by_head(self, values: Tensor) -> Tensor:
        return values.unflatten(1, (self.heads, -1))


class Hstu(nn.Module):
    """forward(events [n, D], their places, target [B, D], ages [n, ``ages``] or None) -> [B, D]."""

    def __init__(self, dim: int, layers: int, heads: int, max_length: int, ages: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(HstuLayer(dim, heads, max_length + 1, ages) for _ in range(layers))

    def forward(self, events: Tensor, jagged: Jagged, target: Tensor | None, ages: Tensor | None = None) -> Tensor:
        assert target is not None
        if ages is not None:  # the target has none: its time is the row's
            ages, _ = jagged.followed_by(ages, ages.new_zeros(target.shape[0], ages.shape[1]))
        events, jagged = jagged.followed_by(events, target)
        for number, layer in enumerate(self.layers, start=1):
            events = layer(events, jagged, ages, last=number == len(self.layers))
        return events
