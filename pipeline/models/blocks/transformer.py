"""A causal transformer over events that differ in number; the newest event, or the target, gives the vector."""

from __future__ import annotations

from torch import Tensor, nn

from pipeline.models.layers import Jagged, mlp, wide
from pipeline.models.layers.jagged_attention import SoftmaxWeights, causal, newest


class TransformerLayer(nn.Module):
    """forward(values [n, D], their places) -> [n, D], or [B, D] of the newest events alone (``last``).

    Attention and an MLP, each behind a norm and beside its input (SASRec, arXiv 1808.09781, section 3.2). ``heads``
    divides D; ``longest``: events of a sample at most.
    """

    def __init__(self, dim: int, heads: int, longest: int) -> None:
        super().__init__()
        self.heads, self.longest = heads, longest
        self.query, self.pair = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.output = nn.Linear(dim, dim)
        self.first_norm, self.second_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.forward_part = mlp([dim, 4 * dim, dim], last_activation=False)
        self.weights = SoftmaxWeights(dim // heads)

    def forward(self, values: Tensor, jagged: Jagged, *, last: bool) -> Tensor:
        normed = self.first_norm(values)
        key, value = (self._by_head(part) for part in wide(self.pair(normed)).chunk(2, dim=1))
        asking = jagged.newest(normed) if last else normed
        query = self._by_head(wide(self.query(asking)))
        if last:
            seen = newest(query, key, value, jagged, self.weights)
        else:
            seen = causal(query, key, value, jagged, self.weights, self.longest)
        own = (jagged.newest(values) if last else values) + wide(self.output(seen.flatten(1)))
        result: Tensor = own + wide(self.forward_part(self.second_norm(own)))
        return result

    def _by_head(self, values: Tensor) -> Tensor:
        return values.unflatten(1, (self.heads, -1))


class Transformer(nn.Module):
    """forward(events [n, D], their places, target [B, D] or None) -> [B, D].

    ``targeted``: the target is the last of the events (BST, arXiv 1905.06874), else the newest event speaks for all.
    """

    def __init__(self, dim: int, layers: int, heads: int, max_length: int, *, targeted: bool) -> None:
        super().__init__()
        longest = max_length + targeted
        self.layers = nn.ModuleList(TransformerLayer(dim, heads, longest) for _ in range(layers))
        self.norm, self.targeted = nn.LayerNorm(dim), targeted

    def forward(self, events: Tensor, jagged: Jagged, target: Tensor | None) -> Tensor:
        if self.targeted:
            assert target is not None
            events, jagged = jagged.followed_by(events, target)
        for number, layer in enumerate(self.layers, start=1):
            events = layer(events, jagged, last=number == len(self.layers))
        vectors: Tensor = self.norm(events)
        return vectors
