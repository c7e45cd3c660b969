"""Tables of a published version: one file per table, one record per row; written from a checkpoint, read in place.

One read of a few dozen bytes brings a whole row. In coding 8 and 4, a record holds the codes, then low and span of the
row's range as float16, relative to a power of two for each block of rows (``TableLayout.units``). In fp16 and fp32, it
holds the values.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.checkpoint.quantise import Coding, EncodedRows, choose_coding, decode, encode, packed_bytes
from pipeline.checkpoint.reader import WINDOW_BYTES, ChainReader
from pipeline.errors import ArtifactError
from pipeline.records.serving import TableLayout
from pipeline.store.artifacts import Draft

FLOATS = {"fp16": torch.float16, "fp32": torch.float32}
_RANGE_BYTES = 4


def decoded(layout: TableLayout, records: NDArray[np.uint8], rows: NDArray[np.int64]) -> Tensor:
    """The float32 values [n, dim] of ``records`` [n, record_bytes] with row numbers ``rows`` [n]."""
    codes_and_range = torch.from_numpy(records)
    if not len(rows):
        return torch.zeros(0, layout.dim)
    if layout.coding in FLOATS:
        return codes_and_range.view(FLOATS[layout.coding]).float()
    codes, ends = codes_and_range[:, :-_RANGE_BYTES], codes_and_range[:, -_RANGE_BYTES:].contiguous()
    ranges = ends.view(torch.float16)
    values = decode(EncodedRows(codes, ranges[:, 0], ranges[:, 1], 1.0, int(layout.coding), layout.dim))
    units = torch.tensor(layout.units, dtype=torch.float32)[torch.from_numpy(rows // layout.block_rows)]
    return values.mul_(units[:, None])  # a power of two: exact


def record_bytes(dim: int, coding: str) -> int:
    """Bytes of one record."""
    return dim * FLOATS[coding].itemsize if coding in FLOATS else packed_bytes(dim, int(coding)) + _RANGE_BYTES


SAMPLE_ROWS = 2048


@dataclass(frozen=True)
class WrittenTable:
    """The layout of a written table, its number of values that were not finite, and which rows were trained.

    ``trained``: a bit for each row (``is_set``); None if the optimizer has no state that shows it.
    """

    layout: TableLayout
    not_finite: int
    trained: NDArray[np.uint8] | None


def bits(flags: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """``flags`` [n], eight in a byte."""
    return np.packbits(flags, bitorder="little")


def is_set(packed: NDArray[np.uint8], places: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Which of the bits at ``places`` [n] are set."""
    return (packed[places >> 3] >> (places & 7).astype(np.uint8) & 1).astype(bool)


def write_table(
    draft: Draft, readers: Sequence[ChainReader], table: str, coding: str, window_bytes: int = WINDOW_BYTES
) -> WrittenTable:
    """Write ``table`` as ``tables/<table>.rows``: each row as in the checkpoints of ``readers``, side by side.

    ``window_bytes``: float32 bytes of a checkpoint in memory at a time.

    Values that are not finite are written as 0 and counted; the gate holds such a version.
    """
    rows, dim = readers[0].tables[table].rows, sum(reader.tables[table].dim for reader in readers)
    name, size = f"tables/{quote(table, safe='')}.rows", record_bytes(dim, coding)
    units: list[float] = []
    block_rows, bad, quantiser = rows, 0, None
    trained = np.zeros(rows, bool) if readers[0].states(table) else None
    with draft.open(name) as sink:
        for windows in zip(*(reader.windows(table, window_bytes) for reader in readers), strict=True):
            first = windows[0]
            weight = first.weight if len(windows) == 1 else torch.cat([each.weight for each in windows], dim=1)
            if not (finite := torch.isfinite(weight)).all():
                bad += int((~finite).sum())
                weight = torch.where(finite, weight, 0.0)
            if coding in FLOATS:
                records = weight.to(FLOATS[coding]).contiguous().view(torch.uint8)
            else:
                quantiser = quantiser or choose_coding(_sample(weight), int(coding))
                records, unit = _coded(weight, quantiser)
                block_rows = len(weight) if not units else block_rows
                units.append(unit)
            if trained is not None:
                trained[first.row : first.row + len(weight)] = np.any([_moved(each.state) for each in windows], axis=0)
            sink.write(records.numpy().data)
    layout = TableLayout(
        file=name, rows=rows, dim=dim, coding=coding, record_bytes=size, block_rows=block_rows, units=units
    )
    return WrittenTable(layout, bad, None if trained is None else bits(trained))


def _coded(weight: Tensor, quantiser: Coding) -> tuple[Tensor, float]:
    """The records [n, bytes] of a block of rows, and its unit."""
    coded = encode(weight, quantiser)
    ends = torch.stack([coded.low, coded.span], dim=1).view(torch.uint8)
    return torch.cat([coded.codes, ends], dim=1), coded.unit


