"""Engines that run the two passes over the blocks of a log: in threads (``local``), or in workers of Ray (``ray``).

An engine counts every block of its sources, keeps their typed rows, fits the mappings of ids, and writes those rows.
Everything happens in the order of the blocks, whichever finishes first, so both make the same bytes.

Threads of this process share the parts of a log: one thread at a time reads a part, several read several. A free
thread takes the next block of the first part that no other thread reads at the moment, so a part that is slow to decode
holds nobody up, and a second one is opened only if the first cannot keep all threads busy. Each open part takes memory:
for a Parquet file a row group.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import polars as pl
import pyarrow as pa

from pipeline.config.ingest import IngestConfig
from pipeline.core.cpus import available_cpus
from pipeline.ingest.blocks import Counted, CountJob, TransformJob, count, train_codes, train_rows, transformed
from pipeline.ingest.counts import IDS_IN_MEMORY, IDS_OF_A_FEATURE
from pipeline.ingest.output import PartWriter, encoded_frame
from pipeline.ingest.quality import LabelLeakCounts
from pipeline.ingest.schema import DataSpec, SparseSpec
from pipeline.ingest.sources import Block, Source
from pipeline.ingest.spill import Spill
from pipeline.ingest.state import fitted_state
from pipeline.ingest.statistics_pass import Partial, SplitCounts
from pipeline.ingest.transform_pass import FittedState
from pipeline.records.dataset import EVENTS
from pipeline.specs.id_mapping import FittingDay
from pipeline.store.artifacts import Draft

# Threads that one reader keeps busy, because a block takes less time to read than to work on.
_BY_EACH_READER = 3
# Maximum number of columns of all blocks in progress, because each column has its own counts and copies.
_COLUMNS_TOGETHER = 2560
# mallopt(3): M_TRIM_THRESHOLD and M_MMAP_THRESHOLD with their bytes, M_ARENA_MAX.
_MALLOC = {-1: 64 << 20, -3: 64 << 20, -8: 1}
A = TypeVar("A")
B = TypeVar("B")


def map_in_order(
    parts: Sequence[Source], work: Callable[[Block], A], take: Callable[[A], B], workers: int
) -> Iterator[tuple[int, B]]:
    """Yield the result of every block of ``parts``, with the number of its part, in the order of the blocks.

    ``workers`` threads call ``work`` on blocks. The calling thread calls ``take`` on each result as it comes,
    in any order, and what that returns waits for its turn. An error is raised when the turn of its block comes.
    """
    deal = _PartQueue(parts, work, workers)
    waiting: dict[tuple[int, int], _BlockOutcome[B]] = {}
    at = (0, 0)
    with ThreadPoolExecutor(workers, thread_name_prefix="nightjar-ingest") as pool:
        try:
            for _ in range(workers):
                pool.submit(deal.run)
            while at[0] < len(parts):
                place, outcome = deal.next()
                waiting[place] = _BlockOutcome(outcome.error, outcome.ended, [take(each) for each in outcome.made])
                # Drop the reference, so that this frame does not keep a result alive while it waits for the next one.
                del outcome
                while at in waiting:
                    ready = waiting.pop(at)
                    if ready.error is not None:
                        raise ready.error
                    for each in ready.made:
                        yield at[0], each
                    at = (at[0] + 1, 0) if ready.ended else (at[0], at[1] + 1)
        finally:
            deal.stop()


@dataclass(frozen=True)
class _BlockOutcome(Generic[A]):
    """The outcome at a place in a part: an error, the end of the part, or what was made of the block."""

    error: BaseException | None
    ended: bool
    made: list[A]


@dataclass(eq=False)
class _OpenPart:
    """A part that is being read. ``read``: its blocks so far. ``is_read``: whether a thread reads one at the moment."""

    number: int
    source: Source
    blocks: Iterator[Block] | None = None
    read: int = 0
    is_read: bool = False


class _PartQueue(Generic[A]):
    """Assigns parts to threads, and collects what they have made. ``_room``: for blocks in progress."""

    def __init__(self, parts: Sequence[Source], work: Callable[[Block], A], workers: int) -> None:
        self._parts, self._work, self._workers = parts, work, workers
        # Rounded up, so at least one.
        self._most_open = -(-workers // _BY_EACH_READER)
        self._open: list[_OpenPart] = []
        self._opened = 0
        self._changed, self._stopped = threading.Condition(), False
        # One more than there are threads, so that none waits while the calling thread takes a result.
        self._room = threading.Semaphore(workers + 1)
        self._done: queue.SimpleQueue[tuple[tuple[int, int], _BlockOutcome[A]]] = queue.SimpleQueue()

    def next(self) -> tuple[tuple[int, int], _BlockOutcome[A]]:
        # Returns the outcome of some block, with its place: (part, block of the part).
        done = self._done.get()
        self._room.release()
        return done

    def stop(self) -> None:
        # Makes the threads end after their current blocks. Those that wait for a part, or for room, are woken.
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._room.release(self._workers)

    def run(self) -> None:
        while True:
            # Wait for room before a part is claimed: a thread that waits must not keep others from reading the part.
            self._room.acquire()
            part = self._claimed()
            if part is None:
                return
            # Take the place before the block is read, because another thread may advance `part.read` afterwards.
            place = (part.number, part.read)
            self._done.put((place, self._outcome(part)))

    def _outcome(self, part: _OpenPart) -> _BlockOutcome[A]:
        # A separate function, because variables of `run` would keep the block and its result alive while it waits
        # for room.
        try:
            block = self._next_block(part)
            if block is None:
                return _BlockOutcome(None, True, [])
            return _BlockOutcome(None, False, [self._work(block)])
        except BaseException as error:
            # Errors of any kind are raised in the calling thread.
            return _BlockOutcome(error, False, [])

    def _claimed(self) -> _OpenPart | None:
        # Returns a part that this thread alone reads from until `_next_block` hands it back; None if nothing is left.
        with self._changed:
            while not self._stopped:
                part = next((each for each in self._open if not each.is_read), None)
                if part is None and self._opened < len(self._parts) and len(self._open) < self._most_open:
                    part = _OpenPart(self._opened, self._parts[self._opened])
                    self._open.append(part)
                    self._opened += 1
                if part is not None:
                    part.is_read = True
                    return part
                if not self._open:
                    return None
                self._changed.wait()
        return None

    def _next_block(self, part: _OpenPart) -> Block | None:
        # Returns the next block of `part`, which others may read from then on; None at its end.
        block = None
        try:
            if part.blocks is None:
                # Opened here and not when it is claimed, so that an error of opening is an outcome like all errors.
                part.blocks = part.source.blocks()
            block = next(part.blocks, None)
            return block
        finally:
            with self._changed:
                part.is_read, part.read = False, part.read + 1
                if block is None:
                    self._open.remove(part)
                self._changed.notify_all()


class RowsWriter(Protocol):
    """The Parquet files of one folder of a dataset; complete at the end of ``with``. ``rows``: how many were added."""

    files: list[str]
    groups: list[list[int]]
    rows: int

    def add(self, frame: pl.DataFrame) -> None:
        """Append rows of this process."""


class IngestEngine(ExitStack, ABC):
    """Ingests a log, or its days one after the other.

    The methods are called in this order: ``count``, ``split_counts``, ``count_label_leaks``, ``fit_state``, ``write``,
    ``end_day``.

    On the last day, ``finalize`` and ``write_mappings`` come before ``write``, and may go on beside it. Counting the
    same sources again starts the day anew. What is kept in between is gone after ``with``.
    """

    @abstractmethod
    def parts(self, source: Source) -> Sequence[Source]:
        """Return the pieces that ``count`` reads a source in."""

    @abstractmethod
    def map_blocks(
        self, parts: Sequence[Source], work: Callable[[Block], pl.DataFrame]
    ) -> Iterator[tuple[int, pl.DataFrame]]:
        """Run ``work`` on every block of ``parts``, before ``count``: for passes that pass 1 depends on.

        Args:
            parts: as the method ``parts`` returns them.
            work: called on a block, on any thread, process or host; some engines pickle it.

        Yields:
            The result for each block, in the order of the blocks, with the number of the part.
        """

    @abstractmethod
    def count(self, sources: Sequence[Source], job: CountJob) -> Iterator[Counted]:
        """Run pass 1 over every block of ``sources``.

        Args:
            sources: of a day, or of the whole log.
            job: what is counted.

        Yields:
            The report on each block, in the order of the blocks. ``split_counts`` has the sums.
        """

    @abstractmethod
    def split_counts(self) -> SplitCounts:
        """Return the sums of the last count, once all of its blocks were taken."""

    @abstractmethod
    def count_label_leaks(self, leaks: LabelLeakCounts, first_test_day: int) -> None:
        """Add typed train rows to ``leaks`` until it has enough; they are complete only after ``end_day``."""

    @abstractmethod
    def sample(self, first_test_day: int) -> Callable[[], Iterable[pl.DataFrame]]:
        """Return a function that reads the typed train rows of every block again, for a mapping that needs them."""

    @abstractmethod
    def fit_state(
        self, spec: DataSpec, split_counts: SplitCounts, before: FittedState | None, day: FittingDay
    ) -> FittedState:
        """Fit the transforms that the train rows ask for.

        Args:
            spec: the schema.
            split_counts: of this engine's last count.
            before: the state of the day before, as ``continued`` or this method returned it; None fits anew.
            day: which day is fitted.
        """

    def continued(self, state: FittedState) -> FittedState:
        """Return the state of another dataset in the form that ``fit_state`` takes as ``before``."""
        return state

    @abstractmethod
    def writer(self, draft: Draft, folder: str, config: IngestConfig) -> AbstractContextManager[RowsWriter]:
        """Return the writer of a folder, which ``write`` fills."""

    @abstractmethod
    def write(self, job: TransformJob, writers: Mapping[str, Any]) -> Iterator[tuple[int, pl.DataFrame | None]]:
        """Run pass 2: write the rows of every block by folder.

        Args:
            job: with the state that ``fit_state`` returned.
            writers: from ``writer``, by folder; the caller fills that of ``EVENTS``.

        Yields:
            For each block, in order, its rows of all splits and, where they are kept, the events of its rows.
        """

    def end_day(self) -> None:
        """Forget the day except for its counts; wait for what was done beside ``write``."""

    def finalize(self, train: Partial, state: FittedState, leaks: LabelLeakCounts, then: Mapping[str, Any]) -> None:
        """Prepare the counts of all days for checks and profile; ``then``: features of the day to compare with."""
        wanted = {}
        for name, fitted in state.sparse.items():
            if fitted.lookup is not None:
                wanted[name] = fitted.lookup["hash"]
        train.finalize(wanted)

    def write_mappings(
        self, draft: Draft, spec: DataSpec, state: FittedState, compression: str, *, continued: bool
    ) -> None:
        """Write the files of the fitted mappings; ``continued``: include what only the next day needs."""

        def encode(feature: SparseSpec) -> dict[str, pa.Buffer]:
            files = feature.mapping.files(feature.name, state.sparse[feature.name], continued=continued)
            return {name: encoded_frame(frame, compression) for name, frame in files.items()}

        # Other threads encode. This one writes, so files come one after the other in the order of the features.
        for encoded in in_order(encode, spec.owners, available_cpus()):
            for name, data in encoded.items():
                with draft.open(name) as sink:
                    sink.write(data)


class LocalEngine(IngestEngine):
    """Runs as many threads as there are CPUs to use: Polars, NumPy and Arrow work without the GIL."""

    def __init__(self, workers: int | None = None) -> None:
        super().__init__()
        self.workers = workers or available_cpus()
        # Make glibc keep freed pieces up to 64 MiB for the next block, whichever thread takes it, so that fewer pages
        # are cleared anew. Other C libraries are left as they are.
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            for parameter, value in _MALLOC.items():
                mallopt(parameter, value)
        self.spill = Spill()
        # Numbers of the blocks in the spill, in their order.
        self.numbers: list[int] = []
        self.callback(self.spill.file.close)
        self._encoders = self.enter_context(ThreadPoolExecutor(self.workers, thread_name_prefix="nightjar-encode"))
        self._split_counts: SplitCounts | None = None
        self._label_leaks: Future[None] | None = None
        self._numbering = Numbering()

    def parts(self, source: Source) -> Sequence[Source]:
        """Return the parts of a source that takes work to read; any other source as it is."""
        return source.parts() if source.decodes else [source]

    def map_blocks(
        self, parts: Sequence[Source], work: Callable[[Block], pl.DataFrame]
    ) -> Iterator[tuple[int, pl.DataFrame]]:
        return map_in_order(parts, work, lambda made: made, self.workers)

    def count(self, sources: Sequence[Source], job: CountJob) -> Iterator[Counted]:
        """Run pass 1; typed rows go to a temporary file."""
        self.spill.clear()
        self.numbers = []
        self._split_counts = total = job.empty_counts()
        parts = list[Source]()
        for source in sources:
            parts += self.parts(source)
        parts = self._numbering.start(parts)

        def work(block: Block) -> tuple[Counted, SplitCounts, int | None]:
            counted, split_counts, typed = count(block, job)
            # Written by the thread that made them, so that typed rows do not wait in memory for their block's turn.
            number = self.spill.write(typed) if typed else None
            return counted, split_counts, number

        def merge(result: tuple[Counted, SplitCounts, int | None]) -> tuple[Counted, int | None]:
            # Merged at once, in any order: the sums are the same, and counts would take much memory while they wait.
            counted, split_counts, number = result
            total.merge(split_counts)
            return counted, number

        for part, (counted, number) in map_in_order(parts, work, merge, self._blocks_at_once(job.spec)):
            if number is not None:
                self.numbers.append(number)
            yield self._numbering.numbered(part, parts[part], counted)

    def _blocks_at_once(self, spec: DataSpec) -> int:
        # Returns the number of workers, or fewer if rows have very many columns, so that memory does not grow with
        # columns times workers. Polars divides a wide block among threads of its own.
        at_once = max(_COLUMNS_TOGETHER // max(len(spec.columns), 1), 2)
        return min(self.workers, at_once)

    def split_counts(self) -> SplitCounts:
        assert self._split_counts is not None
        return self._split_counts

    def count_label_leaks(self, leaks: LabelLeakCounts, first_test_day: int) -> None:
        """Read as many blocks again as needed, while others fit and write; done at the end of the day."""

        def read() -> None:
            for number in self.numbers:
                if leaks.enough:
                    return
                leaks.add(*train_codes(self.spill.block(number), first_test_day))

        # One thread, in the order of the blocks: which rows are looked at must not depend on timing.
        self._label_leaks = self._encoders.submit(read)

    def sample(self, first_test_day: int) -> Callable[[], Iterable[pl.DataFrame]]:
        return lambda: (train_rows(self.spill.block(number), first_test_day) for number in self.numbers)

    def fit_state(
        self, spec: DataSpec, split_counts: SplitCounts, before: FittedState | None, day: FittingDay
    ) -> FittedState:
        # Pass 2 does not reuse the memory that pass 1 freed, so make glibc return it to the system.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(ctypes.c_size_t(0))
        # Run as many fits at a time as take no more memory than a single one may; only one if ids are on disk.
        features_at_once = 1
        if not any(counts.on_disk for counts in split_counts.train.counts.values()):
            ids = IDS_IN_MEMORY // max(sum(feature.mapping.vocabulary for feature in spec.sparse), 1)
            features_at_once = max(min(self.workers, IDS_OF_A_FEATURE // max(ids, 1)), 1)
        return fitted_state(spec, split_counts.train, before, day, partial(in_order, workers=features_at_once))

    def end_day(self) -> None:
        """Wait for the search for ids that give the label away."""
        if self._label_leaks is not None:
            # Raises the error of that thread, which would be lost otherwise.
            self._label_leaks.result()
            self._label_leaks = None

    def writer(self, draft: Draft, folder: str, config: IngestConfig) -> PartWriter:
        """Return a writer of files in this process, whose threads encode the columns."""
        return PartWriter(draft, folder, config, self._encoders)

    def write(self, job: TransformJob, writers: Mapping[str, PartWriter]) -> Iterator[tuple[int, pl.DataFrame | None]]:
        """Run pass 2, several blocks at a time."""
        made = in_order(
            lambda number: transformed(self.spill.block(number), job), self.numbers, self._blocks_at_once(job.spec)
        )
        for folders in made:
            for folder, writer in writers.items():
                if folder in folders and folder != EVENTS:
                    writer.add(folders[folder])
            events = folders.get(EVENTS) if EVENTS in writers else None
            yield sum(folders[split].height for split in job.splits), events


def in_order(work: Callable[[A], B], items: Iterable[A], workers: int) -> Generator[B, None, None]:
    """Yield ``work`` of each item in order, by ``workers`` threads, at most that many items ahead."""
    with ThreadPoolExecutor(workers, thread_name_prefix="nightjar-ingest") as pool:
        ahead: deque[Future[B]] = deque()
        try:
            for item in items:
                ahead.append(pool.submit(work, item))
                # An item may be a block, which this frame must not keep alive while it waits for a result.
                del item
                if len(ahead) > workers:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


class Numbering:
    """Counts the lines of a file before each part, as far as its blocks were counted, and keeps them for another count.

    A later part's lines have their numbers only once those before it are counted.
    """

    def __init__(self) -> None:
        # Lines of its file before each part.
        self._before: dict[int, int] = {}
        # Lines of each file so far.
        self._lines: dict[str, int] = {}
        self._part, self._shift = -1, 0

    def start(self, parts: Sequence[Source]) -> list[Source]:
        """Return ``parts``, which are counted now, numbered as far as that is known."""
        self._lines, self._part = {}, -1
        numbered = []
        for number, part in enumerate(parts):
            numbered.append(part.numbered(self._before.get(number, 0)))
        return numbered

    def numbered(self, number: int, part: Source, counted: Counted) -> Counted:
        """Return ``counted``, of the next block of ``part``, with the rejects' lines as the file has them."""
        if number != self._part:
            before = self._lines.get(counted.file, 0) if part.is_later else 0
            self._part, self._shift = number, before - self._before.get(number, 0)
            self._before[number] = before
        self._lines[counted.file] = self._lines.get(counted.file, part.lines_before) + counted.lines
        if not self._shift or not counted.rejects:
            return counted
        # The block was numbered before all lines in front of its part were counted: its numbers are off by the rest.
        rejects = [replace(reject, line=reject.line + self._shift) for reject in counted.rejects]
        return replace(counted, rejects=rejects)
