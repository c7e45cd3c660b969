"""Files of several compressed streams, one after the other: .bz2 and .xz, as ``cat a.xz b.xz`` makes them.

Python's own readers end at the first byte after a stream that begins no other one. They so drop, unsaid, what lies
behind the padding that xz allows between streams, and behind a stream whose first bytes are damaged.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import BinaryIO, Protocol

_CHUNK = 1 << 16  # compressed bytes read at a time


class Decompressor(Protocol):
    """``bz2.BZ2Decompressor`` and ``lzma.LZMADecompressor``: of one stream."""

    @property
    def eof(self) -> bool:
        """Whether the stream has ended."""
        ...

    @property
    def needs_input(self) -> bool:
        """Whether it can unpack no more of what it was given."""
        ...

    @property
    def unused_data(self) -> bytes:
        """What it was given behind the end of the stream."""
        ...

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        """At most ``max_length`` more bytes of the text."""
        ...


class Streams(io.RawIOBase):
    """The text of all streams of ``source``; what ``new`` raises where one is damaged, EOFError where one is cut off.

    Bytes 0 between them, and at the end, are padding.
    """

    def __init__(self, source: BinaryIO, new: Callable[[], Decompressor]) -> None:
        self._source, self._new = source, new
        self._stream: Decompressor | None = None
        self._left = b""  # read, and not yet unpacked

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, target: memoryview) -> int:  # type: ignore[override]
        """Fill a part of ``target``; 0 at the end."""
        while (stream := self._current()) is not None:
            given, self._left = self._left, b""
            if not given and stream.needs_input and not (given := self._source.read(_CHUNK)):
                raise EOFError("the file ends within a compressed stream")
            text = stream.decompress(given, len(target))
            if stream.eof:
                self._stream, self._left = None, stream.unused_data
            if text:
                target[: len(text)] = text
                return len(text)
        return 0

    def _current(self) -> Decompressor | None:
        """The stream that is being read, or the next one; None where there is none."""
        while self._stream is None:
            self._left = self._left.lstrip(b"\0")
            if self._left:
                self._stream = self._new()
            elif not (read := self._source.read(_CHUNK)):
                return None
            else:
                self._left = read
        return self._stream
