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
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem

from pipeline.config import Config, DataConfig
from pipeline.errors import ConfigError, DataError
from pipeline.ingest.sources import Block, Files, RawBlock, TextBlock, decompressed, readable
from pipeline.ingest.spec import CRITEO_COLUMNS, DataSpec, require_columns
from pipeline.ingest.text import Layout, text_blocks

BLOCK_UNIT = 1 << 20  # bytes in the unit of ingest.block_mib
PART_BLOCKS = 4  # blocks of a part that another process reads
COMPRESSED = (".gz", ".zst", ".zstd")
_SEEN = 1 << 20  # bytes in which a line must end where parts meet
_LINE_END = re.compile(rb"[^\r\n]\r*\n")


@dataclass(frozen=True)
class FileSource:
    """One file on any filesystem."""

    fs: AbstractFileSystem
    path: str
    label: str
    data: DataConfig
    spec: DataSpec
    block_bytes: int
    start: int = 0
    stop: int | None = None

    @property
    def is_later(self) -> bool:
        """Whether another part comes before it."""
        return self.start > 0

    @property
    def lines_before(self) -> int:
        """The header, where there is one."""
        return int(self.data.format == "csv" and self.data.header)

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
                if found := _LINE_END.search(source.read(_SEEN)):
                    cuts.append(max(at, cuts[-1]) + found.end())
        return [replace(self, start=start, stop=stop) for start, stop in zip(cuts, [*cuts[1:], None], strict=True)]

    def blocks(self) -> Iterator[Block]:
        """The rows in blocks of about ``block_bytes`` of uncompressed data; DataError where the file is damaged."""
        with readable(self.label), self.fs.open(self.path, "rb") as source:
            if self.data.format == "parquet":
                yield from _parquet_blocks(source, self.label, self.spec, self.block_bytes)
            else:
                with decompressed(source, self.path) as stream:
                    yield from _text_file_blocks(stream, self)


def file_sources(config: Config, spec: DataSpec, files: Files) -> list[FileSource]:
    """Every file of a log, in order."""
    size = config.ingest.block_mib * BLOCK_UNIT
    pairs = zip(files.paths, files.labels, strict=True)
    return [FileSource(files.fs, path, label, config.data, spec, size) for path, label in pairs]


def _text_file_blocks(stream: BinaryIO, file: FileSource) -> Iterator[Block]:
    label, data, spec = file.label, file.data, file.spec
    buffered = io.BufferedReader(cast(io.RawIOBase, stream), 1 << 20)
    start = buffered.peek(4)[:4]
    if start == b"PAR1":
        raise DataError(f"{label} is a Parquet file, expected text", hint="data.format=parquet")
    if start.startswith(b"\xef\xbb\xbf"):
        buffered.read(3)
    has_header = data.format == "csv" and data.header
    layout = replace(text_layout(data, buffered.readline() if has_header else None), numbers=spec.number_columns)
    if has_header and not any(layout.names) and not buffered.peek(1 << 20).strip():
        return
    require_columns(spec, layout.names, label, header=has_header)
    rest, first_line = cast(BinaryIO, buffered), 2 if has_header else 1
    if file.is_later:
        buffered.seek(file.start)
        first_line = 1
    if file.stop is not None:
        rest = cast(BinaryIO, _Limited(cast(BinaryIO, buffered), file.stop - buffered.tell()))
    for block, line in text_blocks(rest, file.block_bytes, first_line):
        yield TextBlock(data=block, file=label, first_line=line, layout=layout, columns=tuple(spec.columns))


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
                f"the first line is no header of a text file: {error}; it begins with {text[:40]!r}",
                hint="data.path=<a text file>, or data.format and data.header that describe this one",
            ) from None
    else:
        names = text.split(separator)
    return Layout(names=tuple(name.strip() for name in names), separator=separator, quote=data.quote)


def _parquet_blocks(source: BinaryIO, label: str, spec: DataSpec, block_bytes: int) -> Iterator[RawBlock]:
    file = pq.ParquetFile(source)
    require_columns(spec, file.schema_arrow.names, label, header=False)
    size = sum(file.metadata.row_group(group).total_byte_size for group in range(file.metadata.num_row_groups))
    rows = max(1024, block_bytes * file.metadata.num_rows // max(1, size))
    line = 1
    for batch in file.iter_batches(batch_size=rows, columns=list(spec.columns)):
        frame = cast(pl.DataFrame, pl.from_arrow(batch)).select(list(spec.columns))
        yield RawBlock(frame=frame, file=label, lines=np.arange(line, line + frame.height))
        line += frame.height
