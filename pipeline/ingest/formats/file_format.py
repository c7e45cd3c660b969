"""What a file format is: how the bytes of one file of a log become blocks of rows."""

from __future__ import annotations

import io
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import BinaryIO, cast

from pipeline.config.data import DataConfig
from pipeline.core.errors import DataError
from pipeline.ingest.schema import DataSpec
from pipeline.ingest.sources import Block, counted_lines
from pipeline.ingest.text import TextLayout, header_line, text_blocks


@dataclass(frozen=True, kw_only=True)
class LogFile:
    """One file of a log, or a part of it, whose first line, or row, is number ``first_line``.

    ``start``, ``stop``: the part's bytes in plain text, its row groups in a Parquet file. In a later part of compressed
    text, ``start`` is the byte of its first member, and ``head`` the first line of the file, because its stream begins
    with the part. ``first_line`` of text is 1 until the lines before it are counted. ``label``: the file in messages.
    ``place``: see ``LogFiles``. ``block_bytes``: uncompressed bytes of a block. ``values``: of columns that its path
    tells.
    """

    label: str
    data: DataConfig
    spec: DataSpec
    block_bytes: int
    start: int = 0
    stop: int | None = None
    first_line: int = 1
    head: bytes = b""
    place: str = ""
    values: dict[str, str | None] = field(default_factory=dict)

    @property
    def stored_spec(self) -> DataSpec:
        """``spec`` with only the columns that are in the file itself."""
        if not self.values:
            return self.spec
        # Files of a partition do not store the columns that their folders tell.
        columns = {name: option for name, option in self.spec.columns.items() if name not in self.values}
        return replace(self.spec, columns=columns)


class FileFormat(ABC):
    """A choice of ``data.format`` that names files. ``by_line``: whether each row is a line of text.

    Files of lines may be compressed, are cut into parts at the ends of lines, and have their lines numbered.
    """

    name: str
    by_line: bool

    @abstractmethod
    def blocks(self, stream: BinaryIO, file: LogFile) -> Iterator[Block]:
        """Yield the rows of ``file``, whose uncompressed bytes are ``stream``, in order.

        Raises DataError where the file is of another kind or lacks columns of ``file.spec``.
        """

    def parts(self, source: BinaryIO, file: LogFile, part_bytes: int) -> list[LogFile]:
        """Divide ``file``, whose bytes are ``source``, into parts of about ``part_bytes`` each, in order."""
        return [file]

    def cut(self, source: BinaryIO, at: int, file: LogFile) -> int | None:
        """Find a place of plain text from ``at`` on where a part of ``file`` may end; None if none is near.

        Args:
            source: the file's bytes, read from anywhere.
            at: an offset in bytes, most likely within a line.
            file: of the format of this object.
        """
        source.seek(at)
        end = line_end(source.read(SEEN))
        if end is None:
            return None
        return at + end

    def first_cut(self, text: bytes, file: LogFile) -> int | None:
        """Return how many bytes of ``text`` the part before takes; what comes before ``text`` is unread.

        ``text``: SEEN bytes and LONGEST more, and fewer only at the end of the file.
        """
        return line_end(text[:SEEN])

    def header_lines(self, data: DataConfig) -> int:
        """Count the lines before the first row."""
        return 0

    def rows(self, stream: BinaryIO, data: DataConfig, enough: int) -> int:
        """Count the rows of a file as they were delivered, those included that will not parse.

        Args:
            stream: its uncompressed bytes.
            data: the log, for the header of its files.
            enough: rows at which counting may stop.
        """
        header = self.header_lines(data)
        return max(counted_lines(stream, enough + header) - header, 0)


def line_end(text: bytes) -> int | None:
    """Count the bytes of ``text`` up to the end of its first line that is not blank; None if no such line ends in it.

    Parts end there, so only the file's own end can have blank lines that are no rows.
    """
    # The pattern asks for a character before the line end: CR LF alone is a blank line.
    end = _LINE_END.search(text)
    if end is None:
        return None
    return end.end()


