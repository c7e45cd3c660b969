"""Files of a log as sources of blocks: text by its layout, compressed or not, and Parquet; whole or in parts."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO, cast

import numpy as np
import polars as pl
import polars.selectors as cs
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem

from pipeline.config import DataConfig
from pipeline.errors import ConfigError, DataError
from pipeline.ingest.rawfiles import COMPRESSED, Files
from pipeline.ingest.sources import Block, RawBlock, Source, TextBlock, decompressed, readable
from pipeline.ingest.spec import CRITEO_COLUMNS, DataSpec, require_columns
from pipeline.ingest.text import Layout, text_blocks
from pipeline.units import MIB

BLOCK_UNIT = MIB  # of ingest.block_mib
PART_BLOCKS = 4  # blocks of a part that another process reads
_SEEN = 1 << 20  # bytes in which a line must end where parts meet
_LINE_END = re.compile(rb"[^\r\n]\r*\n")
_UNPACK = "unpack it, or pack it as .gz or .zst"
# First bytes of what is no text: what it is, and what to do.
_NO_TEXT = {
    b"PAR1": ("a Parquet file", "data.format=parquet"),
    b"\x1f\x8b": ("compressed by gzip", "a name that ends with .gz"),
    b"\x28\xb5\x2f\xfd": ("compressed by Zstandard", "a name that ends with .zst"),
    b"PK\x03\x04": ("a ZIP archive", _UNPACK),
    b"BZh91AY&": ("compressed by bzip2", _UNPACK),
    b"\xfd7zXZ\x00": ("compressed by xz", _UNPACK),
    b"\xff\xfe": ("text in UTF-16", "write it in UTF-8"),
    b"\xfe\xff": ("text in UTF-16", "write it in UTF-8"),
}


@dataclass(frozen=True)
class FileSource(Source):
    """One file on any filesystem, or its lines from byte ``start`` to ``stop``, the first of them ``first_line``.

    ``first_line`` is 1 until the lines before it are counted. ``place``: as of ``Files``.
    """

    fs: AbstractFileSystem
    path: str
    label: str
    data: DataConfig
    spec: DataSpec
    block_bytes: int
    start: int = 0
    stop: int | None = None
    first_line: int = 1
    place: str = ""

    @property
    def is_later(self) -> bool:  # type: ignore[override]
        """Whether another part comes before it."""
        return self.start > 0

    @property
    def lines_before(self) -> int:  # type: ignore[override]
        """The header, where there is one."""
        return int(self.data.format == "csv" and self.data.header)

    def numbered(self, before: int) -> FileSource:
        """The same part, with ``before`` lines of its file before it."""
        return replace(self, first_line=before + 1) if self.is_later else self

    def parts(self) -> list[FileSource]:
        """Ranges of lines of a few blocks each, found by a look at where they meet; the file, if it is not plain text.

        A range ends with a line that is not blank, so only the file's own end can have blank lines that are no rows.
        """
        if self.data.format == "parquet" or self.path.endswith(COMPRESSED):
            return [self]
        size = PART_BLOCKS * self.block_bytes
        cuts = [0]
        with readable(self.label), self.fs.open(self.path, "rb") as source:
            for at in range(size, self.fs.size(self.path), size):
                source.seek(max(at, cuts[-1]))
                if line_end := _LINE_END.search(source.read(_SEEN)):
                    cuts.append(max(at, cuts[-1]) + line_end.end())
        return [replace(self, start=start, stop=stop) for start, stop in zip(cuts, [*cuts[1:], None], strict=True)]

    def blocks(self) -> Iterator[Block]:
        """The rows in blocks of about ``block_bytes`` of uncompressed data; DataError where the file is damaged."""
        for block, _ in self.placed_blocks():
            yield block

    def placed_blocks(self) -> Iterator[tuple[Block, int]]:
        """As ``blocks``, each block with where in the file (bytes on disk) its reader has come to."""
        with readable(self.label), self.fs.open(self.path, "rb") as source:
            if self.data.format == "parquet":
                for block in _parquet_blocks(source, self.label, self.spec, self.block_bytes):
                    yield replace(block, place=self.place), source.tell()
            else:
                with decompressed(source, self.path) as stream:
                    for text in _text_file_blocks(stream, self):
                        yield text, source.tell()


def file_sources(data: DataConfig, spec: DataSpec, files: Files, block_mib: int) -> list[FileSource]:
    """Every file of a log, in order, to be read in blocks of ``block_mib``."""
    size = block_mib * BLOCK_UNIT
    named = zip(files.paths, files.labels, files.places, strict=True)
    return [FileSource(files.fs, path, label, data, spec, size, place=place) for path, label, place in named]


def _text_file_blocks(stream: BinaryIO, file: FileSource) -> Iterator[Block]:
    label, data, spec = file.label, file.data, file.spec
    buffered = io.BufferedReader(cast(io.RawIOBase, stream), 1 << 20)
    start = buffered.peek(8)[:8]
    require_text(start, label)
    if start.startswith(b"\xef\xbb\xbf"):
        buffered.read(3)
    has_header = data.format == "csv" and data.header
    layout = replace(text_layout(data, buffered.readline() if has_header else None), numbers=spec.number_columns)
    if has_header and not any(layout.names) and not buffered.peek(1 << 20).strip():
        return
    require_columns(spec, layout.names, label, header=has_header)
    layout = replace(layout, names=_distinct(layout.names))
    rest, first_line = cast(BinaryIO, buffered), 2 if has_header else 1
    if file.is_later:
        buffered.seek(file.start)
        first_line = file.first_line
    if file.stop is not None:
        rest = cast(BinaryIO, _Limited(cast(BinaryIO, buffered), file.stop - buffered.tell()))
    for block, line in text_blocks(rest, file.block_bytes, first_line):
        yield TextBlock(
            data=block, file=label, first_line=line, layout=layout, columns=tuple(spec.columns), place=file.place
        )


def require_text(start: bytes, label: str) -> None:
    """Raise DataError where a file that begins with ``start`` is of a kind that is no text."""
    for mark, (what, hint) in _NO_TEXT.items():
        if start.startswith(mark):
            raise DataError(f"{label} is {what}, expected text", hint=hint)


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    """``names``, of which those that are there already (columns that nothing reads) get names of their own."""
    return tuple(name if name not in names[:at] else f"{name} again, column {at}" for at, name in enumerate(names))


class _Limited:
    """The next ``left`` bytes of ``stream``."""

    def __init__(self, stream: BinaryIO, left: int) -> None:
        self.stream, self.left = stream, left

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes; none at the end."""
        data = self.stream.read(max(min(size, self.left), 0))
        self.left -= len(data)
        return data


