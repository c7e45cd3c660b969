"""From the embeddings of events to the vectors of sequences, beside the pooled embeddings of their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedTensor

from pipeline.config import ModelConfig
from pipeline.embeddings.event_lookups import EventLookups, event_lookups
from pipeline.models.sequence_encoders import build_sequences
from pipeline.records import DatasetSchema
from pipeline.training.event_parts import in_parts


@dataclass(frozen=True)
class Taken:
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
        self._columns = {each.name: [column.name for column in each.columns] for each in schema.sequences}
        self._candidates = {each.name: [column.table or None for column in each.columns] for each in schema.sequences}

    def of(self, schema: DatasetSchema) -> SequenceEncoders | None:
        """The part of ``schema``, which has some of the sequences; the modules are the same ones. None: it has none."""
        lookups = event_lookups(schema)
        return None if lookups is None else SequenceEncoders(schema, lookups, self.vectors, self._most)

    def take(self, looked_up: KeyedTensor, samples: int, events: Sequence[Tensor]) -> Taken:
        """The embeddings that the lookup of ``Batch.lookups`` gave, by what they are of."""
        counts = dict(zip(self._columns, (len(each) for each in events), strict=True))
        tables, start = looked_up.to_dict(), 0
        pooled: dict[str, Tensor] = {}
        single: dict[str, Tensor] = {}
        for segment in self._lookups.segments:
            stop = start + counts.get(segment.sequence, samples)
            into = single if segment.sequence else pooled
            into |= {name: tables[table][start:stop] for table, name in segment.columns.items()}
            start = stop
        return Taken(samples, pooled, single)

    def forward(self, taken: Taken, events: Sequence[Tensor]) -> Tensor:
        vectors = [
            in_parts(
                self.vectors[name],
                self._most,
                [taken.events[column] for column in columns],
                rows,
                [None if each is None else taken.pooled[each] for each in self._candidates[name]],
                taken.samples,
            )
            for (name, columns), rows in zip(self._columns.items(), events, strict=True)
        ]
        return torch.stack(vectors, dim=1)


def histories_of(
    model: ModelConfig, schema: DatasetSchema, seed: int, most: int | None = None
) -> SequenceEncoders | None:
    """The module of the sequences of ``schema``; None where it has none. ``most``: ``train.max_events``."""
    lookups = event_lookups(schema)
    if lookups is None:
        return None
    return SequenceEncoders(schema, lookups, build_sequences(model, schema, seed), most)
