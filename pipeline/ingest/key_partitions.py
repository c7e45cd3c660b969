"""Rows in a temporary file, in partitions by the top bits of their keys: all rows of a key meet in one partition.

Keys are hashes, so partitions are alike in size. What stays in memory is a few million rows that wait, and what a
caller holds of one partition.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import polars as pl

from pipeline.ingest.spill import Spill

_PARTITION_BITS = 8
_WAITING_ROWS = 1 << 21


class KeyPartitions:
    """Frames of the same columns, one of them ``key`` (UInt64)."""

    def __init__(self) -> None:
        self._spill = Spill()
        self._blocks: list[list[int]] = [[] for _ in range(1 << _PARTITION_BITS)]
        self._waiting: list[pl.DataFrame] = []
        self._rows = 0

    def add(self, rows: pl.DataFrame) -> None:
        """Take in ``rows``."""
        self._waiting.append(rows)
        self._rows += rows.height
        if self._rows >= _WAITING_ROWS:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        ordered, self._waiting, self._rows = pl.concat(self._waiting).sort("key"), [], 0
        bounds = np.arange(1, 1 << _PARTITION_BITS, dtype=np.uint64) << np.uint64(64 - _PARTITION_BITS)
        cuts = [0, *np.searchsorted(ordered["key"].to_numpy(), bounds).tolist(), ordered.height]
        for number, (start, stop) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
            if stop > start:
                part = ordered.slice(start, stop - start).rechunk()
                block = self._spill.write(part.write_ipc(None, compression="lz4").getvalue())
                self._blocks[number].append(block)

    def __iter__(self) -> Iterator[pl.DataFrame]:
        """The rows of one partition after the other, in any order; partitions without rows are left out."""
        self._flush()
        for numbers in self._blocks:
            if numbers:
                yield pl.concat([pl.read_ipc(io.BytesIO(self._spill.block(number))) for number in numbers])
