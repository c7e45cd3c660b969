"""Writing the dataset: Parquet parts with row groups of exact size, whose columns are encoded on several threads.

Arrow encodes one column after the other. The bytes of a column do not depend on what lies around them; only the
footer, a Thrift structure in the compact protocol, says where they are. So a file can be written piece by piece: it
is the one that Arrow writes from the same rows alone, byte for byte (Apache Parquet: file format, metadata).
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.ingest import IngestConfig
from pipeline.ingest.ids import as_text
from pipeline.records.dataset import TRUE_PROBABILITY
from pipeline.store.artifacts import Draft

_MAGIC = b"PAR1"
_TRUE, _FALSE, _BYTE, _I16, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 4, 7, 8, 9, 10, 12
# Number of elements at which a list's length no longer fits its first byte; also the largest step of a field id.
_LONG = 15
# Ids of fields of FileMetaData, RowGroup, ColumnChunk and ColumnMetaData.
_ROWS, _GROUPS = 3, 4
_COLUMNS, _BYTES, _GROUP_ROWS, _START, _COMPRESSED, _ORDINAL = 1, 2, 3, 5, 6, 7
_CHUNK_START, _CHUNK = 2, 3
_PAGE_STARTS = (9, 10, 11)

# Type and value by field id.
Struct = dict[int, tuple[int, Any]]


@dataclass(frozen=True)
class Encoded:
    """Some columns of a row group: their bytes, and its entry in the footer of a file of its own."""

    data: pa.Buffer
    group: Struct
    schema: pa.Schema


def encoded(table: pa.Table, compression: str) -> Encoded:
    """Return the columns of ``table`` as one row group has them."""
    # A file ends with its footer, the footer's length in 4 bytes, and 4 magic bytes.
    sink = pa.BufferOutputStream()
    with rows_writer(sink, table.schema, compression) as writer:
        writer.write_table(table, row_group_size=table.num_rows)
    file = sink.getvalue()
    body = len(file) - 8 - int.from_bytes(file[len(file) - 8 : len(file) - 4].to_pybytes(), "little")
    footer, _ = _read_struct(file[body : len(file) - 8].to_pybytes(), 0)
    (group,) = footer[_GROUPS][1][1]
    return Encoded(file.slice(len(_MAGIC), body - len(_MAGIC)), group, table.schema)


class RowsFile:
    """A Parquet file in the making: ``add`` row groups, then ``close``; the sink stays open."""

    def __init__(self, sink: BinaryIO, schema: pa.Schema, compression: str) -> None:
        self._sink, self._at = sink, sink.write(_MAGIC)
        empty = pa.BufferOutputStream()
        rows_writer(empty, schema, compression).close()
        self._footer, _ = _read_struct(empty.getvalue().to_pybytes()[len(_MAGIC) :], 0)

    def add(self, parts: Iterable[Encoded], rows: int) -> None:
        """Append a row group of ``rows`` rows, whose columns are those of ``parts`` one after the other."""
        columns, start, group, sizes = [], self._at, Struct(), dict.fromkeys((_BYTES, _COMPRESSED), 0)
        for part in parts:
            _shift(part.group, self._at - len(_MAGIC))
            columns += part.group[_COLUMNS][1][1]
            self._at += self._sink.write(part.data)
            group = group or dict(part.group)
            for field in sizes:
                sizes[field] += part.group[field][1]
        # Write only fields that Arrow wrote, in their order, so that the footer equals the one that Arrow would write.
        groups = self._footer[_GROUPS][1][1]
        now = {**sizes, _GROUP_ROWS: rows, _START: start, _ORDINAL: len(groups), _COLUMNS: (_STRUCT, columns)}
        for field in group.keys() & now.keys():
            group[field] = group[field][0], now[field]
        kind, before = self._footer[_ROWS]
        self._footer[_ROWS] = kind, before + rows
        self._footer[_GROUPS] = _LIST, (_STRUCT, [*groups, group])

    def close(self) -> None:
        """Write the footer."""
        footer = bytearray()
        _write_struct(self._footer, footer)
        self._sink.write(bytes(footer) + len(footer).to_bytes(4, "little") + _MAGIC)


def rows_writer(sink: Any, schema: pa.Schema, compression: str) -> pq.ParquetWriter:
    """Return a writer of rows that training reads: plain values, which decode several times as fast as dictionaries."""
    return pq.ParquetWriter(sink, schema, compression=compression, use_dictionary=False, write_statistics=False)


def _shift(group: Struct, by: int) -> None:
    # Moves every place that a row group names; 0 stands for none.
    for column in group[_COLUMNS][1][1]:
        places = [(column, _CHUNK_START)]
        for field in _PAGE_STARTS:
            places.append((column[_CHUNK][1], field))
        for struct, field in places:
            kind, place = struct.get(field, (0, 0))
            if place:
                struct[field] = kind, place + by


def _read_number(data: bytes, at: int) -> tuple[int, int]:
    # Returns the number at `at`, and where the next value begins. ULEB128: 7 bits a byte, the lowest first; the 8th
    # bit says that more follow.
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7


def _read_struct(data: bytes, at: int) -> tuple[Struct, int]:
    struct: Struct = {}
    field = 0
    while (head := data[at]) != 0:
        at += 1
        step, kind = head >> 4, head & 15
        if step:
            field += step
        else:
            field, at = _read(_I16, data, at)
        # The type of a bool tells its value, so no bytes follow.
        value = None
        if kind not in (_TRUE, _FALSE):
            value, at = _read(kind, data, at)
        struct[field] = kind, value
    return struct, at + 1


def _read(kind: int, data: bytes, at: int) -> tuple[Any, int]:
    if kind == _STRUCT:
        return _read_struct(data, at)
    if kind in (_LIST, _SET):
        count, inner = data[at] >> 4, data[at] & 15
        at += 1
        if count == _LONG:
            count, at = _read_number(data, at)
        values = []
        for _ in range(count):
            value, at = _read(inner, data, at)
            values.append(value)
        return (inner, values), at
    if kind == _BINARY:
        size, at = _read_number(data, at)
        return data[at : at + size], at + size
    if kind in (_TRUE, _FALSE, _BYTE, _DOUBLE):
        size = 8 if kind == _DOUBLE else 1
        return data[at : at + size], at + size
    # Integers of any width are zigzag-encoded, so that small ones take few bytes whatever their sign.
    number, at = _read_number(data, at)
    return (number >> 1) ^ -(number & 1), at


def _write_number(number: int, out: bytearray) -> None:
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)


def _write_struct(struct: Struct, out: bytearray) -> None:
    last = 0
    for field, (kind, value) in struct.items():
        if 0 < field - last <= _LONG:
            out.append(field - last << 4 | kind)
        else:
            out.append(kind)
            _write(_I16, field, out)
        last = field
        if kind not in (_TRUE, _FALSE):
            _write(kind, value, out)
    out.append(0)


def _write(kind: int, value: Any, out: bytearray) -> None:
    if kind == _STRUCT:
        _write_struct(value, out)
    elif kind in (_LIST, _SET):
        inner, values = value
        out.append(min(len(values), _LONG) << 4 | inner)
        if len(values) >= _LONG:
            _write_number(len(values), out)
        for each in values:
            _write(inner, each, out)
    elif kind == _BINARY:
        _write_number(len(value), out)
        out += value
    elif kind in (_TRUE, _FALSE, _BYTE, _DOUBLE):
        out += value
    elif value >= 0:
        _write_number(value << 1, out)
    else:
        _write_number((-value << 1) - 1, out)


# Columns that are encoded together.
_TOGETHER = 10
# Maximum bytes of a row group in memory, at one value per column, and its minimum rows, however wide it is.
_GROUP_BYTES = 32 << 20
_LEAST_ROWS = 1024


def narrowed_groups(config: IngestConfig, columns: int) -> IngestConfig:
    """Return ``config`` with smaller row groups if a row has many ``columns``.

    One row group of each split is in memory, and training shuffles within several of them.
    """
    rows = max(_GROUP_BYTES // (4 * columns) // _LEAST_ROWS * _LEAST_ROWS, _LEAST_ROWS)
    return replace(config, rows_per_group=min(config.rows_per_group, rows))


class PartWriter:
    """The Parquet files of one split. Row groups hold ``rows_per_group`` rows however rows arrive.

    ``pool``: the threads that encode the columns of a row group; None: the calling one. Use as a context manager;
    ``files`` and ``groups`` are complete after it. ``rows``: how many were added.
    """

    def __init__(self, draft: Draft, split: str, config: IngestConfig, pool: ThreadPoolExecutor | None = None) -> None:
        self.draft, self.split, self.config, self.pool = draft, split, config, pool
        self.files: list[str] = []
        self.groups: list[list[int]] = []
        self.pending: list[pl.DataFrame] = []
        self.pending_rows = 0
        self.rows = 0
        self.stack = ExitStack()
        self.writer: RowsFile | None = None

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # After an error no footer is written, so that the file does not look complete.
        try:
            if kind is None and self.pending_rows:
                self._write_group(pl.concat(self.pending))
            if kind is None and self.writer is not None:
                self.writer.close()
        finally:
            self._close_sink()

    def add(self, frame: pl.DataFrame) -> None:
        """Append rows; full row groups are written at once."""
        self.pending.append(frame)
        self.pending_rows += frame.height
        self.rows += frame.height
        size = self.config.rows_per_group
        if self.pending_rows < size:
            return
        rows = pl.concat(self.pending)
        whole = rows.height // size * size
        for start in range(0, whole, size):
            self._write_group(rows.slice(start, size))
        self.pending, self.pending_rows = [rows.slice(whole)], rows.height - whole

    def _write_group(self, frame: pl.DataFrame) -> None:
        if self.writer is None:
            name = f"{self.split}/part-{len(self.files):05d}.parquet"
            sink = self.stack.enter_context(self.draft.open(name))
            self.writer = RowsFile(sink, plain(frame.clear()).schema, self.config.compression)
            self.files.append(name)
            self.groups.append([])
        slices = [frame[:, at : at + _TOGETHER] for at in range(0, frame.width, _TOGETHER)]
        columns: Iterable[Encoded] = map(self._encode, slices)
        if self.pool is not None:
            columns = self.pool.map(self._encode, slices)
        self.writer.add(columns, frame.height)
        self.groups[-1].append(frame.height)
        if len(self.groups[-1]) == self.config.groups_per_file:
            self.writer.close()
            self._close_sink()

    def _encode(self, columns: pl.DataFrame) -> Encoded:
        return encoded(plain(columns), self.config.compression)

    def _close_sink(self) -> None:
        # Replace the stack before closing it, so that the sink is not closed a second time if closing fails.
        self.writer = None
        stack, self.stack = self.stack, ExitStack()
        stack.close()


def plain(frame: pl.DataFrame) -> pa.Table:
    """Convert to Arrow: large lists become ordinary ones, which every reader knows.

    Columns that hold no nulls are declared so.
    """
    table = frame.rechunk().to_arrow()
    fields = []
    for field in table.schema:
        kind = field.type
        if pa.types.is_large_list(kind):
            kind = pa.list_(pa.field("element", kind.value_type, nullable=False))
        fields.append(pa.field(field.name, kind, nullable=field.name == TRUE_PROBABILITY))
    return table.cast(pa.schema(fields))


def write_frame(draft: Draft, name: str, frame: pl.DataFrame, compression: str) -> None:
    """Write ``frame`` as Parquet file ``name``."""
    data = encoded_frame(frame, compression)
    with draft.open(name) as sink:
        sink.write(data)


def encoded_frame(frame: pl.DataFrame, compression: str) -> pa.Buffer:
    """Return ``frame`` as the bytes of a Parquet file, its strings as ordinary ones, which every reader knows."""
    table = frame.rechunk().to_arrow()
    fields = []
    for field in table.schema:
        kind = pa.string() if pa.types.is_large_string(field.type) else field.type
        fields.append(pa.field(field.name, kind))
    sink = pa.BufferOutputStream()
    pq.write_table(table.cast(pa.schema(fields)), sink, compression=compression)
    return sink.getvalue()


def joined(parts: list[pl.DataFrame]) -> pl.DataFrame:
    """Concatenate raw rows of several blocks: a column of numbers in one and of text in another becomes text."""
    mixed = []
    for name in parts[0].columns:
        if len({part[name].dtype for part in parts}) > 1:
            mixed.append(name)
    alike = []
    for part in parts:
        alike.append(part.with_columns(as_text(part[name]) for name in mixed))
    return pl.concat(alike)
