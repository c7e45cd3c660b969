"""The ids of sequences in a batch: the rows of their tables' lookup, and which sample each event is of."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.embeddings.event_lookups import EventLookups, Segment, event_lookups
from pipeline.records import DatasetSchema
from pipeline.training.order import Deal
from pipeline.training.parquet import Columns

Bags = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # lengths int32, values int32, weights of the values


class EventBuilder:
    """Makes ``Batch.lookups`` and ``Batch.events`` of taken rows. ``single_at``: where single-valued features are."""

    def __init__(self, lookups: EventLookups, schema: DatasetSchema, single_at: Mapping[str, int]) -> None:
        self._lookups, self._single_at = lookups, single_at
        self._first = _first_columns(schema)
        pooled = set(lookups.features)
        self._weighted = any(column.weighted for column in schema.sparse if column.name in pooled)

    def build(self, rows: Columns, most: int) -> tuple[KeyedJaggedTensor, tuple[torch.Tensor, ...]]:
        """The lookup, filled up with empty rows to ``most`` rows of events, and the sample of each event."""
        count = len(rows.labels)
        lengths = {name: np.diff(rows.ragged[column].offsets) for name, column in self._first.items()}
        sizes = {name: int(each.sum()) for name, each in lengths.items()}
        pad = max(most - sum(sizes[segment.sequence] for segment in self._lookups.events), 0)
        filling = (np.zeros(pad, np.int32), np.zeros(0, np.int32), None)
        parts: list[Bags] = []
        for table in self._lookups.tables:
            parts += [
                self._bags(segment.columns.get(table), segment, rows, sizes.get(segment.sequence, count))
                for segment in self._lookups.segments
            ]
            parts.append(filling)
        bags = np.concatenate([part[0] for part in parts])
        lookup = KeyedJaggedTensor(
            keys=[*self._lookups.tables],
            values=torch.from_numpy(np.concatenate([part[1] for part in parts])),
            lengths=torch.from_numpy(bags),
            weights=torch.from_numpy(np.concatenate([_weights(part) for part in parts])) if self._weighted else None,
            stride=len(bags) // len(self._lookups.tables),
        )
        return lookup, tuple(torch.from_numpy(np.repeat(np.arange(count), each)) for each in lengths.values())

    def _bags(self, column: str | None, segment: Segment, rows: Columns, count: int) -> Bags:
        """The ids of ``column`` in ``count`` rows of the lookup; None: there are none."""
        if column is None:
            return np.zeros(count, np.int32), np.zeros(0, np.int32), None
        if column in self._single_at:
            return np.ones(count, np.int32), rows.single[self._single_at[column]], None
        ragged = rows.ragged[column]
        if segment.sequence:
            return np.ones(count, np.int32), ragged.values, None
        return np.diff(ragged.offsets).astype(np.int32), ragged.values, ragged.weights


class EventCounts:
    """How many rows of events the ranks have in a global batch; TorchRec's exchange wants one size on all of them.

    ``columns``: those whose lengths tell, which every rank reads of all rows.
    """

    def __init__(self, schema: DatasetSchema, deal: Deal) -> None:
        self._deal = deal
        lookups = event_lookups(schema)
        self.columns = [] if lookups is None else [_first_columns(schema)[each.sequence] for each in lookups.events]

    def most(self, rows: Columns, batch: int) -> int:
        """The most rows of events that a rank has in global batch ``batch``, whose ``rows`` these are; 0: none."""
        if not self.columns:
            return 0
        lengths = np.sum([np.diff(rows.ragged[name].offsets) for name in self.columns], axis=0)
        order, most, at = self._deal.order, 0, 0
        for rank in range(order.world_size):
            own = self._deal.owned(batch, rank, order.world_size)
            filler = int(lengths[at if own else 0])
            most = max(most, int(lengths[at : at + own].sum()) + (order.local_batch - own) * filler)
            at += own
        return most


def _first_columns(schema: DatasetSchema) -> dict[str, str]:
    """A column of each sequence, whose lengths are those of all."""
    return {sequence.name: sequence.columns[0].name for sequence in schema.sequences}


def _weights(bags: Bags) -> np.ndarray:
    return np.ones(len(bags[1]), np.float32) if bags[2] is None else bags[2]
