"""Computes the vectors of sequences from the embeddings of events, for a bounded number of events at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec.sparse.jagged_tensor import KeyedTensor

from pipeline.config.model import ModelConfig
from pipeline.embeddings.event_lookups import EventLookups, event_lookups
from pipeline.models.layers.jagged import add_samples
from pipeline.models.sequence_encoders import build_sequences
from pipeline.records.dataset import DatasetSchema

Part = tuple[int, int]  # samples, events
# Numbers of events, and of samples, between two powers of two that a block is given on a CPU. More of them mean less to
# fill up, and more kernels to make.
SHAPES = 16


class FilledUp:
    """A ``SequenceVector`` that a training on a CPU gives few different numbers of events and samples.

    oneDNN makes a kernel for every shape of a product, which takes longer than the product itself, and keeps a thousand
    of them. Batches hardly ever have the same number of events, so samples of zeros fill them up to one of ``SHAPES``
    between two powers of two. The vectors of these are left out again, so they add nothing to a gradient.

    Args:
        vector: Called with columns, rows, candidates and the number of samples.
        longest: Events that a sample has at most.
    """

    def __init__(self, vector: nn.Module, longest: int) -> None:
        self._vector, self._longest = vector, longest

    def __call__(
        self, columns: Sequence[Tensor], rows: Tensor, candidates: Sequence[Tensor | None], samples: int
    ) -> Tensor:
        """Return a vector of each sample, [samples, D]."""
        more_samples, more_events = fill_up(samples, len(rows), self._longest)
        vectors: Tensor
        if not more_samples or not self._vector.training or rows.device.type != "cpu":
            vectors = self._vector(columns, rows, candidates, samples)
            return vectors
        columns, rows, candidates = add_samples(columns, rows, candidates, samples, more_samples, more_events)
        vectors = self._vector(columns, rows, candidates, samples + more_samples)
        return vectors[:samples]


def fill_up(samples: int, events: int, longest: int) -> Part:
    """Return the samples and events to add, so that both numbers are among the ``SHAPES`` of their power of two.

    Every sample that is added has 1 to ``longest`` events.
    """
    if longest == 1:
        # As many events as samples, in every batch.
        return 0, 0
    step = max((1 << (events.bit_length() - 1)) // SHAPES, 1)
    by = max((1 << (samples.bit_length() - 1)) // SHAPES, 1)
    # Up to ``step`` - 1 events more than samples are added, and each sample can have ``longest`` - 1 more than one.
    least = -(-(step - 1) // (longest - 1))
    more = least + -(samples + least) % by
    if not more:
        more = by
    return more, more + -(events + more) % step


def encode_in_parts(
    vector: FilledUp | nn.Module,
    most: int | None,
    columns: Sequence[Tensor],
    rows: Tensor,
    candidates: Sequence[Tensor | None],
    samples: int,
) -> Tensor:
    """Compute the ``SequenceVector`` of all ``samples``, [B, D], with ``most`` events at a time (None: all).

    Consecutive samples are processed together as long as their events are few enough (``train.max_events``), and what
    the block keeps for the backward pass is recomputed there (Chen et al. 2016, arXiv 1604.06174). There is still one
    lookup and one step.

    Sums over samples, as in the gradients of parameters, are added up in another order; the rest is the same.
    """
    if most is None or len(rows) <= most:
        vectors: Tensor = vector(columns, rows, candidates, samples)
        return vectors
    parts = split_samples(torch.bincount(rows, minlength=samples).cpu().numpy(), most)
    counts, events = map(list, zip(*parts, strict=True))
    # Use one split instead of slices, so that the gradients of its parts are joined only once.
    by_column = [column.split(events) for column in columns]
    by_candidate: list[Sequence[Tensor | None]] = []
    for candidate in candidates:
        by_candidate.append([None] * len(parts) if candidate is None else candidate.split(counts))
    # The first sample of each part, which is subtracted because samples are numbered within their part.
    firsts = accumulate(counts, initial=0)
    compute = vector
    if torch.is_grad_enabled():
        # Activations are recomputed in the backward pass, from the same random state.
        compute = partial(checkpoint, vector, use_reentrant=False)  # type: ignore[assignment]
    found = []
    for number, (own, first, count) in enumerate(zip(rows.split(events), firsts, counts, strict=False)):
        own_columns = [each[number] for each in by_column]
        own_candidates = [each[number] for each in by_candidate]
        found.append(compute(own_columns, own - first, own_candidates, count))
    return torch.cat(found)


def split_samples(lengths: np.ndarray, most: int) -> list[Part]:
    """Split consecutive samples of these ``lengths`` into parts of at most ``most`` events and at least one sample."""
    ends, parts, start, before = np.cumsum(lengths), list[Part](), 0, 0
    while start < len(lengths):
        # A sample with more than ``most`` events is a part by itself, since a block needs all events of a sample.
        stop = max(int(np.searchsorted(ends, before + most, side="right")), start + 1)
        end = int(ends[stop - 1])
        parts.append((stop - start, end - before))
        start, before = stop, end
    return parts


@dataclass(frozen=True)
class LookedUpEmbeddings:
    """Embeddings by name: ``pooled`` [b, w] of features, ``events`` [n, w] of columns; b is ``samples``."""

    samples: int
    pooled: Mapping[str, Tensor]
    events: Mapping[str, Tensor]


class SequenceEncoders(nn.Module):
    """forward(embeddings, events) -> the vectors of all sequences, [b, S, ``dim``] float32.

    ``vectors``: the modules of ``build_sequences``, by sequence. ``most``: events that a block takes at once, if any.
    """

    def __init__(
        self, schema: DatasetSchema, lookups: EventLookups, vectors: nn.ModuleDict, most: int | None = None
    ) -> None:
        super().__init__()
        self._lookups, self.vectors, self._most = lookups, vectors, most
        self._columns: dict[str, list[str]] = {}
        # Maps each column of events to the sample's own feature of the same table, with which the block compares them.
        self._candidates: dict[str, list[str | None]] = {}
        self._encoders: dict[str, FilledUp] = {}
        for sequence in schema.sequences:
            self._encoders[sequence.name] = FilledUp(vectors[sequence.name], sequence.max_length)
            self._columns[sequence.name] = [column.name for column in sequence.columns]
            self._candidates[sequence.name] = [column.table or None for column in sequence.columns]

    def of(self, schema: DatasetSchema) -> SequenceEncoders | None:
        """Return encoders for ``schema``, with the same modules for its part of the sequences; None if it has none."""
        lookups = event_lookups(schema)
        if lookups is None:
            return None
        return SequenceEncoders(schema, lookups, self.vectors, self._most)

    def take(self, looked_up: KeyedTensor, samples: int, events: Sequence[Tensor]) -> LookedUpEmbeddings:
        """Return the embeddings that the lookup of ``Batch.lookups`` gave, by feature and by column."""
        counts = dict(zip(self._columns, map(len, events), strict=True))
        tables, start = looked_up.to_dict(), 0
        pooled: dict[str, Tensor] = {}
        single: dict[str, Tensor] = {}
        for segment in self._lookups.segments:
            stop = start + counts.get(segment.sequence, samples)
            into = single if segment.sequence else pooled
            for table, name in segment.columns.items():
                into[name] = tables[table][start:stop]
            start = stop
        return LookedUpEmbeddings(samples, pooled, single)

    def forward(self, taken: LookedUpEmbeddings, events: Sequence[Tensor]) -> Tensor:
        vectors = []
        for (name, columns), rows in zip(self._columns.items(), events, strict=True):
            values = [taken.events[column] for column in columns]
            candidates: list[Tensor | None] = []
            for each in self._candidates[name]:
                candidates.append(None if each is None else taken.pooled[each])
            vectors.append(encode_in_parts(self._encoders[name], self._most, values, rows, candidates, taken.samples))
        return torch.stack(vectors, dim=1)


def build_sequence_encoders(
    model: ModelConfig, schema: DatasetSchema, seed: int, most: int | None = None
) -> SequenceEncoders | None:
    """Build the module of the sequences of ``schema``.

    Args:
        most: ``train.max_events``.

    Returns:
        The module; None where ``schema`` has no sequences.
    """
    lookups = event_lookups(schema)
    if lookups is None:
        return None
    return SequenceEncoders(schema, lookups, build_sequences(model, schema, seed), most)
