"""The ids of sequences in a batch: the rows of their tables' lookup, and which sample each event is of."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch.nn import functional
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.embeddings.event_lookups import EventLookups, Segment
from pipeline.records import DatasetSchema
from pipeline.training.parquet import DecodedColumns

Bags = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # lengths int32, values int32, weights of the values


class EventBuilder:
    """Makes ``Batch.lookups`` and ``Batch.events`` of taken rows. ``single_at``: where single-valued features are."""

    def __init__(self, lookups: EventLookups, schema: DatasetSchema, single_at: Mapping[str, int]) -> None:
        self._lookups, self._single_at = lookups, single_at
        self._first = _first_columns(schema)
        pooled = set(lookups.features)
        self._weighted = any(column.weighted for column in schema.sparse if column.name in pooled)

    def build(self, rows: DecodedColumns) -> tuple[KeyedJaggedTensor, tuple[torch.Tensor, ...]]:
        """The lookup, and the sample of each event."""
        count = len(rows.labels)
        lengths = {name: np.diff(rows.ragged[column].offsets) for name, column in self._first.items()}
        sizes = {name: int(each.sum()) for name, each in lengths.items()}
        parts: list[Bags] = [
            self._bags(segment.columns.get(table), segment, rows, sizes.get(segment.sequence, count))
            for table in self._lookups.tables
            for segment in self._lookups.segments
        ]
        bags = np.concatenate([part[0] for part in parts])
        lookup = KeyedJaggedTensor(
            keys=[*self._lookups.tables],
            values=torch.from_numpy(np.concatenate([part[1] for part in parts])),
            lengths=torch.from_numpy(bags),
            weights=torch.from_numpy(np.concatenate([_weights(part) for part in parts])) if self._weighted else None,
            stride=len(bags) // len(self._lookups.tables),
        )
        return lookup, tuple(torch.from_numpy(np.repeat(np.arange(count), each)) for each in lengths.values())

    def _bags(self, column: str | None, segment: Segment, rows: DecodedColumns, count: int) -> Bags:
        """The ids of ``column`` in ``count`` rows of the lookup; None: there are none."""
        if column is None:
            return np.zeros(count, np.int32), np.zeros(0, np.int32), None
        if column in self._single_at:
            return np.ones(count, np.int32), rows.single[self._single_at[column]], None
        ragged = rows.ragged[column]
        if segment.sequence:
            return np.ones(count, np.int32), ragged.values, None
        return np.diff(ragged.offsets).astype(np.int32), ragged.values, ragged.weights


def lengthened(lookup: KeyedJaggedTensor, rows: int) -> KeyedJaggedTensor:
    """``lookup`` of each table, with empty rows behind its own, up to ``rows``."""
    tables = len(lookup.keys())
    lengths = functional.pad(lookup.lengths().view(tables, -1), (0, rows - lookup.stride()))
    return KeyedJaggedTensor(
        keys=lookup.keys(),
        values=lookup.values(),
        lengths=lengths.view(-1),
        weights=lookup.weights_or_none(),
        stride=rows,
    )


def _first_columns(schema: DatasetSchema) -> dict[str, str]:
    """A column of each sequence, whose lengths are those of all."""
    return {sequence.name: sequence.columns[0].name for sequence in schema.sequences}


def _weights(bags: Bags) -> np.ndarray:
    return np.ones(len(bags[1]), np.float32) if bags[2] is None else bags[2]
