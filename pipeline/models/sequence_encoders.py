"""The torch modules of sequence blocks, and those of a model's sequences, drawn from a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipeline.config.model import ModelConfig
from pipeline.config.sequences import AGE, event_feature
from pipeline.models.layers.jagged import (
    EventWeights,
    Jagged,
    SequenceVector,
    SiluWeights,
    SoftmaxWeights,
    causal,
    newest,
    wide,
)
from pipeline.models.layers.perceptron import initialise, mlp
from pipeline.records.dataset import DatasetSchema
from pipeline.specs.model import BlockInputs


class TargetAttention(nn.Module):
    """forward(events [n, D], their places, target [B, D]) -> [B, D]: the sum of the events, weighed by an MLP.

    The MLP takes event, target, their difference and their product (DIN, section 4.3). With ``softmax`` the weights of
    a sample add up to one.
    """

    def __init__(self, dim: int, hidden: Sequence[int], *, softmax: bool) -> None:
        super().__init__()
        self.weigh = mlp([4 * dim, *hidden, 1], last_activation=False)
        self.softmax, self.seen = softmax, EventWeights()

    def forward(self, events: Tensor, jagged: Jagged, target: Tensor | None) -> Tensor:
        assert target is not None
        own = jagged.of_samples(target)
        scores = self.weigh(torch.cat([events, own, events - own, events * own], dim=1)).to(events.dtype)
        if self.softmax:
            scores = jagged.softmax(scores)
        weights = self.seen(scores)
        return jagged.sum(events * weights)


class HstuLayer(nn.Module):
    """forward(values [n, D], their places, ages [n, w] or None) -> [n, D], or [B, D] of the newest events (``last``).

    U, V, Q, K = SiLU(W1 norm(X)); Y = W2 (norm(A V) * U) + X (arXiv 2402.17152, section 3.2). ``heads`` divides D;
    ``longest`` is the most events of a sample. ``ages`` is the width w of the ages' embeddings, by which keys have a
    bias; or 0.
    """

    def __init__(self, dim: int, heads: int, longest: int, ages: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.longest = longest
        self.asking = nn.Linear(dim, 2 * dim)
        self.pair = nn.Linear(dim, 2 * dim)
        self.output = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.seen_norm = nn.LayerNorm(dim)
        self.weights = SiluWeights(heads, longest)
        self.age = nn.Linear(ages, heads, bias=False) if ages else None

    def forward(self, values: Tensor, jagged: Jagged, ages: Tensor | None = None, *, last: bool) -> Tensor:
        """Return new ``values`` [n, D]; with ``last`` only those of each sample's newest event, [B, D]."""
        normed = self.norm(values)
        by_head = self.heads, -1
        # Queries and gates have a separate linear layer, since in the last layer only the newest events need them.
        key, value = nn.functional.silu(wide(self.pair(normed))).chunk(2, dim=1)
        key = key.unflatten(1, by_head)
        value = value.unflatten(1, by_head)
        # With ``last``, only the newest event has a query, so the work is linear in the number of events.
        asking = jagged.newest(normed) if last else normed
        gate, query = nn.functional.silu(wide(self.asking(asking))).chunk(2, dim=1)
        query = query.unflatten(1, by_head)
        if self.age is not None and ages is not None:
            # The bias is one more column of the keys, which every query multiplies by 1.
            key = torch.cat([key, wide(self.age(ages))[:, :, None]], dim=2)
            query = torch.cat([query, torch.ones_like(query[:, :, :1])], dim=2)
        if last:
            seen = newest(query, key, value, jagged, self.weights)
            own = jagged.newest(values)
        else:
            seen = causal(query, key, value, jagged, self.weights, self.longest)
            own = values
        result: Tensor = own + wide(self.output(self.seen_norm(seen.flatten(1)) * gate))
        return result


