"""Ids of sequences on their way to the towers: by sample when they are sent, by event when they are looked up.

A lookup of ``embeddings.event_lookups`` has a row for each event, whose number differs between ranks. For the exchange
each sample and column has a list of ids, as for any feature, so that the peers' samples follow each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from pipeline.embeddings.event_lookups import EventLookups, event_lookups
from pipeline.records.dataset import DatasetSchema

Ids: TypeAlias = tuple[Tensor, Tensor, Tensor | None]  # lengths, values, weights of the values


def by_key(ids: KeyedJaggedTensor) -> dict[str, Ids]:
    """Return the ids of every key."""
    parts: dict[str, Ids] = {}
    for key, jagged in ids.to_dict().items():
        parts[key] = (jagged.lengths(), jagged.values(), jagged.weights_or_none())
    return parts


def merge_kjts(parts: Mapping[str, Ids], keys: Sequence[str], stride: int, *, weighted: bool) -> KeyedJaggedTensor:
    """Return the ids of ``keys``, in order, of ``stride`` rows; if ``weighted``, ids without weights count 1."""
    of_keys = [parts[key] for key in keys]
    lengths, values, weights = _concat_ids(of_keys, weighted=weighted)
    return KeyedJaggedTensor(keys=[*keys], values=values, lengths=lengths, weights=weights, stride=stride)


def by_sample(lookups: EventLookups, ids: KeyedJaggedTensor, samples: int, events: Sequence[Tensor]) -> dict[str, Ids]:
    """Return the ids of ``Batch.lookups`` by feature and column; an event is one more id of its sample.

    Args:
        lookups: The meaning of the rows of ``ids``.
        ids: The ids by table.
        samples: The number of samples.
        events: For each sequence, the samples of its events.
    """
    sequences = dict.fromkeys(segment.sequence for segment in lookups.events)
    events_by_sample, event_counts = {}, {}
    for name, rows in zip(sequences, events, strict=True):
        events_by_sample[name] = torch.bincount(rows, minlength=samples).int()
        event_counts[name] = len(rows)
    sizes = [event_counts.get(segment.sequence, samples) for segment in lookups.segments]
    ids_of: dict[str, Ids] = {}
    for table, (lengths, values, weights) in by_key(ids).items():
        # The last rows fill the lookup up to those of other ranks. They have no segment, so ``zip`` drops them below.
        lengths_by_segment = lengths.split([*sizes, len(lengths) - sum(sizes)])
        ids_by_segment = [int(part.sum()) for part in lengths_by_segment]
        values_by_segment = values.split(ids_by_segment)
        weights_by_segment: Sequence[Tensor | None] = [None] * len(ids_by_segment)
        if weights is not None:
            weights_by_segment = weights.split(ids_by_segment)
        parts = zip(lookups.segments, lengths_by_segment, values_by_segment, weights_by_segment, strict=False)
        for segment, own_lengths, own_values, own_weights in parts:
            column = segment.columns.get(table)
            if column is not None:
                # A row of an event has one id; its sample has as many ids as events.
                own_lengths = events_by_sample.get(segment.sequence, own_lengths)
                ids_of[column] = (own_lengths, own_values, own_weights)
    return ids_of


class Blocks(Protocol):
    """Makes vectors of sequences (``training.sequence_vectors.SequenceEncoders``). ``vectors`` are by sequence."""

    vectors: nn.ModuleDict

    def take(self, looked_up: KeyedTensor, samples: int, events: Sequence[Tensor]) -> Any:
        """Return the embeddings from the lookup; ``pooled`` has those of features, [B, w] by name."""

    def __call__(self, taken: Any, events: Sequence[Tensor]) -> Tensor:
        """Return the vectors of the sequences, [B, S, D] float32."""


class TowerEvents:
    """The sequences of ``schema`` that a rank works on: those of its towers' ``own`` part of the schema.

    ``blocks`` are those of these sequences, None if there are none; the ranks of ``group`` share their ``tables`` and
    look them up in batches of one size. ``vectors`` has the modules of all sequences. ``weighted`` says that ids are
    sent with weights.
    """

    def __init__(
        self,
        schema: DatasetSchema,
        own: DatasetSchema,
        blocks: Blocks | None,
        vectors: nn.ModuleDict,
        tables: EmbeddingBagCollection,
        group: dist.ProcessGroup,
        *,
        weighted: bool,
    ) -> None:
        every, mine = event_lookups(schema), event_lookups(own)
        assert every is not None
        self.every, self.mine, self.blocks, self.vectors, self.tables = every, mine, blocks, vectors, tables
        self.columns: dict[str, list[str]] = {}
        for sequence in schema.sequences:
            self.columns[sequence.name] = [column.name for column in sequence.columns]
        self._own = [sequence.name for sequence in own.sequences]
        self._group, self._weighted = group, weighted

    def lookup(self, parts: Mapping[str, Ids], samples: int) -> tuple[KeyedJaggedTensor, list[Tensor]]:
        """Return the lookup of the local sequences' tables for ids by sample, and each event's sample. Collective."""
        assert self.mine is not None
        # 1. Find the sample of each event, and the rows of each segment of the lookup: samples, or events of a
        # sequence.
        events = []
        event_counts = {}
        for name in self._own:
            lengths = parts[self.columns[name][0]][0]
            rows_of_events = torch.arange(samples, device=lengths.device).repeat_interleave(lengths)
            events.append(rows_of_events)
            event_counts[name] = len(rows_of_events)
        rows, total = [], 0
        for segment in self.mine.segments:
            rows.append(event_counts.get(segment.sequence, samples))
            total += event_counts.get(segment.sequence, 0)
        # 2. Add empty rows, so that all ranks of the group look up equally many.
        most = total
        if dist.get_world_size(self._group) > 1:
            largest = torch.tensor([total], device=events[0].device)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
            most = int(largest)
        padding = most - total
        # 3. Collect the ids of every table, segment by segment. If a table has no column, the segment's rows are empty,
        # with the dtypes of the others.
        some_lengths, some_values, _ = next(iter(parts.values()))
        no_values = some_values.new_zeros(0)
        tables = {}
        for table in self.mine.tables:
            chosen: list[Ids] = []
            for segment, count in zip(self.mine.segments, rows, strict=True):
                column = segment.columns.get(table)
                if column is None:
                    chosen.append((some_lengths.new_zeros(count), no_values, None))
                    continue
                lengths, values, weights = parts[column]
                if segment.sequence:
                    # A row of an event has one id.
                    lengths = lengths.new_ones(count)
                chosen.append((lengths, values, weights))
            chosen.append((some_lengths.new_zeros(padding), no_values, None))
            tables[table] = _concat_ids(chosen, weighted=self._weighted)
        return merge_kjts(tables, self.mine.tables, sum(rows) + padding, weighted=self._weighted), events


def _concat_ids(parts: Sequence[Ids], *, weighted: bool) -> Ids:
    lengths, values, weights = zip(*parts, strict=True)
    if not weighted:
        return torch.cat(lengths), torch.cat(values), None
    known_weights = []
    for ids, own_weights in zip(values, weights, strict=True):
        if own_weights is None:
            own_weights = torch.ones(len(ids), device=ids.device)
        known_weights.append(own_weights)
    return torch.cat(lengths), torch.cat(values), torch.cat(known_weights)