def text_layout(data: DataConfig, header: bytes | None) -> Layout:
    """Field layout of a text file; ``header``: its first line, None if the configuration names the columns."""
    if data.format == "criteo":
        return Layout(names=tuple(data.columns or CRITEO_COLUMNS), separator="\t", quote=None)
    separator = "\t" if data.separator == "\\t" else data.separator
    if len(separator.encode()) != 1:
        raise ConfigError(
            f"data.separator is {data.separator!r}, expected one ASCII character",
            hint="data.separator=',' and data.strip=true, if blanks surround it",
        )
    if header is None:
        if not data.columns:
            raise ConfigError(
                "data.header is false and data.columns is empty: the columns have no names",
                hint="data.columns=[<name of each column, in order>] or data.header=true",
            )
        return Layout(names=tuple(data.columns), separator=separator, quote=data.quote)
    text = header.decode(errors="replace").rstrip("\r\n")
    if data.quote:
        try:
            names = next(csv.reader([text], delimiter=separator, quotechar=data.quote), [""])
        except csv.Error as error:
            raise DataError(
                f"the first line is not the header of a text file: {error}; it begins with {text[:40]!r}",
                hint="data.path=<a text file>, or data.format and data.header that describe this one",
            ) from None
    else:
        names = text.split(separator)
    return Layout(names=tuple(name.strip() for name in names), separator=separator, quote=data.quote)


def _parquet_blocks(source: BinaryIO, label: str, spec: DataSpec, block_bytes: int) -> Iterator[RawBlock]:
    file = pq.ParquetFile(source)
    require_columns(spec, file.schema_arrow.names, label, header=False)
    _check_types(spec, file.schema_arrow, label)
    size = sum(file.metadata.row_group(group).total_byte_size for group in range(file.metadata.num_row_groups))
    rows = max(1024, block_bytes * file.metadata.num_rows // max(1, size))
    line = 1
    for batch in file.iter_batches(batch_size=rows, columns=list(spec.columns)):
        frame = cast(pl.DataFrame, pl.from_arrow(batch)).select(list(spec.columns))
        frame = frame.with_columns(cs.array().arr.to_list())
        yield RawBlock(frame=frame, file=label, lines=np.arange(line, line + frame.height))
        line += frame.height


def _check_types(spec: DataSpec, schema: pa.Schema, label: str) -> None:
    """Raise DataError for a column that holds neither one value a row nor a list of such."""
    for column, override in spec.columns.items():
        kind = schema.field(column).type
        inner = kind.value_type if _is_list(kind) else kind
        if pa.types.is_nested(inner):
            raise DataError(
                f"{label}: column {column!r} ({override}) holds {kind}, expected one value a row or a list of values",
                hint="write its parts as columns of their own",
            )


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
