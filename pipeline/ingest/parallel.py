"""Blocks of the parts of a log, dealt to threads: one thread at a time reads a part, several read several.

Whoever is free takes the next block of the first part that nobody reads at the moment, so a part that is slow to decode
holds nobody up, and a second one is opened only where the first cannot keep all threads busy. Each open part takes
memory: of a Parquet file a row group.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from pipeline.ingest.sources import Block, Source

# Threads that one reader keeps busy: a block takes less to be read than to be worked on.
_BY_EACH_READER = 3
A = TypeVar("A")
B = TypeVar("B")


def map_in_order(
    parts: Sequence[Source], work: Callable[[Block], A], take: Callable[[A], B], workers: int
) -> Iterator[tuple[int, B]]:
    """Yield what comes of every block of ``parts``, with the number of its part, in the order of the blocks.

    ``work``: of a block, by ``workers`` threads. ``take``: of what it makes, by the calling thread, as soon as that is
    there, in any order; what it returns waits for its turn. An error is raised when the turn of its block comes.
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
    """Of a place in a part: an error, or that the part has ended, or what was made of the block."""

    error: BaseException | None
    ended: bool
    made: list[A]


class _OpenPart:
    """A part that is being read."""

    def __init__(self, number: int, source: Source) -> None:
        self.number, self.blocks, self.read, self.is_read = number, _blocks(source), 0, False


class _PartQueue(Generic[A]):
    """Which thread reads which part, and what they have made. ``_room``: for blocks that are under way."""

    def __init__(self, parts: Sequence[Source], work: Callable[[Block], A], workers: int) -> None:
        self._parts, self._work, self._workers = parts, work, workers
        self._most_open = -(-workers // _BY_EACH_READER)
        self._open: list[_OpenPart] = []
        self._opened = 0
        self._changed, self._stopped = threading.Condition(), False
        self._room = threading.Semaphore(workers + 1)
        self._done: queue.SimpleQueue[tuple[tuple[int, int], _BlockOutcome[A]]] = queue.SimpleQueue()

    def next(self) -> tuple[tuple[int, int], _BlockOutcome[A]]:
        done = self._done.get()
        self._room.release()
        return done

    def stop(self) -> None:
        # Have the threads end after the blocks that they work on.
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._room.release(self._workers)

    def run(self) -> None:
        while True:
            self._room.acquire()
            part = self._claimed()
            if part is None:
                return
            self._done.put(((part.number, part.read), self._outcome(part)))

    def _outcome(self, part: _OpenPart) -> _BlockOutcome[A]:
        try:
            block = self._next_block(part)
            return _BlockOutcome(None, block is None, [] if block is None else [self._work(block)])
        except BaseException as error:
            # Raised in the calling thread, whatever it is.
            return _BlockOutcome(error, False, [])

    def _claimed(self) -> _OpenPart | None:
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
        # The next block of `part`, which others may read from then on; None at its end.
        block = None
        try:
            block = next(part.blocks, None)
            return block
        finally:
            with self._changed:
                part.is_read, part.read = False, part.read + 1
                if block is None:
                    self._open.remove(part)
                self._changed.notify_all()


def _blocks(source: Source) -> Iterator[Block]:
    yield from source.blocks()
