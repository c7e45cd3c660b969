"""Temporary files of ingestion: blocks of bytes in order, and rows in partitions by the top bits of their keys."""

from __future__ import annotations

import io
import os
import tempfile
import threading
from collections.abc import Iterator

import numpy as np
import polars as pl

from pipeline.core.errors import FullDiskError, is_full

_PARTITION_BITS = 8
# Maximum number of rows of `KeyPartitions` in memory before they are written.
_WAITING_ROWS = 1 << 21


class Spill:
    """Blocks in order, in a temporary file without a name: gone with this object, even if the process is killed."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (closed once nothing refers to it)
        self.ends = [0]
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.ends) - 1

    def write(self, block: bytes) -> int:
        """Append a block; returns its number. Several threads may write at a time."""
        # Only the place of a block is decided under the lock, so threads write their bytes at the same time.
        with self._lock:
            start, number = self.ends[-1], len(self.ends) - 1
            self.ends.append(start + len(block))
        left, handle = memoryview(block), self.file.fileno()
        try:
            while left:
                written = os.pwrite(handle, left, start)
                left, start = left[written:], start + written
        except OSError as error:
            if not is_full(error):
                raise
            raise FullDiskError(
                f"no space left for ingestion's temporary file in {tempfile.gettempdir()}",
                hint="free space there, or TMPDIR=<a folder with room for the uncompressed logs>",
            ) from None
        return number

    def clear(self) -> None:
        self.file.truncate(0)
        self.ends = [0]

    def block(self, number: int) -> bytes:
        start, stop = self.ends[number : number + 2]
        parts = []
        # One call reads at most 2 GiB and may return less than it was asked for.
        while start < stop and (part := os.pread(self.file.fileno(), stop - start, start)):
            parts.append(part)
            start += len(part)
        if len(parts) == 1:
            # Joining would copy the block.
            return parts[0]
        return b"".join(parts)


class KeyPartitions:
    """Frames of the same columns, one of them ``key`` (UInt64): all rows of a key meet in one partition.

    Keys are hashes, so partitions are alike in size. What stays in memory is ``waiting`` rows at most, and what a
    caller holds of one partition.

    Args:
        key: the column with the hashes.
        waiting: rows that are gathered before they are written; 0 writes each frame by itself.
        bits: how many top bits of a hash tell its partition.
    """

    def __init__(self, key: str = "key", waiting: int = _WAITING_ROWS, bits: int = _PARTITION_BITS) -> None:
        self._key, self._most_waiting, self._bits = key, waiting, bits
        self._spill = Spill()
        self._blocks: list[list[int]] = [[] for _ in range(1 << bits)]
        self._waiting: list[pl.DataFrame] = []
        self._rows = 0

    def add(self, rows: pl.DataFrame) -> None:
        self._waiting.append(rows)
        self._rows += rows.height
        if self._rows >= self._most_waiting:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        ordered, self._waiting, self._rows = pl.concat(self._waiting).sort(self._key), [], 0
        # Partitions are ranges of keys, so each is a slice of the sorted rows.
        bounds = np.arange(1, 1 << self._bits, dtype=np.uint64) << np.uint64(64 - self._bits)
        cuts = [0, *np.searchsorted(ordered[self._key].to_numpy(), bounds).tolist(), ordered.height]
        for number, (start, stop) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
            if stop > start:
                part = ordered.slice(start, stop - start).rechunk()
                block = self._spill.write(part.write_ipc(None, compression="lz4").getvalue())
                self._blocks[number].append(block)

    def blocks(self) -> Iterator[pl.DataFrame]:
        """Yield all rows in the order in which they were written."""
        self._flush()
        numbers = range(len(self._spill))
        return (pl.read_ipc(io.BytesIO(self._spill.block(number))) for number in numbers)

    def __iter__(self) -> Iterator[pl.DataFrame]:
        """Yield the rows of one partition after the other, in any order; partitions without rows are left out."""
        self._flush()
        for numbers in self._blocks:
            rows = []
            for number in numbers:
                rows.append(pl.read_ipc(io.BytesIO(self._spill.block(number))))
            if rows:
                yield pl.concat(rows)
