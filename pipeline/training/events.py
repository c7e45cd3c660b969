"""The ids of sequences in a batch: the rows of their tables' lookup, and which sample each event is of."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.embeddings.event_lookups import EventLookups, Segment, event_lookups
from pipeline.records import DatasetSchema
from pipeline.training.parquet import Columns
from pipeline.training.windows import Window

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
    """How many rows of events each rank has in the coming global batches, which every rank knows: it decodes all rows.

    TorchRec's exchange wants a batch of one size on all ranks. ``size``: of a global batch of ``rows`` in all, of which
    each of the ``ranks`` takes ``local``.
    """

    def __init__(self, schema: DatasetSchema, rows: int, *, size: int, local: int, ranks: int) -> None:
        self._rows, self._size, self._local, self._ranks = rows, size, local, ranks
        lookups = event_lookups(schema)
        self._columns = [] if lookups is None else [_first_columns(schema)[each.sequence] for each in lookups.events]
        self._counts: dict[int, np.ndarray] = {}

    @property
    def active(self) -> bool:
        """Whether there are sequences."""
        return bool(self._columns)

    def add(self, window: Window, order: np.ndarray, first: int) -> None:
        """Take in the rows of ``window``, in the ``order`` of the stream, of the batches from ``first`` on."""
        if not self._columns:
            return
        lengths = sum(np.diff(window.columns.ragged[name].offsets) for name in self._columns)[order]  # type: ignore[index]
        size, local = self._size, self._local
        end = window.start + window.rows
        for batch in range(max(first, window.start // size), -(-end // size)):
            start = batch * size
            low, high = max(start, window.start), min(start + size, end)
            ranks = (np.arange(low, high) - start) // local
            counts = self._counts.setdefault(batch, np.zeros(self._ranks, np.int64))
            own = lengths[low - window.start : high - window.start]
            counts += np.bincount(ranks, own, self._ranks).astype(np.int64)
            if low == start:  # padding repeats the global batch's first row
                total = min(size, self._rows - start)
                real = np.clip(total - np.arange(self._ranks) * local, 0, local)
                counts += (local - real) * int(own[0])

    def take(self, batch: int) -> int:
        """The most rows of events that a rank has in global batch ``batch``, all of which was added; 0: none."""
        counts = self._counts.pop(batch, None)
        return 0 if counts is None else int(counts.max())


def _first_columns(schema: DatasetSchema) -> dict[str, str]:
    """A column of each sequence, whose lengths are those of all."""
    return {sequence.name: sequence.columns[0].name for sequence in schema.sequences}


def _weights(bags: Bags) -> np.ndarray:
    return np.ones(len(bags[1]), np.float32) if bags[2] is None else bags[2]
