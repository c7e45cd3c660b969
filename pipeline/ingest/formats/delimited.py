"""Delimited text: CSV of any separator, with or without a header line, and Criteo's files."""

from __future__ import annotations

import csv
import io
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import BinaryIO, cast

from pipeline.config.data import DataConfig
from pipeline.core.errors import ConfigError, DataError
from pipeline.ingest.formats.file_format import BOM, FileFormat, LineReader, LogFile, lines_end_with_cr
from pipeline.ingest.schema import CRITEO_COLUMNS, require_columns
from pipeline.ingest.sources import Block, TextBlock
from pipeline.ingest.text import LONGEST, TextLayout, header_line, records, text_blocks

# Bytes that are looked at together when records are counted.
COUNTED_BYTES = 1 << 22


class Delimited(FileFormat):
    """A row is a line, its fields between separators."""

    by_line = True

    def blocks(self, stream: BinaryIO, file: LogFile) -> Iterator[Block]:
        """Yield blocks of lines that are yet to be taken apart."""
        lines, spec, has_header = LineReader(stream, file), file.stored_spec, self.header_lines(file.data) > 0
        header = lines.header() if has_header else None
        layout = self.layout(file.data, header)
        if has_header and not any(layout.names) and not lines.start().strip():
            # A file of blank lines has neither a header nor rows.
            return
        require_columns(spec, layout.names, file.label, header=has_header)
        # Columns that nothing reads may share a name, but those of a frame may not.
        names = list[str]()
        for at, name in enumerate(layout.names):
            names.append(f"{name} again, column {at}" if name in layout.names[:at] else name)
        layout = replace(layout, names=tuple(names), numbers=spec.number_columns & set(spec.columns))
        for block, line in lines.blocks(layout):
            yield TextBlock(
                data=block,
                file=file.label,
                first_line=line,
                layout=layout,
                columns=tuple(spec.columns),
                place=file.place,
            )

    def cut(self, source: BinaryIO, at: int, file: LogFile) -> int | None:
        """Find a line's end; in a log with quotes a record's, which the lines around it show without a doubt."""
        line = super().cut(source, at, file)
        header = None
        if self.header_lines(file.data) > 0:
            source.seek(0)
            header = header_line(source, file.label).removeprefix(BOM)
        layout = self.layout(file.data, header)
        if line is None or layout.quote is None:
            return line
        # A line that ends within quotes does not end a record. The records around it tell: none is longer than LONGEST,
        # so reading that much before and after it is enough.
        first = max(line - LONGEST, 0)
        source.seek(first)
        around = source.read(line - first + LONGEST)
        start = around.find(b"\n") + 1 if first else 0
        seen = records(around[start : around.rfind(b"\n") + 1], layout)
        if seen.strays and start + seen.strays[0] < len(around) - LONGEST:
            return None
        ends = start + seen.ends + 1
        return next((first + int(end) for end in ends if first + end >= line), None)

    def rows(self, stream: BinaryIO, data: DataConfig, enough: int) -> int:
        """Count lines; in a log with quotes records, which may go over several lines."""
        if self.quote(data) is None:
            return super().rows(stream, data, enough)
        lines = cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, stream), 1 << 20))
        header = None
        if self.header_lines(data) > 0:
            header = header_line(lines, data.path or "the log").removeprefix(BOM)
        layout = self.layout(data, header)
        counted = 0
        for block, _ in text_blocks(lines, COUNTED_BYTES, 1, layout):
            counted += len(records(block, layout).ends)
            if counted >= enough:
                break
        return counted

    def first_cut(self, text: bytes, file: LogFile) -> int | None:
        """Find a line's end; in a log with quotes None if a line after it has an odd number of quotes.

        Such a line may be the last one of a record of several lines.
        """
        end, quote = super().first_cut(text, file), self.quote(file.data)
        if end is None or quote is None:
            return end
        # What comes before the text is unknown, so its first quote may open a field or close one.
        behind, mark = text[end : end + LONGEST], quote.encode()
        if mark in behind and any(line.count(mark) & 1 for line in behind.split(b"\n")):
            return None
        return end

    @abstractmethod
    def layout(self, data: DataConfig, header: bytes | None) -> TextLayout:
        """Return how fields lie in a line; ``header``: the file's first line, None if the settings name columns."""

    def quote(self, data: DataConfig) -> str | None:
        """Return what encloses fields; None if nothing does."""
        return None


class Criteo(Delimited):
    """Tab-separated, no header and no quotes: the label, 13 counts and 26 ids."""

    name = "criteo"

    def layout(self, data: DataConfig, header: bytes | None) -> TextLayout:
        """Name columns by the known names, or by those of ``data.columns``."""
        return TextLayout(names=tuple(data.columns or CRITEO_COLUMNS), separator="\t", quote=None)


class Csv(Delimited):
    """By ``data.separator``, ``data.quote`` and ``data.header``."""

    name = "csv"

    def header_lines(self, data: DataConfig) -> int:
        return int(data.header)

    def quote(self, data: DataConfig) -> str | None:
        return data.quote

    def layout(self, data: DataConfig, header: bytes | None) -> TextLayout:
        """Name columns by the header, or by ``data.columns``; ConfigError without either."""
        separator = "\t" if data.separator == "\\t" else data.separator
        if len(separator.encode()) != 1:
            raise ConfigError(
                f"data.separator is {data.separator!r}, expected one ASCII character",
                hint="data.separator=',' and data.strip=true, if blanks surround it",
            )
        if data.quote is not None and (len(data.quote.encode()) != 1 or data.quote in (separator, "\n", "\r")):
            raise ConfigError(
                f"data.quote is {data.quote!r}, expected one ASCII character that is not data.separator, or null",
                hint="data.quote=null where nothing surrounds the fields",
            )
        if header is not None:
            return TextLayout(names=_names(header, separator, data.quote), separator=separator, quote=data.quote)
        if not data.columns:
            raise ConfigError(
                "data.header is false and data.columns is empty: the columns have no names",
                hint="data.columns=[<name of each column, in order>] or data.header=true",
            )
        return TextLayout(names=tuple(data.columns), separator=separator, quote=data.quote)


def _names(header: bytes, separator: str, quote: str | None) -> tuple[str, ...]:
    text = header.decode(errors="replace").rstrip("\r\n")
    if "\0" in text:
        raise DataError(
            f"the first line is not the header of a text file: it has bytes 0; it begins with {text[:40]!r}",
            hint="data.path=<a text file>, or data.format that describes this one",
        )
    if "\r" in text:
        raise lines_end_with_cr("its lines", header)
    if not quote:
        return tuple(map(str.strip, text.split(separator)))
    try:
        # csv reads an empty line as no row. Its only name is the empty one.
        names = next(csv.reader([text], delimiter=separator, quotechar=quote), [""])
    except csv.Error as error:
        raise DataError(
            f"the first line is not the header of a text file: {error}; it begins with {text[:40]!r}",
            hint="data.path=<a text file>, or data.format and data.header that describe this one",
        ) from None
    return tuple(map(str.strip, names))