class Hstu(nn.Module):
    """forward(events [n, D], their places, target [B, D], ages [n, ``ages``] or None) -> [B, D]."""

    def __init__(self, dim: int, layers: int, heads: int, max_length: int, ages: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(HstuLayer(dim, heads, max_length + 1, ages) for _ in range(layers))

    def forward(self, events: Tensor, jagged: Jagged, target: Tensor | None, ages: Tensor | None = None) -> Tensor:
        assert target is not None
        if ages is not None:
            # The target has no age, since its time is the row's.
            ages, _ = jagged.followed_by(ages, ages.new_zeros(target.shape[0], ages.shape[1]))
        events, jagged = jagged.followed_by(events, target)
        for number, layer in enumerate(self.layers, start=1):
            # Only one vector for each sample is needed, so the last layer computes no others.
            events = layer(events, jagged, ages, last=number == len(self.layers))
        return events


class EventSum(nn.Module):
    """forward(events [n, D], their places, target) -> [B, D]."""

    def forward(self, events: Tensor, jagged: Jagged, target: Tensor | None) -> Tensor:
        return jagged.sum(events)


class TransformerLayer(nn.Module):
    """forward(values [n, D], their places) -> [n, D], or [B, D] of the newest events alone (``last``).

    Attention and an MLP, each after a norm and with a residual sum (SASRec, arXiv 1808.09781, section 3.2). ``heads``
    divides D; ``longest`` is the most events of a sample.
    """

    def __init__(self, dim: int, heads: int, longest: int) -> None:
        super().__init__()
        self.heads = heads
        self.longest = longest
        self.query = nn.Linear(dim, dim)
        self.pair = nn.Linear(dim, 2 * dim)
        self.output = nn.Linear(dim, dim)
        self.first_norm = nn.LayerNorm(dim)
        self.second_norm = nn.LayerNorm(dim)
        self.forward_part = mlp([dim, 4 * dim, dim], last_activation=False)
        self.weights = SoftmaxWeights(dim // heads)

    def forward(self, values: Tensor, jagged: Jagged, *, last: bool) -> Tensor:
        normed = self.first_norm(values)
        by_head = self.heads, -1
        key, value = wide(self.pair(normed)).chunk(2, dim=1)
        key = key.unflatten(1, by_head)
        value = value.unflatten(1, by_head)
        # Keys are of all events, but with ``last`` only the newest event has a query.
        asking = jagged.newest(normed) if last else normed
        query = wide(self.query(asking)).unflatten(1, by_head)
        if last:
            seen = newest(query, key, value, jagged, self.weights)
            own = jagged.newest(values)
        else:
            seen = causal(query, key, value, jagged, self.weights, self.longest)
            own = values
        own = own + wide(self.output(seen.flatten(1)))
        result: Tensor = own + wide(self.forward_part(self.second_norm(own)))
        return result


class Transformer(nn.Module):
    """forward(events [n, D], their places, target [B, D] or None) -> [B, D].

    With ``targeted`` the target is the last of the events (BST, arXiv 1905.06874); otherwise the newest event is used.
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


def build_sequences(model: ModelConfig, schema: DatasetSchema, seed: int) -> nn.ModuleDict:
    """Build a ``SequenceVector`` for each sequence of ``schema``, by name.

    Initial weights depend on ``seed`` and the name alone. The global random state stays as it is.
    """
    vectors = nn.ModuleDict()
    for sequence in schema.sequences:
        settings = model.sequence(sequence.name)
        spec = settings.block_at(f"model.sequences.{sequence.name}")
        widths = [model.dim_of(column.owner) for column in sequence.columns]
        # Find the column of the events' ages, if there is one and the block uses it.
        age = None
        names = [column.name for column in sequence.columns]
        if spec.ages and event_feature(sequence.name, AGE) in names:
            age = names.index(event_feature(sequence.name, AGE))
        ages = widths[age] if age is not None else 0
        # torch's layers draw weights when they are made, which must not change the global random state. ``initialise``
        # draws them again from the seed.
        with torch.random.fork_rng(devices=()):
            block = spec.build(BlockInputs(dim=model.embedding_dim, max_length=sequence.max_length, ages=ages))
            vector = SequenceVector(
                widths,
                model.embedding_dim,
                sequence.max_length,
                block,
                targeted=spec.targeted,
                places=settings.places,
                age=age,
            )
        # Derive the seed from the name, not the position, so that adding a sequence does not change the others'
        # weights.
        digest = hashlib.blake2b(f"{seed}|{sequence.name}".encode(), digest_size=8).digest()
        sequence_seed = int.from_bytes(digest, "little") >> 1
        initialise(vector, sequence_seed)
        vector.start(sequence_seed)
        vectors[sequence.name] = vector
    return vectors
