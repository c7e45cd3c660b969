"""Brings rows into slots: the tier's thread, reads for several shards together, batches that wait for slots.

Only one thread (``SsdWorker``) touches the tier's maps, slots and files, so these need no locks.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np

from pipeline.core.errors import GuardError
from pipeline.embeddings.ssd.aio import I64, DiskQueue
from pipeline.embeddings.ssd.log import F32, LogReads
from pipeline.embeddings.ssd.shard import ShardRequest, SsdShard

T = TypeVar("T")
Parts = list[tuple[SsdShard, ShardRequest]]
# The ``era`` of a part that was let go before it had slots.
LEFT_OUT = -2
# The thread uses the cores that the dense part leaves, and releases the interpreter lock quickly, since a training step
# waits for it some hundred times. On two cores a step took 116 ms with Python's 5 ms and 94 with 0.2; with a faster
# dense part and a log that is cleaned, 130 with 0.2 and 75 with 0.05: lookups waited 54 and 2
# (docs/measurements/ssd.md).
_NICE = 10
_SWITCH_SECONDS = 0.00005


class SsdWorker:
    """Runs tasks one after another, in their order. An error ends all of them; ``check`` and ``call`` raise it.

    ``idle`` is called while there is no task, until it returns that nothing is left to do; the next task wakes it.
    ``refused`` says why the thread has the same priority as training, '' if it has a lower one.
    """

    def __init__(self, idle: Callable[[], bool] | None = None) -> None:
        self._idle = idle
        self._tasks: deque[Callable[[], object]] = deque()
        self._change = threading.Condition()
        self._error: BaseException | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="nightjar-ssd", daemon=True)
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        self.refused = ""
        self._began = threading.Event()
        self._thread.start()
        self._began.wait()

    def submit(self, task: Callable[[], object], *, urgent: bool = False) -> None:
        """Queue ``task``; an ``urgent`` one goes to the front."""
        with self._change:
            if urgent:
                self._tasks.appendleft(task)
            else:
                self._tasks.append(task)
            self._change.notify_all()

    def call(self, task: Callable[[], T]) -> T:
        """Run ``task`` before all queued ones and return its result; raises its error."""
        result: list[T] = []
        done = threading.Event()

        def run() -> None:
            result.append(task())
            done.set()

        self.submit(run, urgent=True)
        self.wait(done)
        return cast(T, result[0])

    def wait(self, event: threading.Event) -> None:
        """Wait until a task sets ``event``; raises the error that ended the thread."""
        while not event.wait(0.05):
            if self._stopped and not event.is_set():
                self.check()
                raise RuntimeError("the SSD tier was closed while a lookup waited for its rows")

    def check(self) -> None:
        """Raise the error of a task, if there was one."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread after its current task; queued ones are dropped."""
        with self._change:
            self._stopped = True
            self._change.notify_all()
        self._thread.join()
        sys.setswitchinterval(self._interval)

    def _run(self) -> None:
        try:
            # Only Linux changes a single thread here and not the whole process.
            if sys.platform == "linux":
                try:
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
                except OSError as error:
                    self.refused = error.strerror or str(error)
            self._began.set()
            while True:
                while self._idle is not None and not self._tasks and not self._stopped and self._idle():
                    pass
                with self._change:
                    self._change.wait_for(lambda: self._tasks or self._stopped)
                    if self._stopped:
                        return
                    task = self._tasks.popleft()
                task()
        except BaseException as error:
            # ``check`` and ``wait`` raise it in training's thread.
            self._error = error
            self._stopped = True
            self._began.set()


@dataclass(frozen=True)
class _MissingRows:
    """Rows of a shard that are in no slot; their values go to ``records`` [n, words]."""

    shard: SsdShard
    rows: I64
    where: I64
    records: F32


