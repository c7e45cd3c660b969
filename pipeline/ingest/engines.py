"""Who runs the two passes over the blocks of a log: threads of this process (``local``), or workers of Ray (``ray``).

An engine counts every block of its sources, keeps their typed rows, fits the mappings of ids, and writes those rows.
Everything happens in the order of the blocks, whoever finishes first, so a dataset's bytes are the same out of both.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import polars as pl
import pyarrow as pa

from pipeline.config.ingest import IngestConfig
from pipeline.cpus import available_cpus
from pipeline.ingest.blocks import Counted, CountJob, TransformJob, count, train_codes, train_rows, transformed
from pipeline.ingest.output import PartWriter, encoded_frame
from pipeline.ingest.parallel import dealt
from pipeline.ingest.quality import Alone
from pipeline.ingest.schema import DataSpec, SparseSpec
from pipeline.ingest.sources import Block, Source
from pipeline.ingest.spill import Spill
from pipeline.ingest.state import fitted_state
from pipeline.ingest.statistics_pass import Fit, Partial
from pipeline.ingest.transform_pass import FittedState
from pipeline.ingest.vocab_counts import IDS_IN_MEMORY, IDS_OF_A_FEATURE
from pipeline.records.dataset import EVENTS
from pipeline.specs.id_mapping import FittingDay
from pipeline.store.artifacts import Draft

# Columns of all blocks that are under way at a time: each has counts, and copies, of its own.
_COLUMNS_TOGETHER = 2560
# mallopt(3): M_TRIM_THRESHOLD and M_MMAP_THRESHOLD with their bytes, M_ARENA_MAX.
_MALLOC = {-1: 64 << 20, -3: 64 << 20, -8: 1}
A = TypeVar("A")
B = TypeVar("B")


class RowsWriter(Protocol):
    """The Parquet files of one folder of a dataset; complete at the end of ``with``. ``rows``: added so far."""

    files: list[str]
    groups: list[list[int]]
    rows: int

    def add(self, frame: pl.DataFrame) -> None:
        """Append rows of this process."""


class IngestEngine(ExitStack, ABC):
    """A log, or its days one after the other: ``count``, ``fit``, ``leaks``, ``fitted``, ``write``, ``end_day``.

    Of the last day, ``settle`` and ``write_mappings`` come before ``write``; they may go on beside it. Whoever counts
    the same sources again starts the day anew. What is kept in between is gone after ``with``.
    """

    @abstractmethod
    def parts(self, source: Source) -> Sequence[Source]:
        """The pieces that ``count`` reads a source in."""

    @abstractmethod
    def map_blocks(
        self, parts: Sequence[Source], work: Callable[[Block], pl.DataFrame]
    ) -> Iterator[tuple[int, pl.DataFrame]]:
        """What ``work`` makes of every block of ``parts``, in order, with the number of the part; before ``count``."""

    @abstractmethod
    def count(self, sources: Sequence[Source], job: CountJob) -> Iterator[Counted]:
        """Pass 1 over every block of ``sources``."""

    @abstractmethod
    def fit(self) -> Fit:
        """What the last count counted, once all of its blocks were taken."""

    @abstractmethod
    def leaks(self, alone: Alone, first_test_day: int) -> None:
        """Add typed train rows to ``alone`` until it has enough."""

    @abstractmethod
    def sample(self, first_test_day: int) -> Callable[[], Iterable[pl.DataFrame]]:
        """The typed train rows of every block, for a mapping that looks at them again."""

    @abstractmethod
    def fitted(self, spec: DataSpec, fit: Fit, before: FittedState | None, day: FittingDay) -> FittedState:
        """The transforms that the train rows ask for, after those of the day ``before``."""

    def continued(self, state: FittedState) -> FittedState:
        """The state of another dataset, as ``fitted`` takes it for ``before``."""
        return state

    @abstractmethod
    def writer(self, draft: Draft, folder: str, config: IngestConfig) -> AbstractContextManager[RowsWriter]:
        """What ``write`` fills."""

    @abstractmethod
    def write(self, job: TransformJob, writers: Mapping[str, Any]) -> Iterator[tuple[int, pl.DataFrame | None]]:
        """Pass 2: write the rows of every block by folder; yields how many they were, and their events, if kept."""

    def end_day(self) -> None:
        """Forget the day but for its counts; wait for what was done beside ``write``."""

    def finalize(self, train: Partial, state: FittedState, alone: Alone, then: Mapping[str, Any]) -> None:
        """Have the counts of all days ready for checks and profile; ``then``: features of the day compared with."""
        train.finalize({name: t.lookup["hash"] for name, t in state.sparse.items() if t.lookup is not None})

    def write_mappings(
        self, draft: Draft, spec: DataSpec, state: FittedState, compression: str, *, continued: bool
    ) -> None:
        """Write the files of the fitted mappings; ``continued``: with what only the next day needs."""

        def files(f: SparseSpec) -> dict[str, pa.Buffer]:
            made = f.mapping.files(f.name, state.sparse[f.name], continued=continued)
            return {name: encoded_frame(frame, compression) for name, frame in made.items()}

        for encoded in in_order(files, iter(spec.owners), available_cpus()):
            for name, data in encoded.items():
                with draft.open(name) as sink:
                    sink.write(data)


class LocalEngine(IngestEngine):
    """As many threads as there are CPUs to use: Polars, NumPy and Arrow work without the interpreter's lock."""

    def __init__(self, workers: int | None = None) -> None:
        super().__init__()
        self.workers = workers or available_cpus()
        _keep_freed_memory()
        self.spill = Spill()
        self.numbers: list[int] = []  # of the blocks in the spill, in their order
        self.callback(self.spill.file.close)
        self._encoders = self.enter_context(ThreadPoolExecutor(self.workers, thread_name_prefix="nightjar-encode"))
        self._fit: Fit | None = None
        self._looking: Future[None] | None = None
        self._numbering = Numbering()

    def parts(self, source: Source) -> Sequence[Source]:
        """Those of a source that takes work to read; any other as it is."""
        return source.parts() if source.decodes else [source]

    def map_blocks(
        self, parts: Sequence[Source], work: Callable[[Block], pl.DataFrame]
    ) -> Iterator[tuple[int, pl.DataFrame]]:
        """See ``IngestEngine``."""
        return dealt(parts, work, lambda made: made, self.workers)

    def count(self, sources: Sequence[Source], job: CountJob) -> Iterator[Counted]:
        """Pass 1; typed rows go to a temporary file."""
        self.spill.clear()
        self.numbers = []
        self._fit = fit = job.fit()
        parts = self._numbering.start([part for source in sources for part in self.parts(source)])

        def work(block: Block) -> tuple[Counted, Fit, int | None]:
            counted, fit, typed = count(block, job)
            return counted, fit, self.spill.write(typed) if typed else None

        def take(made: tuple[Counted, Fit, int | None]) -> tuple[Counted, int | None]:
            fit.merge(made[1])
            return made[0], made[2]

        for part, (counted, number) in dealt(parts, work, take, self._together(job.spec)):
            if number is not None:
                self.numbers.append(number)
            yield self._numbering.numbered(part, parts[part], counted)

    def _together(self, spec: DataSpec) -> int:
        # Blocks that are worked on at a time: as many as workers, fewer where rows have very many columns.
        # Memory so does not grow with columns times workers; Polars divides a wide block among threads of its own.
        return min(self.workers, max(_COLUMNS_TOGETHER // max(len(spec.columns), 1), 2))

    def fit(self) -> Fit:
        """Everything, merged as it came."""
        assert self._fit is not None
        return self._fit

    def leaks(self, alone: Alone, first_test_day: int) -> None:
        """Read as many blocks again as it takes, while others fit and write; done at the end of the day."""
        self._looking = self._encoders.submit(self._read_leaks, alone, first_test_day)

    def _read_leaks(self, alone: Alone, first_test_day: int) -> None:
        for number in self.numbers:
            if alone.enough:
                return
            alone.add(*train_codes(self.spill.block(number), first_test_day))

    def sample(self, first_test_day: int) -> Callable[[], Iterable[pl.DataFrame]]:
        """Read again."""
        return lambda: (train_rows(self.spill.block(number), first_test_day) for number in self.numbers)

    def fitted(self, spec: DataSpec, fit: Fit, before: FittedState | None, day: FittingDay) -> FittedState:
        """A few features at a time. What pass 1 leaves behind lies elsewhere than pass 2 needs memory."""
        _give_freed_memory_back()
        together = self._fitted_together(fit.train)
        return fitted_state(spec, fit.train, before, day, lambda work, each: in_order(work, iter(each), together))

    def _fitted_together(self, train: Partial) -> int:
        # Features whose fits take no more memory at a time than that of a single one may; of ids on disk one.
        if any(counts.on_disk for counts in train.counts.values()):
            return 1
        each = IDS_IN_MEMORY // max(sum(f.mapping.vocabulary for f in train.spec.sparse), 1)
        return max(min(self.workers, IDS_OF_A_FEATURE // max(each, 1)), 1)

    def end_day(self) -> None:
        """Have the look at ids that give the label away end with the day."""
        if self._looking is not None:
            self._looking.result()
            self._looking = None

    def writer(self, draft: Draft, folder: str, config: IngestConfig) -> PartWriter:
        """Files written by this process, whose threads encode the columns."""
        return PartWriter(draft, folder, config, self._encoders)

    def write(self, job: TransformJob, writers: Mapping[str, PartWriter]) -> Iterator[tuple[int, pl.DataFrame | None]]:
        """Pass 2, several blocks at a time."""
        numbers, together = iter(self.numbers), self._together(job.spec)
        for folders in in_order(lambda number: transformed(self.spill.block(number), job), numbers, together):
            for folder, writer in writers.items():
                if folder in folders and folder != EVENTS:
                    writer.add(folders[folder])
            yield (
                sum(folders[split].height for split in job.splits),
                folders.get(EVENTS) if EVENTS in writers else None,
            )


def _keep_freed_memory() -> None:
    # Have glibc keep freed pieces up to 64 MiB for the next block, whichever thread takes it: less is cleared anew.
    # Other C libraries are left as they are.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in _MALLOC.items():
            mallopt(parameter, value)


def _give_freed_memory_back() -> None:
    # Have glibc hand pages of freed pieces to the system; other C libraries are left as they are.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def in_order(work: Callable[[A], B], items: Iterator[A], workers: int) -> Generator[B, None, None]:
    """``work`` of each item in the order of the items, by ``workers`` threads, no more than that many items ahead."""
    with ThreadPoolExecutor(workers, thread_name_prefix="nightjar-ingest") as pool:
        ahead: deque[Future[B]] = deque()
        try:
            for item in items:
                ahead.append(pool.submit(work, item))
                del item
                if len(ahead) > workers:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


class Numbering:
    """Lines of its file before each part, as far as its blocks were counted, in order; remembered for another count.

    A later part's lines have their numbers only once those before it are counted.
    """

    def __init__(self) -> None:
        self._before: dict[int, int] = {}  # of a part
        self._lines: dict[str, int] = {}  # of a file so far
        self._part, self._shift = -1, 0

    def start(self, parts: Sequence[Source]) -> list[Source]:
        """``parts``, which are counted now, numbered as far as that is known."""
        self._lines, self._part = {}, -1
        return [part.numbered(self._before.get(number, 0)) for number, part in enumerate(parts)]

    def numbered(self, number: int, part: Source, counted: Counted) -> Counted:
        """What was counted of the next block, of ``part``, with the rejects' lines as the file has them."""
        if number != self._part:
            before = self._lines.get(counted.file, 0) if part.is_later else 0
            self._part, self._shift = number, before - self._before.get(number, 0)
            self._before[number] = before
        self._lines[counted.file] = self._lines.get(counted.file, part.lines_before) + counted.lines
        if not self._shift or not counted.rejects:
            return counted
        rejects = [replace(reject, line=reject.line + self._shift) for reject in counted.rejects]
        return replace(counted, rejects=rejects)
