"""Files of typed columns, Parquet and ORC: read in blocks of rows by Arrow, only the columns that are asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import BinaryIO, cast

import numpy as np
import polars as pl
import polars.selectors as cs
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileOpener
from pyarrow import orc

from pipeline.config.data import DataConfig
from pipeline.core.errors import DataError
from pipeline.ingest.formats.file_format import FileFormat, LogFile
from pipeline.ingest.schema import DataSpec, SparseSpec, require_columns
from pipeline.ingest.sources import Block, RawBlock
from pipeline.ingest.spill import Spill


def frame_of(batch: pa.RecordBatch | pa.Table, columns: Sequence[str]) -> pl.DataFrame:
    """Return ``columns`` of ``batch`` as parsing takes them."""
    named = {}
    for name in columns:
        column = batch.column(name)
        if pa.types.is_map(column.type):
            # Polars has no maps: lists of pairs hold the same.
            pair = pa.struct([("key", column.type.key_type), ("value", column.type.item_type)])
            column = column.cast(pa.list_(pair))
        named[name] = column
    frame = cast(pl.DataFrame, pl.from_arrow(pa.table(named)))
    return frame.select(columns).with_columns(cs.array().arr.to_list())


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of ``kind`` holds lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def check_types(spec: DataSpec, schema: pa.Schema, label: str) -> None:
    """Raise DataError for a column of the file ``label`` that holds neither values, nor lists of values, nor maps."""
    maps, several = dict[str, SparseSpec](), dict[str, SparseSpec]()
    for feature in spec.sparse:
        if feature.maps:
            maps[feature.column] = feature
        if feature.multi:
            several[feature.column] = feature
    events = set()
    for sequence in spec.sequences:
        for source in sequence.sources:
            if source.field:
                events.add(source.column)
    for column, override in spec.columns.items():
        kind = schema.field(column).type
        inner = kind.value_type if is_list(kind) else kind
        # A writer without a map type writes a map as a list of structs. In frames both are lists of pairs.
        pairs = pa.types.is_map(kind) or (is_list(kind) and pa.types.is_struct(inner))
        if pairs and column in maps:
            continue
        if pairs and column in events and is_list(kind):
            _check_fields(spec, column, inner, label)
            continue
        if pa.types.is_nested(inner):
            hint = "write its parts as columns of their own"
            if pairs and override.startswith("data.sparse."):
                hint = f"{override.removesuffix('.column')}.holds=map, if its keys are ids and its values weights"
            raise DataError(
                f"{label}: column {column!r} ({override}) holds {kind}, expected one value a row or a list of values",
                hint=hint,
            )
        if column in maps and is_list(kind) and not several[column].weight_separator:
            raise DataError(
                f"{label}: column {column!r} ({override}) holds {kind}, expected a map of ids to weights",
                hint=f"data.sparse.{maps[column].name}.holds=list",
            )


def _check_fields(spec: DataSpec, column: str, kind: pa.DataType, label: str) -> None:
    types = {field.name: field.type for field in kind}
    for sequence in spec.sequences:
        for source in sequence.sources:
            if source.column != column:
                continue
            if not types:
                raise DataError(
                    f"{label}: column {column!r} (data.sequences.{sequence.name}) holds structs without fields, "
                    f"expected a field {source.field!r}",
                    hint=f"~data.sequences.{sequence.name}",
                )
            if source.field not in types:
                first = next(iter(types))
                expected = f"one of them named: {column}.{first}"
                if source.field:
                    expected = f"a field {source.field!r}"
                raise DataError(
                    f"{label}: column {column!r} (data.sequences.{sequence.name}) holds structs of {', '.join(types)}, "
                    f"expected {expected}",
                    hint=f"data.sequences.{sequence.name}.features.<name>.column={column}.{first}",
                )
            if pa.types.is_nested(types[source.field]):
                raise DataError(
                    f"{label}: {source.shown} (data.sequences.{sequence.name}) holds {types[source.field]}, expected "
                    "one value an event",
                    hint="write its parts as fields of their own",
                )


# Row groups: from, to (None: all that follow).
Part = tuple[int, int | None]
WHOLE: Part = (0, None)
# Minimum rows of a block, even if they are wider than a block's bytes allow.
LEAST_ROWS = 1024


class Columnar(FileFormat):
    """A format of typed columns: a row is a place in every column."""

    by_line = False

    def blocks(self, stream: BinaryIO, file: LogFile) -> Iterator[Block]:
        """Yield rows as they are typed, numbered from 1."""
        schema, spec, line = self.schema(stream), file.stored_spec, file.first_line
        # Wrong names and types are reported before any row is decoded.
        require_columns(spec, schema.names, file.label, header=False)
        check_types(spec, schema, file.label)
        for batch in self.batches(stream, list(spec.columns), file.block_bytes, (file.start, file.stop)):
            frame = frame_of(batch, list(spec.columns))
            yield RawBlock(frame=frame, file=file.label, lines=np.arange(line, line + frame.height), place=file.place)
            line += frame.height

    @abstractmethod
    def schema(self, stream: BinaryIO) -> pa.Schema:
        """Read names and types of the columns."""

    @abstractmethod
    def batches(
        self, stream: BinaryIO, columns: list[str], block_bytes: int, part: Part = WHOLE
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows in order, about ``block_bytes`` at a time; of a format with row groups, those of ``part``."""

    @abstractmethod
    def rows(self, stream: BinaryIO, data: DataConfig, enough: int) -> int:
        """Count rows as the file says."""


