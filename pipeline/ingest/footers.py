"""Parquet files put together from columns that were encoded apart, on several threads or machines.

Arrow encodes one column after the other. The bytes of a column do not depend on what lies around them; only the footer,
a Thrift structure in the compact protocol, says where they are. So a file can be written piece by piece: it is the one
that Arrow writes from the same rows alone, byte for byte (Apache Parquet: file format, metadata).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

_MAGIC = b"PAR1"
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
# Elements from which on a list's length does not fit its first byte; also the largest step of a field id.
_LONG = 15
# Fields of FileMetaData, RowGroup, ColumnChunk and ColumnMetaData.
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
    """The columns of ``table`` as one row group has them."""
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
            sizes = {field: size + part.group[field][1] for field, size in sizes.items()}
        groups = self._footer[_GROUPS][1][1]
        now = {**sizes, _GROUP_ROWS: rows, _START: start, _ORDINAL: len(groups), _COLUMNS: (_STRUCT, columns)}
        group |= {field: (group[field][0], value) for field, value in now.items() if field in group}
        kind, before = self._footer[_ROWS]
        self._footer[_ROWS] = kind, before + rows
        self._footer[_GROUPS] = _LIST, (_STRUCT, [*groups, group])

    def close(self) -> None:
        """Write the footer."""
        footer = bytearray()
        _write_struct(self._footer, footer)
        self._sink.write(bytes(footer) + len(footer).to_bytes(4, "little") + _MAGIC)


def rows_writer(sink: Any, schema: pa.Schema, compression: str) -> pq.ParquetWriter:
    """A writer of rows that training reads: plain values, for they decode several times as fast as dictionaries do."""
    return pq.ParquetWriter(sink, schema, compression=compression, use_dictionary=False, write_statistics=False)


def _shift(group: Struct, by: int) -> None:
    # Move every place that a row group names; 0 stands for none.
    def moved(struct: Struct, fields: Sequence[int]) -> None:
        for field in fields:
            if field in struct and struct[field][1]:
                struct[field] = struct[field][0], struct[field][1] + by

    for column in group[_COLUMNS][1][1]:
        moved(column, (_CHUNK_START,))
        moved(column[_CHUNK][1], _PAGE_STARTS)


def _read_number(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7


def _read_signed(data: bytes, at: int) -> tuple[int, int]:
    number, at = _read_number(data, at)
    return (number >> 1) ^ -(number & 1), at


def _read_struct(data: bytes, at: int) -> tuple[Struct, int]:
    struct: Struct = {}
    field = 0
    while (head := data[at]) != 0:
        at += 1
        step, kind = head >> 4, head & 15
        if step:
            field += step
        else:
            field, at = _read_signed(data, at)
        value, at = (None, at) if kind in (_TRUE, _FALSE) else _read(kind, data, at)
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
    return _read_signed(data, at)


def _write_number(number: int, out: bytearray) -> None:
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)


def _write_signed(number: int, out: bytearray) -> None:
    _write_number(number << 1 if number >= 0 else (-number << 1) - 1, out)


def _write_struct(struct: Struct, out: bytearray) -> None:
    last = 0
    for field, (kind, value) in struct.items():
        if 0 < field - last <= _LONG:
            out.append(field - last << 4 | kind)
        else:
            out.append(kind)
            _write_signed(field, out)
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
    else:
        _write_signed(value, out)
