"""Row groups of many columns, cut into batches of rows by way of a temporary file.

To cut a row group into rows, Arrow decodes all of its columns side by side: of each it holds the encoded bytes, the
dictionary and a page, which is four times the row group. Here a few columns are decoded at a time, cut, and written to
a temporary file, from which a batch then takes its part of every column. Memory holds a few columns and a batch,
however large the row group is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.ingest.spill import Spill

MANY = 128  # columns from which on a row group is decoded a few at a time
_TOGETHER = 8 << 20  # uncompressed bytes of the columns that are decoded together


def is_wide(file: pq.ParquetFile, groups: Sequence[int], columns: int, rows: int) -> bool:
    """Whether ``groups`` of ``file`` have ``columns`` and rows enough for more than a batch of ``rows``."""
    return columns >= MANY and any(file.metadata.row_group(number).num_rows > rows for number in groups)


def cut_groups(
    file: pq.ParquetFile, groups: Sequence[int], columns: Sequence[str], rows: int
) -> Iterator[pa.RecordBatch]:
    """The rows of ``groups`` in order, at most ``rows`` at a time, ``columns`` of them."""
    for number in groups:
        size, spill = file.metadata.row_group(number).total_byte_size, Spill()
        step = max(file.metadata.num_columns * _TOGETHER // max(size, 1), 1)
        sets = [list(columns[at : at + step]) for at in range(0, len(columns), step)]
        pieces = [_written(file.read_row_group(number, names, use_threads=False), rows, spill) for names in sets]
        for parts in zip(*pieces, strict=True):
            yield _concat_columns([_read(spill.block(part)) for part in parts])


def _written(table: pa.Table, rows: int, spill: Spill) -> list[int]:
    """The numbers in ``spill`` of the pieces of ``table``, of ``rows`` rows each."""
    return [spill.write(_packed(table.slice(start, rows))) for start in range(0, table.num_rows, rows)]


def _packed(rows: pa.Table) -> bytes:
    """An Arrow stream with its schema, for a column may have a dictionary."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows.combine_chunks())
    return bytes(sink.getvalue())


def _read(piece: bytes) -> pa.RecordBatch:
    (batch,) = pa.ipc.open_stream(piece)
    return batch


def _concat_columns(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    columns = [column for part in parts for column in part.columns]
    return pa.RecordBatch.from_arrays(columns, names=[name for part in parts for name in part.schema.names])
