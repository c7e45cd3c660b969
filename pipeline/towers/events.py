"""Ids of sequences on their way to the towers: by sample where they travel, by event where they are looked up.

A lookup of ``embeddings.event_lookups`` has a row for each event, of which ranks have unlike numbers. What travels has
a list of ids for each sample and column, as any feature's ids do, so that the peers' samples follow each other.
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
    """The ids of every key."""
    return {key: (each.lengths(), each.values(), each.weights_or_none()) for key, each in ids.to_dict().items()}


def merge_kjts(parts: Mapping[str, Ids], keys: Sequence[str], stride: int, *, weighted: bool) -> KeyedJaggedTensor:
    """The ids of ``keys``, in their order, of ``stride`` rows; where they are ``weighted``, those without count 1."""
    lengths, values, weights = _joined([parts[key] for key in keys], weighted=weighted)
    return KeyedJaggedTensor(keys=[*keys], values=values, lengths=lengths, weights=weights, stride=stride)


def by_sample(lookups: EventLookups, ids: KeyedJaggedTensor, samples: int, events: Sequence[Tensor]) -> dict[str, Ids]:
    """The ids of ``Batch.lookups`` by feature and column; an event is one more id of its sample. ``events``: its."""
    sequences = dict.fromkeys(each.sequence for each in lookups.events)
    places = dict(zip(sequences, events, strict=True))
    counts = {name: torch.bincount(rows, minlength=samples).int() for name, rows in places.items()}
    sizes = [len(places[each.sequence]) if each.sequence else samples for each in lookups.segments]
    found: dict[str, Ids] = {}
    for table, (lengths, values, weights) in by_key(ids).items():
        rows = [*sizes, len(lengths) - sum(sizes)]
        per_row = lengths.split(rows)
        ends = [int(each.sum()) for each in per_row]
        own = values.split(ends)
        heavy = None if weights is None else weights.split(ends)
        for number, segment in enumerate(lookups.segments):
            if (column := segment.columns.get(table)) is not None:
                size = counts[segment.sequence] if segment.sequence else per_row[number]
                found[column] = size, own[number], None if heavy is None else heavy[number]
    return found


class Blocks(Protocol):
    """What makes vectors of sequences: ``training.histories.Histories``. ``vectors``: the modules, by sequence."""

    vectors: nn.ModuleDict

    def take(self, looked_up: KeyedTensor, samples: int, events: Sequence[Tensor]) -> Any:
        """The embeddings that the lookup gave; ``pooled`` has those of features, [B, w] by name."""

    def __call__(self, taken: Any, events: Sequence[Tensor]) -> Tensor:
        """The vectors of the sequences, [B, S, D] float32."""


class TowerEvents:
    """What of the sequences of ``schema`` a rank works on: those of its towers' ``own`` part of the schema.

    ``blocks``: of these sequences, None where there are none, whose ``tables`` the ranks of ``group`` share and look up
    in batches of one size. ``vectors``: the modules of all sequences. ``weighted``: ids travel with weights.
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
        self.columns = {each.name: [column.name for column in each.columns] for each in schema.sequences}
        self._own = [each.name for each in own.sequences]
        self._group, self._weighted = group, weighted

    def lookup(self, parts: Mapping[str, Ids], samples: int) -> tuple[KeyedJaggedTensor, list[Tensor]]:
        """The lookup of the own sequences' tables for ids by sample, and the sample of each event. Collective."""
        assert self.mine is not None
        lengths = [parts[self.columns[name][0]][0] for name in self._own]
        events = [torch.arange(samples, device=each.device).repeat_interleave(each) for each in lengths]
        sizes = dict(zip(self._own, map(len, events), strict=True))
        rows = [sizes.get(segment.sequence, samples) for segment in self.mine.segments]
        in_all = sum(sizes[segment.sequence] for segment in self.mine.events)
        rows.append(self._most(in_all, lengths[0].device) - in_all)
        tables = {}
        for table in self.mine.tables:
            columns = [*(segment.columns.get(table) for segment in self.mine.segments), None]
            one_each = [*(bool(segment.sequence) for segment in self.mine.segments), False]
            chosen = [_rows(parts, *each) for each in zip(columns, rows, one_each, strict=True)]
            tables[table] = _joined(chosen, weighted=self._weighted)
        return merge_kjts(tables, self.mine.tables, sum(rows), weighted=self._weighted), events

    def _most(self, rows: int, device: torch.device) -> int:
        """The most rows of events on a rank of the group, of which this one has ``rows``."""
        if dist.get_world_size(self._group) == 1:
            return rows
        most = torch.tensor([rows], device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        return int(most)


def _rows(parts: Mapping[str, Ids], column: str | None, rows: int, one_each: bool) -> Ids:
    """The ids of ``column`` in ``rows`` rows of a lookup, ``one_each`` in those of events; None: there are none."""
    lengths, values, weights = parts[column] if column is not None else next(iter(parts.values()))
    if column is None:
        return lengths.new_zeros(rows), values.new_zeros(0), None
    return (lengths.new_ones(rows) if one_each else lengths), values, weights


def _joined(parts: Sequence[Ids], *, weighted: bool) -> Ids:
    lengths, values, _ = (list(each) for each in zip(*parts, strict=True))
    return torch.cat(lengths), torch.cat(values), torch.cat([_weights(each) for each in parts]) if weighted else None


def _weights(ids: Ids) -> Tensor:
    return torch.ones(len(ids[1]), device=ids[1].device) if ids[2] is None else ids[2]
