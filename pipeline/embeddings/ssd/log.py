"""The rows of one shard on disk as a log, to which rows that leave memory are appended.

A cold row is read alone but written together with hundreds of others, so a step costs reads of single pages and a few
long writes. Written in place, every row would cost a random page write, which a disk does at half the rate of reads,
and sixteen times the bytes. Segments with few live rows are emptied to make room (Rosenblum and Ousterhout, "The Design
and Implementation of a Log-Structured File System", SOSP'91, section 3).

The cost of emptying depends on how unevenly the rows of segments die, so rows are separated by how long they stay on
the disk, as far as that is known: a row that comes back shows how long it was away, and a row found alive in an emptied
segment shows that it stays longer (compare SepBIT, FAST'22). Only a segment's age, the mean of its rows', has to be
kept for that.

A record is the row's values (weights and optimizer state) and its number, in words of 4 bytes. So a shard has at most
``MOST_ROWS`` rows.
"""

from __future__ import annotations

import mmap
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.embeddings.ssd.aio import I64
from pipeline.embeddings.ssd.scratch_files import ScratchFile
from pipeline.records.scratch import EMPTIED, IN_MEMORY, KINDS, LOG_SPARE, PAGE, log_shape, place_bytes

F32 = NDArray[np.float32]
I8 = NDArray[np.int8]
# The most rows of a shard: a record has 32 bits for the row's number.
MOST_ROWS = 2**32
# The most pages of a read; a longer run of wanted pages becomes several reads.
_RUN = 16
# A row's kind is the first whose bound exceeds its stay, counted in rows that leave meanwhile, over the log's rows.
_STAYS = (0.5, 1.0, 2.0)
# Idle time keeps this many more segments free than the next rows may fill, or this share of the spare ones if that is
# fewer, and empties no segment with a larger share of live rows.
_IDLE_AHEAD, _IDLE_SHARE, _IDLE_FILLED = 2 * EMPTIED, 0.25, 0.8


@dataclass
class WriteCounts:
    """Bytes of the values of rows that left memory, and bytes that logs wrote for them. One thread counts."""

    left: int = 0
    logged: int = 0


@dataclass(frozen=True)
class LogReads:
    """Reads of [offset, offset + length) and the records in them: ``count[i]`` of read i, one read after the other.

    Record j begins ``skip[j]`` words into its read and is wanted as row ``target[j]``.
    """

    offset: I64
    length: I64
    count: I64
    skip: I64
    target: I64


def place_type(rows: int) -> type[np.signedinteger[Any]]:
    """Return the integer type for places of records in a log of ``rows`` rows, and for -1 - the number of a slot."""
    if place_bytes(rows) == 4:
        return np.int32
    return np.int64