def _sample(weight: Tensor) -> Tensor:
    """Rows spread over a block, for choosing the quantiser's search."""
    return weight[:: max(1, len(weight) // SAMPLE_ROWS)].contiguous()


def _moved(states: Mapping[str, Tensor]) -> NDArray[np.bool_]:
    """Which rows [n] were trained: their optimizer state is not all zero."""
    moved = [(state.numpy() != 0).reshape(len(state), -1).any(axis=1) for state in states.values()]
    return np.asarray(np.logical_or.reduce(moved))


Records = NDArray[np.uint8]
_MOST_CREDIT = 15
_TAG_BYTES = 9  # of a place, beside its record: the row's number and its credit
# Cold rows are faulted in by this many threads: a disk answers several requests in the time of one.
_READERS = 8
_PIECE = 256


class RowCache:
    """``places`` records in memory, direct-mapped. A row takes the place of another once that one's credit is used up:
    a hit earns a credit, another row's miss costs one, so a row asked for once does not drive out a hot one.

    Threads may share a cache. A place's row number, credit and record change together, under a lock; rows are fetched
    outside of it, so that several threads wait for the disk at a time.
    """

    def __init__(self, places: int, record_bytes: int) -> None:
        self._rows = np.full(places, -1, np.int64)
        self._credit = np.zeros(places, np.uint8)
        self._records = np.zeros((places, record_bytes), np.uint8)
        self._lock = threading.Lock()
        self.hits = self.misses = 0

    def read(self, rows: NDArray[np.int64], fetch: Callable[[NDArray[np.int64]], Records]) -> Records:
        """Records of ``rows`` (unique, [n]); ``fetch`` reads those that are not cached."""
        places = rows % len(self._rows)
        records = np.empty((len(rows), self._records.shape[1]), np.uint8)
        with self._lock:
            missing = self._copy_hits(rows, places, records)
        if len(missing):
            records[missing] = fetch(rows[missing])
            with self._lock:
                self._admit(rows[missing], places[missing], records[missing])
        return records

    def _copy_hits(self, rows: NDArray[np.int64], places: NDArray[np.int64], records: Records) -> NDArray[np.int64]:
        """Copy cached records into ``records``; returns the positions of the other rows. The caller holds the lock."""
        hit = self._rows[places] == rows
        records[hit] = self._records[places[hit]]
        self._credit[places[hit]] = np.minimum(self._credit[places[hit]] + 1, _MOST_CREDIT)
        missing = np.flatnonzero(~hit)
        self.hits += len(rows) - len(missing)
        self.misses += len(missing)
        return missing

    def _admit(self, rows: NDArray[np.int64], places: NDArray[np.int64], records: Records) -> None:
        """Put rows into free places. The caller holds the lock."""
        free = self._credit[places] == 0
        self._credit[places[~free]] -= 1
        # One of several rows for a place stays: the same one in all three arrays.
        chosen, first = np.unique(places[free], return_index=True)
        self._rows[chosen] = rows[free][first]
        self._records[chosen] = records[free][first]
        self._credit[chosen] = 1


class TableReader:
    """Looks up rows in the file at ``path``, with at most ``memory`` bytes of it in memory.

    A file that fits is read as a whole. ``ranks``: processes of this machine that open it beside each other: they share
    the pages of a file that fits, and each has its part of ``memory`` for rows of a larger one. Raises ArtifactError if
    its size does not match ``layout``.
    """

    def __init__(self, path: Path, layout: TableLayout, memory: int, ranks: int = 1) -> None:
        self.layout = layout
        size = layout.rows * layout.record_bytes
        if not path.is_file() or path.stat().st_size != size:
            state = f"{path.stat().st_size} bytes" if path.is_file() else "missing"
            raise ArtifactError(
                f"{path} is {state}, expected {size} bytes", hint="nightjar models show names all files"
            )
        mapped = np.memmap(path, np.uint8, "r", shape=(layout.rows, layout.record_bytes))
        self._records: Records = mapped.view(np.ndarray)
        self.cache: RowCache | None = None
        self._pool: ThreadPoolExecutor | None = None
        if size <= memory:
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
        """float32 [n, dim] of ``rows`` [n], in any order, with repeats."""
        numbers = rows.astype(np.int64)
        if self._pool is None:
            return decoded(self.layout, self._records[numbers], numbers)
        unique, inverse = np.unique(numbers, return_inverse=True)
        records = self.cache.read(unique, self._fetch) if self.cache is not None else self._fetch(unique)
        return decoded(self.layout, records, unique)[inverse]

    def _fetch(self, rows: NDArray[np.int64]) -> Records:
        """Read records from the mapped file in parallel."""
        assert self._pool is not None
        pieces = [rows[start : start + _PIECE] for start in range(0, len(rows), _PIECE)]
        return np.concatenate(list(self._pool.map(lambda piece: np.take(self._records, piece, axis=0), pieces)))


def shares(layouts: dict[str, TableLayout], memory: int) -> dict[str, int]:
    """Bytes of ``memory`` for each table: all of those below an even share, the rest divided by size."""
    budget: dict[str, int] = {}
    left = memory
    sizes = {name: layout.bytes for name, layout in layouts.items()}
    ranked = sorted(sizes, key=lambda name: sizes[name])
    for place, name in enumerate(ranked):
        rest = ranked[place:]
        if sizes[name] * len(rest) > left:
            total = sum(sizes[other] for other in rest)
            return budget | {other: left * sizes[other] // total for other in rest}
        budget[name] = sizes[name]
        left -= sizes[name]
    return budget