class Parquet(Columnar):
    """Apache Parquet."""

    name = "parquet"

    def schema(self, stream: BinaryIO) -> pa.Schema:
        return pq.ParquetFile(stream).schema_arrow

    def parts(self, source: BinaryIO, file: LogFile, part_bytes: int) -> list[LogFile]:
        """Group neighbouring row groups by their uncompressed bytes."""
        parts = []
        # The file says how many rows each group has, so the numbers of rows are known before any is read.
        for start, stop, before in row_groups(source, part_bytes):
            parts.append(replace(file, start=start, stop=stop, first_line=before + 1))
        return parts

    def batches(
        self, stream: BinaryIO, columns: list[str], block_bytes: int, part: Part = WHOLE
    ) -> Iterator[pa.RecordBatch]:
        """Yield row groups, cut; those of many columns a few columns at a time."""
        # A local file is read by Arrow itself, without Python in between.
        file = pq.ParquetFile(pa.OSFile(stream.name) if isinstance(stream, LocalFileOpener) else stream)
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        size = sum(group.total_byte_size for group in groups)
        rows = max(LEAST_ROWS, block_bytes * file.metadata.num_rows // max(1, size))
        wanted = list(range(len(groups)))[slice(*part)]
        # A row group that is one batch needs no cutting, and few columns need little memory.
        if len(columns) >= MANY and any(groups[number].num_rows > rows for number in wanted):
            yield from cut_groups(file, wanted, columns, rows)
        else:
            yield from file.iter_batches(batch_size=rows, columns=columns, row_groups=wanted)

    def rows(self, stream: BinaryIO, data: DataConfig, enough: int) -> int:
        return int(pq.ParquetFile(stream).metadata.num_rows)


def row_groups(stream: BinaryIO, part_bytes: int) -> list[tuple[int, int, int]]:
    """Return runs of row groups of a Parquet file, about ``part_bytes`` uncompressed: (from, to, rows before them)."""
    metadata = pq.ParquetFile(stream).metadata
    parts, start, first, rows, size = [], 0, 0, 0, 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        rows, size = rows + group.num_rows, size + group.total_byte_size
        if size >= part_bytes or number + 1 == metadata.num_row_groups:
            parts.append((start, number + 1, first))
            start, first, size = number + 1, rows, 0
    return parts or [(0, 0, 0)]


class Orc(Columnar):
    """Apache ORC."""

    name = "orc"

    def schema(self, stream: BinaryIO) -> pa.Schema:
        return orc.ORCFile(stream).schema

    def batches(
        self, stream: BinaryIO, columns: list[str], block_bytes: int, part: Part = WHOLE
    ) -> Iterator[pa.RecordBatch]:
        """Yield stripes, cut, because Arrow reads each as a whole."""
        file = orc.ORCFile(stream)
        rows = max(LEAST_ROWS, block_bytes * file.nrows // max(1, file.content_length))
        for number in range(file.nstripes):
            stripe = file.read_stripe(number, columns=columns)
            for first in range(0, stripe.num_rows, rows):
                yield stripe.slice(first, rows)

    def rows(self, stream: BinaryIO, data: DataConfig, enough: int) -> int:
        return int(orc.ORCFile(stream).nrows)


# Minimum number of columns of a row group that is decoded a few columns at a time.
MANY = 128
# Uncompressed bytes of the columns that are decoded together, at most.
_TOGETHER = 8 << 20


def cut_groups(
    file: pq.ParquetFile, groups: Sequence[int], columns: Sequence[str], rows: int
) -> Iterator[pa.RecordBatch]:
    """Yield ``columns`` of the rows of ``groups`` in order, at most ``rows`` at a time, by way of a temporary file.

    To cut a row group into rows, Arrow decodes all of its columns side by side, and holds for each the encoded bytes,
    the dictionary and a page: four times the row group. Here a few columns are decoded at a time, cut, and
    written to a temporary file, from which a batch then takes its part of every column. Memory holds a few columns and
    a batch, however large the row group is.
    """
    for number in groups:
        size, spill = file.metadata.row_group(number).total_byte_size, Spill()
        step = max(file.metadata.num_columns * _TOGETHER // max(size, 1), 1)
        # Numbers of the pieces in the temporary file, for each set of columns.
        pieces = []
        for at in range(0, len(columns), step):
            table = file.read_row_group(number, list(columns[at : at + step]), use_threads=False)
            written = []
            for start in range(0, table.num_rows, rows):
                written.append(spill.write(_packed(table.slice(start, rows))))
            pieces.append(written)
            # Free the columns before the next ones are decoded.
            del table
        for parts in zip(*pieces, strict=True):
            arrays, names = list[pa.Array](), list[str]()
            for piece in parts:
                (batch,) = pa.ipc.open_stream(spill.block(piece))
                arrays += batch.columns
                names += batch.schema.names
            yield pa.RecordBatch.from_arrays(arrays, names=names)


def _packed(rows: pa.Table) -> bytes:
    # Returns an Arrow stream with its schema, because a column may have a dictionary.
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows.combine_chunks())
    return bytes(sink.getvalue())
