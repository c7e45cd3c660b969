"""Tables of a published version: one file per table, one record per row, which are read in place.

One read of a few dozen bytes brings a whole row. In coding 8 and 4, a record holds the codes, then low and span of the
row's range as float16, relative to a power of two for each block of rows (``TableLayout.units``). In fp16 and fp32, it
holds the values.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.checkpoint.quantise import EncodedRows, decode, packed_bytes
from pipeline.core.errors import ArtifactError
from pipeline.records.serving import TableLayout

FLOATS = {"fp16": torch.float16, "fp32": torch.float32}
_RANGE_BYTES = 4


def decoded(layout: TableLayout, records: NDArray[np.uint8], rows: NDArray[np.int64]) -> Tensor:
    """Return the float32 values [n, dim] of ``records`` [n, record_bytes] with row numbers ``rows`` [n]."""
    codes_and_range = torch.from_numpy(records)
    if not len(rows):
        return torch.zeros(0, layout.dim)
    if layout.coding in FLOATS:
        return codes_and_range.view(FLOATS[layout.coding]).float()
    codes, ends = codes_and_range[:, :-_RANGE_BYTES], codes_and_range[:, -_RANGE_BYTES:].contiguous()
    ranges = ends.view(torch.float16)
    values = decode(EncodedRows(codes, ranges[:, 0], ranges[:, 1], 1.0, int(layout.coding), layout.dim))
    units = torch.tensor(layout.units, dtype=torch.float32)[torch.from_numpy(rows // layout.block_rows)]
    # Units are powers of two, so the products are exact.
    return values.mul_(units[:, None])


def record_bytes(dim: int, coding: str) -> int:
    """Return the bytes of one record."""
    if coding in FLOATS:
        return dim * FLOATS[coding].itemsize
    return packed_bytes(dim, int(coding)) + _RANGE_BYTES


def bits(flags: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Pack ``flags`` [n], eight to a byte."""
    return np.packbits(flags, bitorder="little")


