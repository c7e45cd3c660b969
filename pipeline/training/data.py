"""Global batches from Parquet: the same rows in the same order for any number of ranks.

The global batches of an epoch are a function of (dataset key, seed, epoch, global batch size) alone. Row groups
are permuted, then the rows inside each window of ``window_groups`` groups; the stream that results is cut
every ``global_batch`` rows, across windows. Rank r of W takes rows [r*b, (r+1)*b) of each global batch,
b = ceil(B / W); what is short is filled up to b with the global batch's first row at weight 0.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from pipeline.embeddings.event_lookups import event_lookups
from pipeline.errors import DataError
from pipeline.training.counted import RowCounts
from pipeline.training.events import EventBuilder, EventCounts
from pipeline.training.parquet import Columns, Group, SplitReader, join, take_each
from pipeline.training.windows import Window, WindowReader


@dataclass
class Batch(Pipelineable):
    """One rank's share of a global batch, b rows: dense [b, n] float32, sparse ids by feature, labels [b], weights [b].

    A row's weight is W / (real rows of the global batch), 0 for padding, so that sum(weights * loss), averaged over
    the W ranks as DDP and TorchRec do, is the mean over the global batch. It is times what the row counts for in
    the loss (``RowCounts``) where rows have weights or were left out; ``extra`` [b, k] is as in ``Columns`` then, and
    with further tasks, else None. With sequences, ``lookups`` has the ids of their tables (``EventLookups``), which
    ``sparse`` then lacks, and ``events`` the sample of each event, int64 [n] rising, by sequence.
    """

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    labels: torch.Tensor
    weights: torch.Tensor
    extra: torch.Tensor | None = None
    lookups: KeyedJaggedTensor | None = None
    events: tuple[torch.Tensor, ...] = ()

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The batch on ``device``; the batch itself where it is there already."""
        if self.dense.device == device:
            return self
        return self._each(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory, for asynchronous copies to an accelerator."""
        return self._each(lambda part: part.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that ``stream`` uses this batch; nothing to do on a CPU."""
        if self.dense.device.type != "cpu":
            self._each(lambda part: part.record_stream(stream))

    def _each(self, apply: Callable[[Any], Any]) -> Batch:
        """What ``apply`` makes of every part."""
        some = (None if part is None else apply(part) for part in (self.extra, self.lookups))
        whole = (apply(part) for part in (self.dense, self.sparse, self.labels, self.weights))
        return Batch(*whole, *some, tuple(apply(part) for part in self.events))


@dataclass(frozen=True, kw_only=True)
class Order:
    """The settings that fix the sequence of global batches, and this rank's share of it."""

    key: str
    seed: int
    global_batch: int
    shuffle: bool = True
    window_groups: int = 8
    rank: int = 0
    world_size: int = 1

    @property
    def local_batch(self) -> int:
        """Rows of a batch on each rank, padding included."""
        return -(-self.global_batch // self.world_size)

    def generator(self, *numbers: int) -> np.random.Generator:
        """A random generator that depends on dataset, seed and ``numbers`` only."""
        mixed = np.random.SeedSequence([self.seed, *self.key.encode(), *numbers])
        return np.random.Generator(np.random.PCG64(mixed))

    def windows(self, groups: list[Group], epoch: int) -> list[list[Group]]:
        """The row groups of an ``epoch`` in order, ``window_groups`` at a time (one, where nothing is shuffled)."""
        if not self.shuffle:
            return [[group] for group in groups]
        mixed = [groups[i] for i in self.generator(epoch).permutation(len(groups))]
        return [mixed[i : i + self.window_groups] for i in range(0, len(mixed), self.window_groups)]

    def rows(self, count: int, epoch: int, window: int) -> np.ndarray:
        """The order of the ``count`` rows of a window."""
        if not self.shuffle:
            return np.arange(count)
        return self.generator(epoch, window).permutation(count)

    def positions(self, batch: int, total: int) -> tuple[np.ndarray, int, int]:
        """Stream positions of this rank's rows in a global batch, padding included: (positions [b], own, global)."""
        start = batch * self.global_batch
        stop = min(start + self.global_batch, total)
        low = min(start + self.rank * self.local_batch, stop)
        own = min(low + self.local_batch, stop) - low
        positions = np.full(self.local_batch, start, np.int64)
        positions[:own] = np.arange(low, low + own)
        return positions, own, stop - start


@dataclass(frozen=True)
class Announce:
    """Announces the ids of coming batches: the reading thread calls ``receive`` with {table: ids int64}.

    Every rank decodes whole windows, so it knows the ids of the whole global batch and can prepare the rows of its
    shards for all ranks without communication. ``tables``: the features of those that are announced.
    """

    tables: Mapping[str, tuple[str, ...]]
    receive: Callable[[dict[str, np.ndarray]], None]


class BatchReader:
    """Iterates over this rank's batches from (epoch, batch) on, read ahead by a background thread.

    It stops before epoch ``epochs``. ``wait_seconds`` adds up the time that the consumer waited. ``announce`` gets the
    ids of every batch before the batch is queued. ``pin``: batches are in page-locked memory, from which copies to an
    accelerator run beside its work. Use it as a context manager, or call ``close``. Taking a batch raises the errors of
    the reading thread.
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
    ) -> None:
        if not split.rows:
            raise DataError(
                f"dataset {split.dataset.path} has no {split.split} rows",
                hint="data.split.test_share=0.2, or more input rows",
            )
        self.split, self.order, self.epochs, self.start = split, order, epochs, start
        self.batches_per_epoch = -(-split.rows // order.global_batch)
        self.wait_seconds = 0.0
        self._announce, self._pin = announce, pin
        self._builder = _Builder(split, order)
        self._widest = None
        if order.world_size > 1:
            self._widest = EventCounts(
                split.schema, split.rows, size=order.global_batch, local=order.local_batch, ranks=order.world_size
            )
        self._queue: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=prefetch)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._produce, name="nightjar-reader", daemon=True)
        self._thread.start()

    def __enter__(self) -> BatchReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        began = time.perf_counter()
        item = self._queue.get()
        self.wait_seconds += time.perf_counter() - began
        if isinstance(item, Batch):
            return item
        self._queue.put(item)  # every later call ends the same way
        if item is None:
            raise StopIteration
        raise item

    def close(self) -> None:
        """Stop reading and wait for the thread; batches read ahead are dropped."""
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(timeout=0.01)

    def _put(self, item: Batch | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def _produce(self) -> None:
        try:
            with ThreadPoolExecutor(max_workers=2, thread_name_prefix="nightjar-decode") as pool:
                for batch in self._batches(pool):
                    self._put(batch.pin_memory() if self._pin else batch)
                    if self._stop.is_set():
                        return
            self._put(None)
        except BaseException as error:  # handed to the consumer, whatever it is
            self._put(error)

    def _batches(self, pool: ThreadPoolExecutor) -> Iterator[Batch]:
        reader = WindowReader(self.split, pool)
        epoch, batch = self.start
        while epoch < self.epochs:
            yield from self._epoch(reader, epoch, batch)
            epoch, batch = epoch + 1, 0

    def _epoch(self, reader: WindowReader, epoch: int, batch: int) -> Iterator[Batch]:
        """Walk over the windows; a batch is complete with the window that has its last position.

        With ``announce`` that is the last position of the global batch, so that every batch is announced once and whole
        before any rank looks it up, wherever windows end. With sequences on several ranks it is so, too: ranks pad
        their lookups to the one with most events.
        """
        parts: list[tuple[np.ndarray, Columns]] = []
        pieces: list[dict[str, np.ndarray]] = []
        groups = self.order.windows(self.split.groups, epoch)
        for window in reader.windows(groups, batch * self.order.global_batch):
            cuts = self._cuts(batch, window.start, window.start + window.rows)
            if not self._needs_all and not any(len(cut.inside) for cut in cuts):
                continue
            order = self.order.rows(window.rows, epoch, window.number)
            if self._widest is not None:
                self._widest.add(window, order, batch)
            mine = take_each(window.columns, [order[cut.positions[cut.inside] - window.start] for cut in cuts])
            for cut, part in zip(cuts, mine, strict=True):
                pieces.append(self._piece(window, order, batch))
                if len(cut.inside):
                    parts.append((cut.inside, part))
                if cut.complete:
                    self._announce_batch(pieces)
                    most = self._widest.take(batch) if self._widest is not None else 0
                    yield self._builder.build(parts, cut.own, cut.total, most)
                    parts, pieces, batch = [], [], batch + 1

    @property
    def _needs_all(self) -> bool:
        """Whether a batch is complete only with the last row of the global batch."""
        return self._announce is not None or (self._widest is not None and self._widest.active)

    def _piece(self, window: Window, order: np.ndarray, batch: int) -> dict[str, np.ndarray]:
        """The ids to announce of the rows of a batch, of all ranks, that are in ``window``."""
        if self._announce is None:
            return {}
        low = max(batch * self.order.global_batch - window.start, 0)
        rows = order[low : (batch + 1) * self.order.global_batch - window.start]
        return {
            table: np.concatenate([self._ids(window.columns, name, rows) for name in features])
            for table, features in self._announce.tables.items()
        }

    def _announce_batch(self, pieces: list[dict[str, np.ndarray]]) -> None:
        """Announce a batch by its ``pieces``, one of each window."""
        if self._announce is not None:
            tables = self._announce.tables
            self._announce.receive({name: np.concatenate([piece[name] for piece in pieces]) for name in tables})

    def _ids(self, columns: Columns, name: str, rows: np.ndarray) -> np.ndarray:
        if name in columns.ragged:
            return columns.ragged[name].take(rows).values.astype(np.int64)
        return columns.single[self.split.single.index(name)][rows].astype(np.int64)

    def _cuts(self, batch: int, start: int, stop: int) -> list[_Cut]:
        """What this rank's batches from ``batch`` on take of the stream positions [start, stop)."""
        cuts = []
        while batch < self.batches_per_epoch and batch * self.order.global_batch < stop:
            positions, own, total = self.order.positions(batch, self.split.rows)
            inside = np.flatnonzero((positions >= start) & (positions < stop))
            last = batch * self.order.global_batch + total - 1 if self._needs_all else positions.max()
            cuts.append(_Cut(positions, inside, own, total, bool(last < stop)))
            batch += 1
        return cuts


@dataclass(frozen=True)
class _Cut:
    """A batch's stream ``positions`` and which of them are ``inside`` a window. ``complete``: needs no later one."""

    positions: np.ndarray
    inside: np.ndarray
    own: int
    total: int
    complete: bool


class _Builder:
    """Turns taken rows into a Batch. Single-valued features need one copy and share cached lengths."""

    def __init__(self, split: SplitReader, order: Order) -> None:
        self.order = order
        events = event_lookups(split.schema)
        apart = set(events.features) if events is not None else set()
        columns = [column for column in split.schema.sparse if column.name not in apart]
        self.keys = [column.name for column in columns]
        self.multi = {column.name for column in split.multi}
        self.ragged = bool(apart) or bool(self.multi)
        self.weighted = any(column.weighted for column in columns)
        self.single_at = {name: row for row, name in enumerate(split.single)}
        self.events = None if events is None else EventBuilder(events, split.schema, self.single_at)
        count = len(self.keys) * order.local_batch
        self.ones = torch.ones(count, dtype=torch.int32)
        self.offsets = torch.arange(count + 1, dtype=torch.int32)
        self.counts = RowCounts.of(split.schema)
        self.full_weights = torch.full((order.local_batch,), order.world_size / order.global_batch)

    def build(self, parts: list[tuple[np.ndarray, Columns]], own: int, total: int, most: int = 0) -> Batch:
        """The batch of ``own`` real rows of a global batch of ``total``, each part with its places in the batch.

        ``most``: rows for events on the rank that has most of them.
        """
        rows = parts[0][1] if len(parts) == 1 else _merge(parts)
        labels = torch.from_numpy(rows.labels)
        weights = self.full_weights
        if total < self.order.global_batch or own < self.order.local_batch:
            weights = torch.zeros(self.order.local_batch)
            weights[:own] = self.order.world_size / total
            labels[own:] = 0.0
        sparse = self._ragged(rows) if self.ragged else self._single(rows)
        lookups, events = (None, ()) if self.events is None else self.events.build(rows, most)
        extra = torch.from_numpy(np.ascontiguousarray(rows.extra.T)) if len(rows.extra) else None
        if (factors := self.counts.in_loss(labels, extra)) is not None:
            weights = weights * factors
        dense = torch.from_numpy(np.ascontiguousarray(rows.dense.T))
        return Batch(dense, sparse, labels, weights, extra, lookups, events)

    def _single(self, rows: Columns) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            keys=self.keys,
            values=torch.from_numpy(np.ascontiguousarray(rows.single)).view(-1),
            lengths=self.ones,
            offsets=self.offsets,
            stride=self.order.local_batch,
        )

    def _ragged(self, rows: Columns) -> KeyedJaggedTensor:
        lengths, values, weights = [], [], []
        ones = np.ones(self.order.local_batch, np.int32)
        for name in self.keys:
            if name in self.multi:
                column = rows.ragged[name]
                length, value, weight = np.diff(column.offsets).astype(np.int32), column.values, column.weights
            else:
                length, value, weight = ones, rows.single[self.single_at[name]], None
            lengths.append(length)
            values.append(value)
            if self.weighted:
                weights.append(np.ones(len(value), np.float32) if weight is None else weight)
        return KeyedJaggedTensor(
            keys=self.keys,
            values=torch.from_numpy(np.concatenate([*values, np.zeros(0, np.int32)])),
            lengths=torch.from_numpy(np.concatenate([*lengths, np.zeros(0, np.int32)])),
            weights=torch.from_numpy(np.concatenate(weights)) if self.weighted else None,
            stride=self.order.local_batch,
        )


def _merge(parts: list[tuple[np.ndarray, Columns]]) -> Columns:
    """Parts of a batch that came from several windows, put back into batch order."""
    order = np.argsort(np.concatenate([inside for inside, _ in parts]))
    return take_each(join([part for _, part in parts]), [order])[0]
