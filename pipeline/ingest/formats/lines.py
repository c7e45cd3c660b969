"""The lines of a file, or of a part of it: the first bytes looked at, a byte order mark skipped, ends cut off."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import BinaryIO, cast

from pipeline.ingest.formats.file_format import LogFile, require_text
from pipeline.ingest.quoted import TextLayout
from pipeline.ingest.text import header_line, text_blocks

BOM = b"\xef\xbb\xbf"


class LineReader:
    """The text of ``file`` in ``stream``: ``header()`` first where it has one, then ``blocks``.

    ``stream`` is that of the part alone where the file has a ``head``.
    """

    def __init__(self, stream: BinaryIO, file: LogFile) -> None:
        self._file, self._stream, self._headers = file, io.BufferedReader(cast(io.RawIOBase, stream), 1 << 20), 0
        self._first = io.BufferedReader(io.BytesIO(file.head)) if file.head else self._stream
        start = self._first.peek(8)[:8]
        require_text(start, file.label)
        if start.startswith(BOM):
            self._first.read(len(BOM))

    def header(self) -> bytes:
        """The next line, which is no row."""
        self._headers += 1
        return header_line(cast(BinaryIO, self._first), self._file.label)

    def start(self) -> bytes:
        """Some bytes that come next."""
        return self._stream.peek(1 << 20)

    def blocks(self, layout: TextLayout | None = None) -> Iterator[tuple[bytes, int]]:
        """Blocks of whole lines of the file's part, each with its first line's number; ``layout``: of whole records."""
        file, first_line = self._file, 1 + self._headers
        if file.start:
            first_line = file.first_line
        if file.start and not file.head:
            self._stream.seek(file.start)
        rest = cast(BinaryIO, self._stream)
        if file.stop is not None:
            rest = cast(BinaryIO, _Limited(rest, file.stop - self._stream.tell()))
        yield from text_blocks(rest, file.block_bytes, first_line, layout)


class _Limited:
    """The next ``left`` bytes of ``stream``."""

    def __init__(self, stream: BinaryIO, left: int) -> None:
        self.stream, self.left = stream, left

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes; none at the end."""
        data = self.stream.read(max(min(size, self.left), 0))
        self.left -= len(data)
        return data