def is_set(packed: NDArray[np.uint8], positions: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Return which of the bits at ``positions`` [n] are set."""
    return (packed[positions >> 3] >> (positions & 7).astype(np.uint8) & 1).astype(bool)


Records = NDArray[np.uint8]
_MOST_CREDIT = 15
# Bytes of a place besides its record: the row's number and its credit.
_TAG_BYTES = 9
# Threads that fault in cold rows: a disk answers several requests in the time of one.
_READERS = 8
_PIECE = 256


class RowCache:
    """``places`` records in memory, direct-mapped: a hot row is not driven out by a row that is read once.

    A row takes another one's place once that one's credit is used up: a hit earns a credit, a miss of another row
    costs one.

    Threads may share a cache. A place's row number, credit and record change together, under a lock; rows are fetched
    without it, so that several threads can wait for the disk.
    """

    def __init__(self, places: int, record_bytes: int) -> None:
        # No row has number -1, so an empty place is never a hit.
        self._rows = np.full(places, -1, np.int64)
        self._credit = np.zeros(places, np.uint8)
        self._records = np.zeros((places, record_bytes), np.uint8)
        self._lock = threading.Lock()
        self.hits = self.misses = 0

    def read(self, rows: NDArray[np.int64], fetch: Callable[[NDArray[np.int64]], Records]) -> Records:
        """Return the records of ``rows`` (unique, [n]); ``fetch`` reads those that are not cached."""
        places = rows % len(self._rows)
        records = np.empty((len(rows), self._records.shape[1]), np.uint8)
        with self._lock:
            hit = self._rows[places] == rows
            records[hit] = self._records[places[hit]]
            self._credit[places[hit]] = np.minimum(self._credit[places[hit]] + 1, _MOST_CREDIT)
            missing = np.flatnonzero(~hit)
            self.hits += len(rows) - len(missing)
            self.misses += len(missing)
        if not len(missing):
            return records

        # Fetch without the lock, so that several threads can wait for the disk. Two of them may fetch the same row.
        fetched = records[missing] = fetch(rows[missing])
        rows, places = rows[missing], places[missing]
        with self._lock:
            free = self._credit[places] == 0
            self._credit[places[~free]] -= 1
            # If several rows want one place, the first one stays, in all three arrays alike.
            chosen, first = np.unique(places[free], return_index=True)
            self._rows[chosen] = rows[free][first]
            self._records[chosen] = fetched[free][first]
            self._credit[chosen] = 1
        return records


class TableReader:
    """Looks up rows in the file at ``path``, with at most ``memory`` bytes of it in memory.

    A file that fits is read as a whole. ``ranks``: processes of this machine that open it at the same time: they share
    the pages of a file that fits, and divide ``memory`` for rows of a larger one.

    Raises:
        ArtifactError: The file's size does not match ``layout``.
    """

    def __init__(self, path: Path, layout: TableLayout, memory: int, ranks: int = 1) -> None:
        self.layout = layout
        size = layout.rows * layout.record_bytes
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            state = "missing" if found is None else f"{found} bytes"
            raise ArtifactError(
                f"{path} is {state}, expected {size} bytes", hint="nightjar models show names all files"
            )
        mapped = np.memmap(path, np.uint8, "r", shape=(layout.rows, layout.record_bytes))
        self._records: Records = mapped.view(np.ndarray)
        self.cache: RowCache | None = None
        self._pool: ThreadPoolExecutor | None = None
        if size <= memory:
            # Several ranks share the pages of the mapped file. If each made a copy, it would be in memory many times.
            if ranks == 1:
                self._records = np.array(mapped)
            else:
                mapped._mmap.madvise(mmap.MADV_WILLNEED)  # type: ignore[attr-defined]
            return
        # Without this advice, every page fault would read 128 KiB for a row of a hundred bytes.
        mapped._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
        places = int(memory) // ranks // (layout.record_bytes + _TAG_BYTES)
        self.cache = RowCache(min(places, layout.rows), layout.record_bytes) if places else None
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="nightjar-rows")

    @property
    def on_disk(self) -> bool:
        """Whether rows are read from the file on demand."""
        return self._pool is not None

    def lookup(self, rows: NDArray[np.integer]) -> Tensor:
        """Return float32 [n, dim] of ``rows`` [n], which may be in any order and repeat."""
        numbers = rows.astype(np.int64)
        if self._pool is None:
            return decoded(self.layout, self._records[numbers], numbers)
        # Each row is read from disk only once.
        unique, inverse = np.unique(numbers, return_inverse=True)
        records = self._fetch(unique) if self.cache is None else self.cache.read(unique, self._fetch)
        return decoded(self.layout, records, unique)[inverse]

    def _fetch(self, rows: NDArray[np.int64]) -> Records:
        assert self._pool is not None
        pieces = [rows[start : start + _PIECE] for start in range(0, len(rows), _PIECE)]
        return np.concatenate(list(self._pool.map(lambda piece: np.take(self._records, piece, axis=0), pieces)))


def shares(layouts: dict[str, TableLayout], memory: int) -> dict[str, int]:
    """Divide ``memory`` (bytes): tables below an even share are in it as a whole, the others share the rest by size."""
    budget: dict[str, int] = {}
    left = memory
    sizes = {name: layout.bytes for name, layout in layouts.items()}
    # Start with the smallest table: what it leaves of its even share is divided among the larger ones.
    ranked = sorted(sizes, key=lambda name: sizes[name])
    for rank, name in enumerate(ranked):
        larger = ranked[rank:]
        if sizes[name] * len(larger) > left:
            total = sum(sizes[other] for other in larger)
            for other in larger:
                budget[other] = left * sizes[other] // total
            return budget
        budget[name] = sizes[name]
        left -= sizes[name]
    return budget
