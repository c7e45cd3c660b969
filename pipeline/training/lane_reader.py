"""Decodes and mixes windows of lanes ahead of their use, in a pool of threads and in memory that is reused."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from pipeline.training.parquet import DecodedColumns, Ragged, SplitReader, join_ragged
from pipeline.training.sampler import BatchSampler, Take, Window, keep_groups


@dataclass
class DecodedRows:
    """Rows in two arrays: ``floats`` [1 + k + n, N] with label, extra and dense columns, and single-valued ``ids``."""

    floats: np.ndarray
    ids: np.ndarray
    ragged: dict[str, Ragged] = field(default_factory=dict)

    @classmethod
    def empty(cls, split: SplitReader, rows: int) -> DecodedRows:
        """Allocate memory for ``rows`` rows of ``split``."""
        floats = 1 + len(split.extra) + len(split.schema.dense)
        return cls(np.empty((floats, rows), np.float32), np.empty((len(split.single), rows), np.int32))

    def columns(self, extra: int) -> DecodedColumns:
        """Return views of this memory by column, with ``extra`` columns between the labels and the dense ones."""
        more = 1 + extra
        return DecodedColumns(self.floats[0], self.floats[more:], self.ids, self.ragged, self.floats[1:more])


def no_rows(split: SplitReader) -> DecodedColumns:
    """Return what a rank without a share takes of each global batch: no rows, not even padding."""
    block = DecodedRows.empty(split, 0)
    for column in split.multi:
        weights = np.empty(0, np.float32) if column.weighted else None
        block.ragged[column.name] = Ragged(np.zeros(1, np.int64), np.empty(0, np.int32), weights)
    return block.columns(len(split.extra))


class LaneReader:
    """Reads the rows of global batches for one of ``world`` ranks, from (epoch, batch) ``start`` on; decodes its lanes.

    As many windows are decoded ahead as the rank has lanes, up to ``window_groups`` row groups. New memory for every
    window would cost about as much time as decoding, since the kernel clears its pages.
    """

    def __init__(
        self,
        split: SplitReader,
        sampler: BatchSampler,
        pool: Executor,
        *,
        rank: int,
        world: int,
        epochs: int,
        start: tuple[int, int],
    ) -> None:
        self.split, self._sampler, self._pool = split, sampler, pool
        self._rank, self._world = rank, world
        lanes = max(len(sampler.takes(0, rank, world)), 1)
        self._ahead = max(1, min(lanes, sampler.order.window_groups // sampler.together))
        largest = max(group.rows for group in split.groups)
        self._size = min(sampler.together * largest, split.rows)
        self._coming = self._schedule(epochs, start)
        self._pending: deque[tuple[int, _Decoding]] = deque()
        self._lanes: dict[int, list[tuple[Window, DecodedRows]]] = {}
        self._spare: list[DecodedRows] = []

    def take(self, epoch: int, batch: int) -> tuple[DecodedColumns, int]:
        """Return the rank's rows of a global batch, padded with the first of them, and their number without padding.

        A rank without rows is padded with the global batch's first row. Call it for one batch after the other.
        """
        # 1. Wait for the windows that this batch is the first to need, and submit the next ones.
        number = epoch * self._sampler.batches + batch
        self._submit()
        while self._pending and self._pending[0][0] <= number:
            _, decoding = self._pending.popleft()
            # Submit before the wait below, so that no thread idles.
            self._submit()
            self._lanes.setdefault(decoding.window.lane, []).append((decoding.window, decoding.done.result()))

        # 2. Copy rows [low, high) of each window that has some of this rank's rows.
        pieces, own = list[tuple[DecodedRows, int, int]](), self._sampler.owned(batch, self._rank, self._world)
        for take in self._takes(batch):
            for window, block in self._lanes[take.lane]:
                low, high = max(take.start - window.start, 0), min(take.stop - window.start, window.rows)
                if low < high:
                    pieces.append((block, low, high))
        filled = DecodedRows.empty(self.split, -(-self._sampler.order.global_batch // self._world))
        _fill(filled, pieces)

        # 3. Release the memory of windows that no later batch needs. At the end of an epoch that is all of it: the next
        # epoch has its own windows, even where their rows are the same.
        position, ended = (batch + 1) * self._sampler.quota, batch + 1 == self._sampler.batches
        for windows in self._lanes.values():
            while windows and (ended or windows[0][0].start + windows[0][0].rows <= position):
                self.release(windows.pop(0)[1])
        return filled.columns(len(self.split.extra)), own

    def _schedule(self, epochs: int, start: tuple[int, int]) -> Iterator[tuple[int, Window]]:
        # Yields the windows that the rank needs, each with the number of the first global batch that needs it.
        (epoch, first), sampler = start, self._sampler
        last = sampler.batches - 1
        while epoch < epochs:
            # In the last, short batch a rank may have no rows, so it may need another lane only for its padding.
            own = {take.lane for take in self._takes(first)}
            late = {take.lane for take in self._takes(last)}
            windows = []
            for lane in sorted(own | late):
                since = first if lane in own else last
                for window in sampler.windows(epoch, lane):
                    if window.start + window.rows > since * sampler.quota:
                        windows.append((max(window.start // sampler.quota, since), lane, window))
            for batch, _, window in sorted(windows, key=lambda each: each[:2]):
                yield epoch * sampler.batches + batch, window
            epoch, first = epoch + 1, 0

    def _takes(self, batch: int) -> list[Take]:
        # A rank without rows takes the first row of the batch as padding.
        return self._sampler.takes(batch, self._rank, self._world) or [self._sampler.first(batch)]

    def _submit(self) -> None:
        while len(self._pending) < self._ahead:
            coming = next(self._coming, None)
            if coming is None:
                return
            number, window = coming
            self._pending.append((number, _Decoding(self, self._sampler, window, self._pool)))

    def block(self) -> DecodedRows:
        """Return memory for a window, reused or new."""
        try:
            return self._spare.pop()
        except IndexError:
            return DecodedRows.empty(self.split, self._size)

    def release(self, block: DecodedRows) -> None:
        """Take back memory for later windows."""
        self._spare.append(block)


class _Decoding:
    """A ``window`` that is being decoded; ``done`` gets its mixed rows. The thread with its last part mixes them."""

    def __init__(self, reader: LaneReader, sampler: BatchSampler, window: Window, pool: Executor) -> None:
        self._reader, self._sampler, self.window = reader, sampler, window
        self.done: Future[DecodedRows] = Future()
        self._lock = threading.Lock()
        self._raw: DecodedRows | None = None
        self._parts: dict[int, dict[str, Ragged]] = {}
        # The first row of each part in the window's memory, followed by the number of all rows.
        self._at = list(accumulate((part.group.rows for part in window.parts), initial=0))
        for number in range(len(window.parts)):
            pool.submit(self.decode, number)

    def decode(self, number: int) -> None:
        """Decode a part; errors are passed to ``done``."""
        try:
            with self._lock:
                if self._raw is None:
                    self._raw = self._reader.block()
                raw = self._raw
            split, group = self._reader.split, self.window.parts[number].group
            ragged = split.read(group, raw.columns(len(split.extra)), self._at[number])
            with self._lock:
                self._parts[number] = ragged
                last = len(self._parts) == len(self.window.parts)
            if last:
                self.done.set_result(self._mixed(raw))
        except BaseException as error:
            # The error is raised where the window is awaited.
            with self._lock:
                if not self.done.done():
                    self.done.set_exception(error)

    def _mixed(self, raw: DecodedRows) -> DecodedRows:
        # Sort the parts by number, since threads may have finished them in any order.
        parts = [self._parts[number] for number in range(len(self._parts))]
        # Make a new dict: the old one has the columns of the window that used this memory before.
        raw.ragged = {}
        for name in parts[0]:
            raw.ragged[name] = join_ragged([part[name] for part in parts])
        if not self._sampler.order.shuffle and self.window.rows == self._at[-1]:
            # The window is the whole of its row groups, in their order.
            return raw
        # The lane may begin or end within a row group, so a part may have only some of its group's rows.
        places = []
        for part, at in zip(self.window.parts, self._at, strict=False):
            places.append(np.arange(at + part.start, at + part.stop))
        rows, order = np.concatenate(places), self._sampler.mixed(self.window)
        shuffle, group_by = self._sampler.order.shuffle, self._sampler.order.group_by
        # Validation and test rows are read without shuffling, so their groups need not be kept together.
        if shuffle and group_by is not None:
            groups = raw.ids[self._reader.split.single.index(group_by)]
            order = keep_groups(order, groups[rows])
        picks, mixed = rows[order], self._reader.block()
        for sources, targets in ((raw.floats, mixed.floats), (raw.ids, mixed.ids)):
            for source, target in zip(sources, targets, strict=True):
                # mode="clip" spares NumPy a buffered copy; the indices are always in range.
                np.take(source, picks, out=target[: len(picks)], mode="clip")
        mixed.ragged = {name: column.take(picks) for name, column in raw.ragged.items()}
        self._reader.release(raw)
        return mixed


def _fill(block: DecodedRows, pieces: list[tuple[DecodedRows, int, int]]) -> None:
    # Copies the rows of the pieces into block, one after the other, and pads the rest with the first of them.
    at, rows = 0, block.floats.shape[1]
    for source, low, high in pieces:
        end = at + high - low
        block.floats[:, at:end] = source.floats[:, low:high]
        block.ids[:, at:end] = source.ids[:, low:high]
        at = end
    if at < rows:
        block.floats[:, at:], block.ids[:, at:] = block.floats[:, :1], block.ids[:, :1]
    for name in pieces[0][0].ragged:
        whole = join_ragged([source.ragged[name].cut(low, high) for source, low, high in pieces])
        if at < rows:
            whole = whole.take(np.r_[:at, np.zeros(rows - at, np.int64)])
        block.ragged[name] = whole
