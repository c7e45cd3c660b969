"""The rows of one shard on disk as a log: rows that leave memory are appended.

A cold row is read alone but written together with hundreds of others, so a step costs reads of single pages and a few
long writes. Written in place, every row would cost a random page write, which a disk does at half the rate of reads,
and sixteen times the bytes. Segments with few live rows are emptied to make room (Rosenblum and Ousterhout, "The Design
and Implementation of a Log-Structured File System", SOSP'91, section 3). Rows of similar age share a segment and
frequent rows leave it early, so segments empty unevenly, which makes that cheap.

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
from pipeline.embeddings.ssd.files import PAGE, ScratchFile

F32 = NDArray[np.float32]
# Rows of a shard whose numbers fit the 32 bits that a record has for them.
MOST_ROWS = 2**32
_SEGMENT = 256 << 10
# Room beyond that of the rows, as a share of it: the fuller the log, the more is copied to make room.
_SPARE = 0.1
# Pages of a read at most; a long run of wanted pages is several reads.
_RUN = 16


@dataclass(frozen=True)
class Reads:
    """Reads of [offset, offset + length) and the records in them: ``count[i]`` of read i, one read after the other.

    Record j begins ``skip[j]`` words into its read and is wanted as row ``target[j]``.
    """

    offset: I64
    length: I64
    count: I64
    skip: I64
    target: I64


def place_type(rows: int) -> type[np.signedinteger[Any]]:
    """The integer type for the places of records in a log of ``rows`` rows, and for -1 - the number of a slot."""
    return np.int32 if rows * (1 + 2 * _SPARE) <= np.iinfo(np.int32).max else np.int64


def log_bytes(rows: int, values: int) -> int:
    """Bytes of the scratch file of a log of ``rows`` rows of ``values`` weights and states."""
    segment, _, segments = _shape(rows, values)
    return segments * segment


def _shape(rows: int, values: int) -> tuple[int, int, int]:
    """Bytes of a segment, records in one, and how many there are."""
    record = 4 * (values + 1)
    segment = max(_SEGMENT, -(-record // PAGE) * PAGE)
    return segment, segment // record, int(rows * (1 + _SPARE) / (segment // record)) + 4


class RowLog:
    """Records of up to ``rows`` rows in a scratch file; places are record numbers. For one thread.

    ``values``: weights and states of a row.

    GuardError where the disk of ``directory`` has no room or fails; ``what`` names the rows in messages. ``emptied``:
    segments that were emptied to make room since the last ``clear``.
    """

    def __init__(self, directory: Path, rows: int, values: int, what: str) -> None:
        self.words = values + 1
        self._segment, self.per_segment, segments = _shape(rows, values)
        self.file = ScratchFile(directory, segments * self._segment, what, direct=True)
        self._buffers = [mmap.mmap(-1, self._segment) for _ in range(2)]
        self._records, self._loaded = (self._view(buffer) for buffer in self._buffers)
        self._live = np.zeros(segments, np.int32)
        self.clear()

    def _view(self, buffer: mmap.mmap) -> F32:
        words = np.frombuffer(buffer, np.float32)[: self.per_segment * self.words]
        return words.reshape(self.per_segment, self.words)

    def clear(self) -> None:
        """Forget all records."""
        self._live[:] = 0
        self._closed = np.zeros(len(self._live), bool)
        self._free = deque(range(1, len(self._live)))
        self._open, self._used, self.emptied = 0, 0, 0

    @property
    def crowded(self) -> bool:
        """Whether a segment must be emptied before more is added."""
        return len(self._free) < 2

    def add(self, rows: I64, values: F32) -> I64:
        """Records for ``rows`` with their ``values``, at most ``per_segment``; their places. Not while ``crowded``."""
        places = []
        while len(rows):
            count = min(len(rows), self.per_segment - self._used)
            part = self._records[self._used : self._used + count]
            part[:, :-1], part.view(np.uint32)[:, -1] = values[:count], rows[:count]
            first = self._open * self.per_segment + self._used
            places.append(np.arange(first, first + count))
            self._live[self._open] += count
            self._used += count
            rows, values = rows[count:], values[count:]
            if self._used == self.per_segment:
                self._seal()
        return np.concatenate(places) if places else np.empty(0, np.int64)

    def _seal(self) -> None:
        """Write the open segment and open another; reuse one without live records."""
        self._used = 0
        if not self._live[self._open]:
            return
        self.file.write(memoryview(self._buffers[0]), self._open * self._segment)
        self._closed[self._open] = True
        self._open = self._free.popleft()

    def drop(self, places: I64) -> None:
        """Mark the records at ``places`` as dead; segments without live ones become free."""
        segments, counts = np.unique(places // self.per_segment, return_counts=True)
        self._live[segments] -= counts.astype(np.int32)
        for segment in segments[(self._live[segments] == 0) & self._closed[segments]].tolist():
            self._release(segment)

    def _release(self, segment: int) -> None:
        self._live[segment], self._closed[segment] = 0, False
        self._free.append(segment)

    def empty(self) -> tuple[I64, F32, I64]:
        """Take out the closed segment with fewest live records: (row numbers, records, places), dead ones included.

        The next call overwrites its records; add the live ones again.
        """
        self.emptied += 1
        segment = int(np.where(self._closed, self._live, self.per_segment + 1).argmin())
        self.file.read_into(memoryview(self._buffers[1]), segment * self._segment)
        self._release(segment)
        first = segment * self.per_segment
        numbers = self._loaded.view(np.uint32)[:, -1].astype(np.int64)
        return numbers, self._loaded, np.arange(first, first + self.per_segment)

    def waiting(self, places: I64) -> NDArray[np.bool_]:
        """Which of ``places`` are not on the disk yet: ``recent`` has their records."""
        return places // self.per_segment == self._open

    def recent(self, places: I64) -> F32:
        """Copies of the records at ``places``, which are ``waiting``."""
        copies: F32 = self._records[places % self.per_segment]
        return copies

    def reads(self, places: I64, target: I64) -> Reads:
        """The reads for the records at ``places`` [n], each wanted as row ``target`` [n]; every page is read once."""
        order = np.argsort(places)
        places = places[order]
        segment, number = np.divmod(places, self.per_segment)
        start = segment * self._segment + number * (4 * self.words)
        first, last = start // PAGE, (start + 4 * self.words - 1) // PAGE
        gap = np.append(True, first[1:] > last[:-1] + 1)
        head = first[np.maximum.accumulate(np.where(gap, np.arange(len(first)), 0))]
        turn = (first - head) // _RUN
        new = gap | (np.diff(turn, prepend=-1) != 0)
        begins = np.flatnonzero(new)
        offset = first[begins] * PAGE
        length = (np.maximum.reduceat(last, begins) + 1) * PAGE - offset
        count = np.diff(begins, append=len(places))
        return Reads(offset, length, count, (start - np.repeat(offset, count)) // 4, target[order])