class Fetcher:
    """Reads rows of several shards together, so that the disk gets all of a batch's requests at once."""

    def __init__(self) -> None:
        self.queue = DiskQueue()

    def fetch(self, parts: Parts) -> None:
        """Bring the rows of ``parts``, all of one batch, into slots, and mark the parts as ready."""
        claims: list[tuple[_MissingRows, ShardRequest, I64]] = []
        for shard, part in parts:
            if len(part.rows):
                absent, where = shard.claim(part)
                records = np.empty((len(absent), shard.log.words), np.float32)
                claims.append((_MissingRows(shard, part.rows[absent], where, records), part, absent))
        self._load([missing for missing, _, _ in claims])
        for missing, part, absent in claims:
            missing.shard.fill(part, absent, missing.where, missing.records)
        for _, part in parts:
            part.ready.set()

    def read(self, shard: SsdShard, places: I64) -> F32:
        """Return copies of the records of rows ``places``, wherever they are."""
        kernel_rows, where = shard.look_up(places)
        away = np.flatnonzero(kernel_rows < 0)
        records = np.empty((len(places), shard.log.words), np.float32)
        shard.gather(kernel_rows, records)
        missing = _MissingRows(shard, places[away], where, np.empty((len(away), shard.log.words), np.float32))
        self._load([missing])
        records[away] = missing.records
        return records

    def _load(self, wanted: Sequence[_MissingRows]) -> None:
        # Records of one size are read together, since they share an array.
        by_words: dict[int, list[tuple[_MissingRows, LogReads]]] = {}
        for missing in wanted:
            reads = missing.shard.find(missing.rows, missing.where, missing.records)
            # None means that all of them were in memory.
            if reads is not None:
                by_words.setdefault(missing.shard.log.words, []).append((missing, reads))
        for words, reads_of_size in by_words.items():
            self._read_records(reads_of_size, words)

    def _read_records(self, reads: list[tuple[_MissingRows, LogReads]], words: int) -> None:
        # 1. Make one list of requests for all shards, and one array for all records.
        requests, begins, size = [], [], 0
        for missing, read in reads:
            fd = np.full(len(read.offset), missing.shard.log.file.fd)
            requests.append((fd, read.offset, read.length, read.count, read.skip, read.target + size))
            begins.append(size)
            size += len(missing.records)
        fds, offset, length, count, skip, target = map(np.concatenate, zip(*requests, strict=True))
        records = np.empty((size, words), np.float32)
        # View a record as one item, which may begin at any word and is copied as a whole.
        first, whole = np.cumsum(count) - count, records.view(f"V{4 * words}")[:, 0]
        # 2. As reads are done, put their records where they are wanted.
        try:
            for which, where, memory in self.queue.read(fds, offset, length):
                counts = count[which]
                before = np.repeat(first[which] - (np.cumsum(counts) - counts), counts)
                numbers = before + np.arange(len(before))
                at = np.repeat(where, counts) + skip[numbers]
                items = np.ndarray(len(memory) - words + 1, whole.dtype, memory, strides=(4,))
                whole[target[numbers]] = items[at]
        except OSError as error:
            # It is unknown which request failed, so all files are named. ``check`` has a separate error for a truncated
            # file.
            names: dict[str, None] = {}
            places: dict[str, None] = {}
            for missing, _ in reads:
                file = missing.shard.log.file
                file.check()
                names[repr(missing.shard.name)] = None
                places[str(file.directory)] = None
            raise GuardError(
                f"the scratch files of the rows of {', '.join(names)} in {', '.join(places)} cannot be read: "
                f"{error.strerror}",
                hint="hardware.ssd_paths=[/another/disk]; the same command continues from the last checkpoint",
            ) from error
        # 3. Hand the records to their shards; rows that were not read have their records already.
        for (missing, read), begin in zip(reads, begins, strict=True):
            missing.records[read.target] = records[begin + read.target]

    def close(self) -> None:
        """Close the queue."""
        self.queue.close()


class WaitingParts:
    """Parts of announced batches without slots. ``bring`` fetches the rows of parts, at most one of each shard.

    There is a queue for each shard, since the kernels of a model look up their tables one after another: the next
    batch's rows of one table may be needed while the previous batch still holds rows of another.
    """

    def __init__(self, bring: Callable[[Parts], None]) -> None:
        self._bring = bring
        self._parts: dict[SsdShard, deque[ShardRequest]] = {}

    def join(self, parts: Parts) -> None:
        """Bring the parts with free slots; the others wait. GuardError for a part larger than its shard's cache."""
        ready = []
        for shard, part in parts:
            if part.era == LEFT_OUT:
                continue
            if shard in self._parts or not shard.room(part):
                self._parts.setdefault(shard, deque()).append(part)
            else:
                ready.append((shard, part))
        self._bring(ready)

    def release(self, parts: Parts) -> None:
        """End ``parts``, trained or left out, and bring the waiting ones that now have free slots."""
        for shard, part in parts:
            if part.era >= 0:
                shard.release(part)
                continue
            part.era = LEFT_OUT
            if shard in self._parts and part in self._parts[shard]:
                self._parts[shard].remove(part)
        while True:
            self._parts = {shard: queue for shard, queue in self._parts.items() if queue}
            ready = []
            for shard, queue in self._parts.items():
                if shard.room(queue[0]):
                    ready.append((shard, queue[0]))
            if not ready:
                return
            for shard, _ in ready:
                self._parts[shard].popleft()
            self._bring(ready)

    def leave(self, shard: SsdShard) -> None:
        """Drop the parts that wait for slots of ``shard``."""
        self._parts.pop(shard, None)


def check_room(shard: SsdShard, part: ShardRequest) -> None:
    """Check that batches under way leave enough slots for a batch that was not announced.

    Raises:
        GuardError: They leave too few.
    """
    if not shard.room(part):
        raise GuardError(
            f"the plan's cache_rows of table {shard.name!r} is too small: {len(part.rows):,} rows are needed beside "
            "those of the batches read ahead",
            hint=f"a larger +plan.tables.{shard.name}.cache_rows, or train.prefetch_batches=1",
        )
