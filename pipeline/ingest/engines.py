"""Who runs the two passes over the blocks of a log: threads of this process (``local``), or Ray Data (``ray``).

An engine counts every block of its sources, keeps their typed rows, and transforms those once the log is fitted.
Results come in the order of the blocks, whoever finishes first, so a dataset's bytes are the same out of both.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

import polars as pl

from pipeline.cpus import available_cpus
from pipeline.ingest.blocks import Counted, CountJob, TransformJob, count, train_rows, transformed
from pipeline.ingest.sources import Block, Source
from pipeline.ingest.spill import Spill

# mallopt(3): M_TRIM_THRESHOLD and M_MMAP_THRESHOLD with their bytes, M_ARENA_MAX.
_MALLOC = {-1: 64 << 20, -3: 64 << 20, -8: 1}
A = TypeVar("A")
B = TypeVar("B")


class Engine(ExitStack, ABC):
    """One log, or one day of it: ``count``, then ``transform``. What is kept in between is gone after ``with``.

    Whoever counts the same sources again starts anew: the rows of the last count are transformed.
    """

    @abstractmethod
    def count(self, sources: Sequence[Source], job: CountJob) -> Iterator[Counted]:
        """Pass 1 over every block of ``sources``."""

    @abstractmethod
    def transform(self, job: TransformJob) -> Iterator[dict[str, pl.DataFrame]]:
        """Pass 2: the rows by split of every block that has any."""

    @abstractmethod
    def typed(self) -> Iterator[bytes]:
        """The typed rows of every block that has any, as ``count`` of ``blocks`` left them."""

    def train_rows(self, first_test_day: int) -> Iterator[pl.DataFrame]:
        """The typed train rows of every block, for what has to look at them again before pass 2."""
        return (train_rows(typed, first_test_day) for typed in self.typed())


class LocalEngine(Engine):
    """As many threads as there are CPUs to use: Polars, NumPy and Arrow work without the interpreter's lock."""

    def __init__(self, workers: int | None = None) -> None:
        super().__init__()
        self.workers = workers or available_cpus()
        _keep_freed_memory()
        self.spill = Spill()
        self.numbers: list[int] = []  # of the blocks in the spill, in their order
        self.callback(self.spill.file.close)

    def count(self, sources: Sequence[Source], job: CountJob) -> Iterator[Counted]:
        """Pass 1; typed rows go to a temporary file."""
        self.spill.clear()
        self.numbers = []

        def work(block: Block) -> tuple[Counted, int | None]:
            counted, typed = count(block, job)
            return counted, self.spill.write(typed) if typed else None

        blocks = (block for source in sources for block in source.blocks())
        for counted, number in in_order(work, blocks, self.workers):
            if number is not None:
                self.numbers.append(number)
            yield counted

    def transform(self, job: TransformJob) -> Iterator[dict[str, pl.DataFrame]]:
        """Pass 2, as many blocks at a time as there are workers."""
        return in_order(lambda number: transformed(self.spill.block(number), job), iter(self.numbers), self.workers)

    def typed(self) -> Iterator[bytes]:
        """The blocks of the temporary file."""
        return map(self.spill.block, self.numbers)


def _keep_freed_memory() -> None:
    """Have glibc keep freed pieces up to 64 MiB for the next block, whichever thread takes it: less is cleared anew.

    Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in _MALLOC.items():
            mallopt(parameter, value)


def in_order(work: Callable[[A], B], items: Iterator[A], workers: int) -> Iterator[B]:
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
