"""Global batches from Parquet, read ahead: the same rows in the same order for any number of ranks.

``sampler.BatchSampler`` decides which rows a global batch has and which of them belong to this rank; a rank decodes the
row groups of its own rows. A short share is padded with the rank's first row at weight 0.

Ids are in TorchRec's ``KeyedJaggedTensor``: a list of ids for each feature (key) and row of the batch. ``values`` has
all lists one behind the other, feature by feature, and of a feature row by row; ``lengths`` says how long each is,
``weights``, where there are some, has a factor for each id, and ``stride`` is the number of rows.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from pipeline.core.errors import DataError
from pipeline.embeddings.event_lookups import EventLookups, event_lookups
from pipeline.records.dataset import BY_WEIGHTS, UNSEEN_ROW, DatasetSchema
from pipeline.training.lane_reader import LaneReader, no_rows
from pipeline.training.parquet import DecodedColumns, SplitReader
from pipeline.training.prefetch_exchange import Announce, Announcement, Announcements
from pipeline.training.sampler import BatchSampler, Order

# Numbers of reader threads. A local disk answers at once; requests to an object store need more threads to overlap.
LOCAL_READERS, REMOTE_READERS = 2, 8


@dataclass
class Batch(Pipelineable):
    """One rank's share of a global batch: b rows, padding included.

    Every rank's loss is sum(weights * loss of a row). Its average over the W ranks is the mean over the global batch.
    DDP averages the gradients of the dense part in this way, and TorchRec those of the tables; ``shared_memory.py`` and
    ``towers/transform.py`` do so where they replace these two.

    Attributes:
        dense: Dense features, float32 [b, n].
        sparse: Row numbers of tables, by feature.
        labels: Labels of the main task, [b].
        weights: W / (real rows of the global batch), 0 for padding, [b]; times what a row counts for in the loss
            (``RowCounts``), where rows have weights or some were left out.
        extra: Further columns of each row, [b, k], as in ``DecodedColumns``; None: there are none.
        lookups: The row numbers of the tables of sequences (``EventLookups``), which ``sparse`` then lacks.
        events: For each sequence, the sample of each of its events, int64 [n] rising.
        groups: What the ranking loss compares rows within, int32 [b], -1 where a row has no group; None: there is no
            such loss, or it compares all rows.
    """

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    labels: torch.Tensor
    weights: torch.Tensor
    extra: torch.Tensor | None = None
    lookups: KeyedJaggedTensor | None = None
    events: tuple[torch.Tensor, ...] = ()
    groups: torch.Tensor | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Return the batch on ``device``; the batch itself if it is there already."""
        if self.dense.device == device:
            return self
        return self._each(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory, for asynchronous copies to an accelerator."""
        return self._each(lambda part: part.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that ``stream`` uses this batch; nothing to do on a CPU."""
        if self.dense.device.type != "cpu":
            self._each(lambda part: part.record_stream(stream))

    def _each(self, apply: Callable[[Any], Any]) -> Batch:
        parts: dict[str, Any] = {"events": tuple(map(apply, self.events))}
        for name in ("dense", "sparse", "labels", "weights", "extra", "lookups", "groups"):
            part = getattr(self, name)
            if part is not None:
                parts[name] = apply(part)
        return Batch(**parts)


class BatchReader(Iterator[Batch], AbstractContextManager["BatchReader"]):
    """Iterates over this rank's batches from (epoch, batch) on, read ahead by a background thread.

    It stops before epoch ``epochs``. ``wait_seconds`` adds up the time that the consumer waited. ``announce`` gets the
    ids of every batch ahead of it. With ``pin``, batches are in page-locked memory, from which copies to an accelerator
    run beside its work. ``group_by`` names the feature whose ids become ``Batch.groups``. Use it as a context manager,
    or call ``close``. Taking a batch raises the errors of the reading thread. With ``announce`` or sequences, taking
    one is collective on several ranks (``prefetch_exchange.py``), unless the model needs nothing of other ranks
    (``independent``).
    """

    def __init__(
        self,
        split: SplitReader,
        order: Order,
        *,
        epochs: int = 1,
        start: tuple[int, int] = (0, 0),
        prefetch: int = 4,
        announce: Announce | None = None,
        pin: bool = False,
        independent: bool = False,
        group_by: str | None = None,
    ) -> None:
        if not split.rows:
            hint = "more input rows"
            if split.split == "test":
                hint += ", or more of them held out: data.split.test_share, or test_days or test_hours where the split "
                hint += "is by these"
            raise DataError(f"dataset {split.dataset.path} has no {split.split} rows", hint=hint)
        self.split, self.order, self.epochs, self.start = split, order, epochs, start
        self.sampler = BatchSampler(order, split.groups)
        self.wait_seconds = 0.0
        self._announce, self._pin = announce, pin
        self._builder = _BatchBuilder(split, order, group_by)
        ranks = 1 if independent else order.world_size + order.without
        self._announcements: Announcements[Batch] | None = Announcements.needed(
            split.schema, announce, ranks, prefetch + 1
        )
        # With announcements, the consumer itself holds the batches ahead; the queue only hands them over.
        room = prefetch if self._announcements is None else 1
        self._queue: queue.Queue[_Read | BaseException | None] = queue.Queue(room)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._produce, name="nightjar-reader", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __next__(self) -> Batch:
        began = time.perf_counter()
        try:
            if self._announcements is None:
                return self._following().batch
            # TorchRec's exchange needs every rank to have as many rows of events as the rank with the most.
            batch, most = self._announcements.take(self._following)
            if batch.lookups is None or batch.lookups.stride() == most:
                return batch
            lookups = lengthened(batch.lookups, most)
            if batch.dense.is_pinned():
                lookups = lookups.pin_memory()
            return replace(batch, lookups=lookups)
        finally:
            self.wait_seconds += time.perf_counter() - began

    def _following(self) -> _Read:
        item = self._queue.get()
        if isinstance(item, _Read):
            return item
        # Put the end back, so that every later call ends the same way.
        self._queue.put(item)
        if item is None:
            raise StopIteration
        raise item

    def close(self) -> None:
        """Stop reading and wait for the thread; batches read ahead are dropped."""
        self._stop.set()
        # The thread may be waiting for room in the queue.
        while self._thread.is_alive():
            try:
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(timeout=0.01)

    def _put(self, item: _Read | BaseException | None) -> None:
        # The put has a timeout, so that a reader whose batches nobody takes still notices that it must stop.
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def _produce(self) -> None:
        try:
            readers = LOCAL_READERS if self.split.store.is_local else REMOTE_READERS
            with ThreadPoolExecutor(max_workers=readers, thread_name_prefix="nightjar-decode") as pool:
                for read in self._batches(pool):
                    self._put(read)
                    if self._stop.is_set():
                        return
            self._put(None)
        except BaseException as error:
            # The consumer raises the error, whatever it is.
            self._put(error)

    def _batches(self, pool: ThreadPoolExecutor) -> Iterator[_Read]:
        # Yield every batch with what the other ranks must know of it. On one rank, ids are announced before the batch
        # is built.
        sampler, (epoch, batch) = self.sampler, self.start
        rank, world = sampler.order.rank, sampler.order.world_size
        reader = None
        if sampler.order.has_share:
            reader = LaneReader(self.split, sampler, pool, rank=rank, world=world, epochs=self.epochs, start=self.start)
        while epoch < self.epochs:
            if reader is None:
                rows, count = no_rows(self.split), 0
            else:
                rows, count = reader.take(epoch, batch)
            if self._announcements is None and self._announce is not None:
                self._announce.receive(self._announce.ids(self.split, rows, count))
            built = self._builder.build(rows, count, sampler.total(batch))
            announcement = None
            if self._announcements is not None:
                events = 0 if built.lookups is None else int(built.lookups.stride())
                announcement = self._announcements.make(self.split, rows, count, events)
            if self._pin:
                built = built.pin_memory()
            yield _Read(built, announcement)
            batch += 1
            if batch >= sampler.batches:
                epoch, batch = epoch + 1, 0


class BoundedBatches(Iterator[Batch]):
    """The batches of ``reader`` for the steps from ``step`` to ``end``; ``cut`` ends them after those already taken."""

    def __init__(self, reader: BatchReader, step: int, end: int) -> None:
        self._reader, self._taken, self._end = reader, step, end

    def __next__(self) -> Batch:
        if self._taken >= self._end:
            raise StopIteration
        batch = next(self._reader)
        self._taken += 1
        return batch

    def cut(self) -> int:
        """Take no more batches and return the step of the last one, after which a pipeline is empty."""
        self._end = self._taken
        return self._end


class _Read(NamedTuple):
    batch: Batch
    announcement: Announcement | None


class _BatchBuilder:
    """Turns decoded rows into a Batch. Single-valued features need one copy and share cached lengths."""

    def __init__(self, split: SplitReader, order: Order, group_by: str | None = None) -> None:
        self.order = order
        self.single_at = {name: row for row, name in enumerate(split.single)}
        self.group_at = None if group_by is None else self.single_at[group_by]
        events = event_lookups(split.schema)
        self.events: EventBuilder | None = None
        # Features that share a table with events are looked up together with them, in one exchange (``EventLookups``).
        in_events: Sequence[str] = ()
        if events is not None:
            self.events = EventBuilder(events, split.schema, self.single_at)
            in_events = events.features
        columns = [column for column in split.schema.sparse if column.name not in in_events]
        self.keys = [column.name for column in columns]
        self.multi = {column.name for column in split.multi}
        self.ragged = bool(in_events) or bool(self.multi)
        self.weighted = any(column.weighted for column in columns)
        count = len(self.keys) * order.local_batch
        self.ones = torch.ones(count, dtype=torch.int32)
        self.offsets = torch.arange(count + 1, dtype=torch.int32)
        self.counts = RowCounts.of(split.schema)
        self.full_weights = torch.full((order.local_batch,), order.world_size / order.global_batch)

    def build(self, rows: DecodedColumns, own: int, total: int) -> Batch:
        """Build the batch of ``own`` real rows of a global batch of ``total``; ``rows`` has padding behind them."""
        labels = torch.from_numpy(rows.labels)
        weights = self.full_weights
        if total < self.order.global_batch or own < self.order.local_batch:
            weights = torch.zeros(self.order.local_batch)
            weights[:own] = self.order.world_size / total
            labels[own:] = 0.0
        if self.ragged:
            columns, ones = _LookupColumns(self.weighted), np.ones(self.order.local_batch, np.int32)
            for name in self.keys:
                if name in self.multi:
                    column = rows.ragged[name]
                    columns.add(np.diff(column.offsets).astype(np.int32), column.values, column.weights)
                else:
                    columns.add(ones, rows.single[self.single_at[name]])
            sparse = columns.join(self.keys, self.order.local_batch)
        else:
            # Every feature has one id per row, and every batch has the same lengths, so nothing is concatenated.
            sparse = KeyedJaggedTensor(
                keys=self.keys,
                values=torch.from_numpy(np.ascontiguousarray(rows.single)).view(-1),
                lengths=self.ones,
                offsets=self.offsets,
                stride=self.order.local_batch,
            )
        lookups, events = (None, ()) if self.events is None else self.events.build(rows)
        extra = torch.from_numpy(np.ascontiguousarray(rows.extra.T)) if len(rows.extra) else None
        factors = self.counts.in_loss(labels, extra)
        if factors is not None:
            weights = weights * factors
        dense = torch.from_numpy(np.ascontiguousarray(rows.dense.T))
        groups = None
        if self.group_at is not None:
            # Rare ids share one row number, and so do rows without an id: neither of them is a group.
            ids = rows.single[self.group_at]
            groups = torch.from_numpy(np.where(ids > UNSEEN_ROW, ids, -1))
        return Batch(dense, sparse, labels, weights, extra, lookups, events, groups)


class _LookupColumns:
    # The columns of a lookup, concatenated: bag lengths int32 [bags], row numbers int32 [n] and their weights. If one
    # column has weights, the others get weights of 1: a lookup takes weights for all of its columns or for none.

    def __init__(self, weighted: bool) -> None:
        # ``np.concatenate`` needs at least one array, even if no column is added.
        self.lengths, self.values = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
        self.weights, self._weighted = list[np.ndarray](), weighted

    def add(self, lengths: np.ndarray, values: np.ndarray, weights: np.ndarray | None = None) -> None:
        self.lengths.append(lengths)
        self.values.append(values)
        if self._weighted:
            self.weights.append(np.ones(len(values), np.float32) if weights is None else weights)

    def join(self, keys: Sequence[str], stride: int) -> KeyedJaggedTensor:
        weights = None
        if self._weighted:
            weights = torch.from_numpy(np.concatenate(self.weights))
        return KeyedJaggedTensor(
            keys=list(keys),
            values=torch.from_numpy(np.concatenate(self.values)),
            lengths=torch.from_numpy(np.concatenate(self.lengths)),
            weights=weights,
            stride=stride,
        )


class EventBuilder:
    """Builds ``Batch.lookups`` and ``Batch.events`` from decoded rows: ids of events' tables, and each event's sample.

    ``single_at`` maps each single-valued feature to its place in ``DecodedColumns.single``.
    """

    def __init__(self, lookups: EventLookups, schema: DatasetSchema, single_at: Mapping[str, int]) -> None:
        self._lookups, self._single_at = lookups, single_at
        # The first column stands for its sequence: all columns of a sequence have the same lengths.
        self._first = {sequence.name: sequence.columns[0].name for sequence in schema.sequences}
        self._weighted = any(column.weighted for column in schema.sparse if column.name in lookups.features)

    def build(self, rows: DecodedColumns) -> tuple[KeyedJaggedTensor, tuple[torch.Tensor, ...]]:
        """Return the lookup, and the sample of each event."""
        count, samples = len(rows.labels), list[torch.Tensor]()
        # The number of lookup rows in each segment, by sequence; "" stands for the samples themselves.
        sizes = {"": count}
        for name, column in self._first.items():
            events = np.diff(rows.ragged[column].offsets)
            sizes[name] = int(events.sum())
            samples.append(torch.from_numpy(np.repeat(np.arange(count), events)))
        columns = _LookupColumns(self._weighted)
        for table in self._lookups.tables:
            for segment in self._lookups.segments:
                size, found = sizes[segment.sequence], segment.columns.get(table)
                if found is None:
                    # Every table needs a bag for every row of the lookup, so these bags stay empty.
                    columns.add(np.zeros(size, np.int32), np.zeros(0, np.int32))
                elif found in self._single_at:
                    columns.add(np.ones(size, np.int32), rows.single[self._single_at[found]])
                elif segment.sequence:
                    # Every event is a row of the lookup.
                    columns.add(np.ones(size, np.int32), rows.ragged[found].values)
                else:
                    ragged = rows.ragged[found]
                    columns.add(np.diff(ragged.offsets).astype(np.int32), ragged.values, ragged.weights)
        stride = sum(sizes[segment.sequence] for segment in self._lookups.segments)
        return columns.join(self._lookups.tables, stride), tuple(samples)


def lengthened(lookup: KeyedJaggedTensor, rows: int) -> KeyedJaggedTensor:
    """Return ``lookup`` with empty rows appended to each table, up to ``rows``."""
    tables = len(lookup.keys())
    lengths = functional.pad(lookup.lengths().view(tables, -1), (0, rows - lookup.stride()))
    return KeyedJaggedTensor(
        keys=lookup.keys(),
        values=lookup.values(),
        lengths=lengths.view(-1),
        weights=lookup.weights_or_none(),
        stride=rows,
    )


@dataclass(frozen=True)
class RowCounts:
    """What a row counts for in the loss and in figures, from its own weight and from the rows that were left out.

    Reads the last columns of ``Batch.extra``: row weights, then shares of kept rows, where the dataset has them.
    ``sampled`` is the schema's field. With shares w, either the loss takes logit - log w, the logit of the kept rows,
    so that the model's own logit is that of all rows; or rows without a click get weight 1 / w.
    """

    row_weights: bool
    sampled: str

    @staticmethod
    def of(schema: DatasetSchema) -> RowCounts:
        """Return the counts for the rows of a dataset with ``schema``."""
        return RowCounts(schema.row_weights, schema.sampled)

    def in_loss(self, labels: Tensor, extra: Tensor | None) -> Tensor | None:
        """Return the factors [b] of the main task's loss; None where all of them are 1."""
        if self.sampled == BY_WEIGHTS:
            return self.in_figures(labels, extra)
        return self._row_weights(extra)

    def in_figures(self, labels: Tensor, extra: Tensor | None) -> Tensor | None:
        """Return how many rows of the whole log each row [b] stands for; None where each stands for itself."""
        weights, others = self._row_weights(extra), self.left_out(labels, extra)
        if weights is None:
            return others
        return weights if others is None else weights * others

    def left_out(self, labels: Tensor, extra: Tensor | None) -> Tensor | None:
        """Return 1 / w for rows without a click (main ``labels``), 1 for others; None if no rows were left out."""
        if not self.sampled or extra is None:
            return None
        return torch.where(labels > 0, 1.0, extra[:, -1].reciprocal())

    def offset(self, extra: Tensor | None) -> Tensor | None:
        """Return what the logits [b] of the kept rows have on top of those of all rows; None where that is nothing."""
        if not self.sampled or self.sampled == BY_WEIGHTS or extra is None:
            return None
        return -extra[:, -1].log()

    def _row_weights(self, extra: Tensor | None) -> Tensor | None:
        if not self.row_weights or extra is None:
            return None
        # Row weights are the last column, or the last but one where the shares of kept rows follow them.
        return extra[:, -2] if self.sampled else extra[:, -1]