def lines_end_with_cr(lines: str, start: bytes) -> DataError:
    """Return the error for a file that begins with ``start`` and whose ``lines``, in words, end with CR alone."""
    text = start[:40].decode(errors="replace")
    return DataError(
        f"{lines} end with CR alone, as old Macs wrote them, expected LF or CR LF; it begins with {text!r}",
        hint="tr '\\r' '\\n' < FILE > FILE.lf",
    )


# Bytes within which a line must end where parts meet.
SEEN = 1 << 20
_LINE_END = re.compile(rb"[^\r\n]\r*\n")
_UNPACK = "unpack it, or pack it as .gz, .zst, .bz2 or .xz"
# First bytes of files that are not text, with what they are and what to do.
_NO_TEXT = {
    b"PAR1": ("a Parquet file", "data.format=parquet"),
    b"ORC": ("an ORC file", "data.format=orc"),
    b"Obj\x01": ("an Avro file", "data.format=avro"),
    b"\x1f\x8b": ("compressed by gzip", "a name that ends with .gz"),
    b"\x28\xb5\x2f\xfd": ("compressed by Zstandard", "a name that ends with .zst"),
    b"PK\x03\x04": ("a ZIP archive", _UNPACK),
    b"BZh91AY&": ("compressed by bzip2", "a name that ends with .bz2"),
    b"\xfd7zXZ\x00": ("compressed by xz", "a name that ends with .xz"),
    b"\xff\xfe": ("text in UTF-16", "write it in UTF-8"),
    b"\xfe\xff": ("text in UTF-16", "write it in UTF-8"),
}


def require_text(start: bytes, label: str) -> None:
    """Raise DataError if a file that begins with ``start`` is of a kind that is not text."""
    for mark, (what, hint) in _NO_TEXT.items():
        if start.startswith(mark):
            raise DataError(f"{label} is {what}, expected text", hint=hint)


BOM = b"\xef\xbb\xbf"


class LineReader:
    """Reads the text of ``file`` in ``stream``: ``header()`` first where it has one, then ``blocks``.

    ``stream`` holds the part alone if the file has a ``head``.
    """

    def __init__(self, stream: BinaryIO, file: LogFile) -> None:
        self._file, self._headers = file, 0
        self._stream = io.BufferedReader(cast(io.RawIOBase, stream), 1 << 20)
        self._first = io.BufferedReader(io.BytesIO(file.head)) if file.head else self._stream
        # Only peek, because these bytes belong to the header or the first row. A byte order mark belongs to neither: it
        # would become part of the first name.
        start = self._first.peek(8)[:8]
        require_text(start, file.label)
        if start.startswith(BOM):
            self._first.read(len(BOM))

    def header(self) -> bytes:
        """Read the next line, which is not a row."""
        self._headers += 1
        return header_line(cast(BinaryIO, self._first), self._file.label)

    def start(self) -> bytes:
        """Peek at some of the next bytes."""
        return self._stream.peek(1 << 20)

    def blocks(self, layout: TextLayout | None = None) -> Iterator[tuple[bytes, int]]:
        """Yield blocks of whole lines (with ``layout`` whole records) of the part, with their first line's number."""
        file, first_line = self._file, 1 + self._headers
        if file.start:
            first_line = file.first_line
            # With a head, the stream holds the part alone.
            if not file.head:
                self._stream.seek(file.start)
        rest = cast(BinaryIO, self._stream)
        if file.stop is not None:
            rest = cast(BinaryIO, LimitedBytes(rest, file.stop - self._stream.tell()))
        yield from text_blocks(rest, file.block_bytes, first_line, layout)


class LimitedBytes:
    """The next ``left`` bytes of ``stream``, for readers of text or of gzip members."""

    def __init__(self, stream: BinaryIO, left: int) -> None:
        self.stream, self.left = stream, left

    def read(self, size: int) -> bytes:
        data = self.stream.read(max(min(size, self.left), 0))
        self.left -= len(data)
        return data