class RowLog:
    """Records of up to ``rows`` rows in a scratch file; places are record numbers. Use it from one thread.

    ``values`` counts weights and states of a row; ``spare`` is the share of records that stays free. ``written`` counts
    bytes.

    Raises GuardError if the disk of ``directory`` has no room or fails; ``what`` names the rows in messages.
    ``emptied`` counts the segments emptied to make room since the last ``clear``, ``added`` the rows that left memory
    since.
    """

    def __init__(
        self,
        directory: Path,
        rows: int,
        values: int,
        what: str,
        spare: float = LOG_SPARE,
        written: WriteCounts | None = None,
    ) -> None:
        self.words, self._stays = values + 1, np.multiply(_STAYS, rows)
        self._segment, self.per_segment, segments = log_shape(rows, 4 * values, spare)
        self.file = ScratchFile(directory, segments * self._segment, what, direct=True)
        self.written = WriteCounts() if written is None else written
        self._buffers: list[mmap.mmap] = []
        self._records: list[F32] = []
        for _ in range(IN_MEMORY):
            buffer = mmap.mmap(-1, self._segment)
            self._buffers.append(buffer)
            # The end of a segment, which is shorter than a record, stays unused.
            words = np.frombuffer(buffer, np.float32)[: self.per_segment * self.words]
            self._records.append(words.reshape(self.per_segment, self.words))
        self._live = np.zeros(segments, np.int32)
        self._ahead = min(_IDLE_AHEAD, int(_IDLE_SHARE * (segments - rows / self.per_segment)))
        self.clear()

    def clear(self) -> None:
        """Forget all records."""
        self._live[:] = 0
        self._closed = np.zeros(len(self._live), bool)
        # The mean of ``added`` when the segment's rows left memory.
        self._born = np.zeros(len(self._live))
        self._free = deque(range(KINDS, len(self._live)))
        self._open, self._used, self._births = list(range(KINDS)), [0] * KINDS, [0.0] * KINDS
        # The buffer with the segment's records; -1: they are only on the disk.
        self._buffer = np.full(len(self._live), -1, np.int8)
        self._buffer[:KINDS] = range(KINDS)
        self.emptied = self.added = 0

    @property
    def crowded(self) -> bool:
        """Whether segments must be emptied before more is added."""
        return len(self._free) <= KINDS

    def kinds(self, places: I64) -> I8:
        """Return the kinds of rows whose records were at ``places`` (-1: not in the log so far)."""
        born = np.where(places < 0, 0, self._born[places // self.per_segment])
        return self._kind_of_stay(self.added - born)

    def _kind_of_stay(self, stay: Any) -> I8:
        kind: I8 = np.searchsorted(self._stays, stay, side="right").astype(np.int8)
        return kind

    def add(self, rows: I64, values: F32, kinds: I8) -> I64:
        """Write records for ``rows`` that leave memory, at most ``per_segment``, and return their places.

        It must not be called while ``crowded``.
        """
        self.added += len(rows)
        self.written.left += 4 * len(rows) * (self.words - 1)
        order = np.argsort(kinds, kind="stable")
        ends = np.searchsorted(kinds[order], np.arange(KINDS + 1))
        places = np.empty(len(rows), np.int64)
        for kind in range(KINDS):
            members = order[ends[kind] : ends[kind + 1]]
            if len(members):
                places[members] = self._append(kind, rows[members], values[members], self.added)
        return places

    def _append(self, kind: int, rows: I64, values: F32, born: float) -> I64:
        places = []
        while len(rows):
            used, segment = self._used[kind], self._open[kind]
            count = min(len(rows), self.per_segment - used)
            part = self._records[self._buffer[segment]][used : used + count]
            part[:, :-1], part.view(np.uint32)[:, -1] = values[:count], rows[:count]
            first = segment * self.per_segment + used
            places.append(np.arange(first, first + count))
            self._live[segment] += count
            self._used[kind] += count
            self._births[kind] += count * born
            rows, values = rows[count:], values[count:]
            if self._used[kind] == self.per_segment:
                self._write_segment(kind)
        return np.concatenate(places)

    def _write_segment(self, kind: int) -> None:
        # Writes the full segment of ``kind`` and opens another.
        segment, self._used[kind] = self._open[kind], 0
        born, self._births[kind] = self._births[kind] / self.per_segment, 0.0
        if not self._live[segment]:
            # The segment has no live record, so it is filled again.
            return
        buffer = int(self._buffer[segment])
        self.file.write(memoryview(self._buffers[buffer]), segment * self._segment)
        self.written.logged += self._segment
        self._closed[segment], self._born[segment], self._buffer[segment] = True, born, -1
        self._open[kind] = opened = self._free.popleft()
        self._buffer[opened], self._born[opened] = buffer, self.added

    def drop(self, places: I64) -> None:
        """Mark the records at ``places`` as dead; segments without live ones become free."""
        segments, counts = np.unique(places // self.per_segment, return_counts=True)
        self._live[segments] -= counts.astype(np.int32)
        for segment in segments[(self._live[segments] == 0) & self._closed[segments]].tolist():
            self._release(segment)

    def _release(self, segment: int) -> None:
        self._live[segment], self._closed[segment] = 0, False
        self._free.append(segment)

    def worth_emptying(self) -> bool:
        """Return whether idle time is well spent on ``empty``, so that later rows find free segments."""
        if len(self._free) > KINDS + self._ahead:
            return False
        victims = self._choose_victims()
        return len(victims) > 0 and bool(self._live[victims].max() < _IDLE_FILLED * self.per_segment)

    def _choose_victims(self) -> I64:
        # Returns at most ``EMPTIED`` closed segments that give the most room for the least copying, best first. They
        # are ranked by (1 - u)^2 / u x age, where u is the share of live records: the rule of LFS (section 3.6) with
        # the room squared, which writes 2 to 6 % less for rows of uneven frequency (docs/measurements/ssd.md).
        closed = np.flatnonzero(self._closed & (self._live < self.per_segment))
        live = self._live[closed] / self.per_segment
        gain = (1 - live) ** 2 / np.maximum(live, 1e-3) * (self.added + 1 - self._born[closed])
        if len(closed) > EMPTIED:
            best = np.argpartition(-gain, EMPTIED)[:EMPTIED]
            closed, gain = closed[best], gain[best]
        victims: I64 = closed[np.argsort(-gain, kind="stable")]
        return victims

    def empty(self) -> list[tuple[I64, F32, I64, float]]:
        """Take out segments that are worth it; for each (row numbers, records, places, when they left memory).

        Dead records are included. The next call overwrites the records. Find the live ones of all segments before
        ``again`` adds the first, since it may fill a segment that was just emptied.
        """
        taken = []
        for buffer, segment in enumerate(self._choose_victims().tolist(), KINDS):
            self.file.read_into(memoryview(self._buffers[buffer]), segment * self._segment)
            records = self._records[buffer]
            self.emptied += 1
            self._release(segment)
            first = segment * self.per_segment
            rows = records.view(np.uint32)[:, -1].astype(np.int64)
            taken.append((rows, records, np.arange(first, first + self.per_segment), float(self._born[segment])))
        return taken

    def again(self, rows: I64, values: F32, born: float) -> I64:
        """Write records for ``rows`` that were alive in a segment of ``empty``, and return their places."""
        if not len(rows):
            return np.empty(0, np.int64)
        # These rows stay longer than most.
        kind = min(KINDS - 1, int(self._kind_of_stay(self.added - born)) + 1)
        return self._append(kind, rows, values, born)

    def unwritten(self, places: I64) -> tuple[NDArray[np.bool_], F32]:
        """Return which of ``places`` are not on the disk yet, and copies of the records there."""
        buffers = self._buffer[places // self.per_segment]
        waiting: NDArray[np.bool_] = buffers >= 0
        places, buffers = places[waiting], buffers[waiting]
        copies = np.empty((len(places), self.words), np.float32)
        for buffer in set(buffers.tolist()):
            members = np.flatnonzero(buffers == buffer)
            copies[members] = self._records[buffer][places[members] % self.per_segment]
        return waiting, copies

    def reads(self, places: I64, target: I64) -> LogReads:
        """Return the reads for the records at ``places`` [n], each wanted as row ``target`` [n].

        Every page is read once.
        """
        # 1. Find the first and the last page of each record, ascending.
        order = np.argsort(places)
        places = places[order]
        segment, number = np.divmod(places, self.per_segment)
        start = segment * self._segment + number * (4 * self.words)
        first, last = start // PAGE, (start + 4 * self.words - 1) // PAGE
        # 2. Begin a read after a gap, and after ``_RUN`` pages without one.
        gap = np.append(True, first[1:] > last[:-1] + 1)
        head = first[np.maximum.accumulate(np.where(gap, np.arange(len(first)), 0))]
        turn = (first - head) // _RUN
        new = gap | (np.diff(turn, prepend=-1) != 0)
        begins = np.flatnonzero(new)
        offset = first[begins] * PAGE
        length = (np.maximum.reduceat(last, begins) + 1) * PAGE - offset
        count = np.diff(begins, append=len(places))
        return LogReads(offset, length, count, (start - np.repeat(offset, count)) // 4, target[order])
