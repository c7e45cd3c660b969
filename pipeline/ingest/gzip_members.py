"""Gzip files of several members (RFC 1952, section 2.2), as ``cat a.gz b.gz``, bgzip and log collectors write them.

Every member can be unpacked by itself. Where one begins is found by its first bytes and by unpacking what follows:
bytes that look so by chance unpack to nothing of that length. Members end anywhere, also within a line, so a part is
some members without the rest of the line before, and with the rest of its own last line.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, cast

from pipeline.ingest.formats.file_format import SEEN
from pipeline.ingest.quoted import LONGEST

# Gzip, deflate.
_MARK = b"\x1f\x8b\x08"
_RESERVED_FLAGS = 0xE0
# Bytes searched at a time.
_CHUNK = 1 << 22
# Members looked at, for each part, that begin where nobody can tell records apart.
_TRIES = 8


@dataclass(frozen=True)
class Members:
    """The text of the members in the bytes from ``start`` to ``stop`` (None: the end of the file).

    Without its first ``skip`` bytes, and with ``over`` bytes of the text that follows.
    """

    start: int
    stop: int | None
    skip: int
    over: int


def members_of(source: BinaryIO, part_bytes: int, first_cut: Callable[[bytes], int | None]) -> list[Members]:
    """Parts of a gzip file, of at least ``part_bytes`` each as it lies there; one where none can be told apart.

    ``first_cut``: bytes of the text of a member that belong to the part before; None where it cannot tell.
    """
    cuts, size, at = [(0, 0)], source.seek(0, io.SEEK_END), part_bytes
    while (at := _next_mark(source, at, size)) < size:
        text = _text_at(source, at)
        skip = first_cut(text) if text else None
        if skip is not None:
            cuts.append((at, skip))
            at += part_bytes
        else:
            at += max(part_bytes // _TRIES, 1) if text else 1
    ends: list[tuple[int | None, int]] = [*cuts[1:], (None, 0)]
    return [Members(start, stop, skip, over) for (start, skip), (stop, over) in zip(cuts, ends, strict=True)]


def has_one(source: BinaryIO) -> bool:
    """Whether the last member says that it has more text than the file has bytes: then it is most likely the only one.

    Its last four bytes are the length of its text, up to 4 GiB.
    """
    size = source.seek(0, io.SEEK_END)
    source.seek(max(size - 4, 0))
    return int.from_bytes(source.read(4), "little") > size


def _next_mark(source: BinaryIO, at: int, size: int) -> int:
    # The first place from `at` on where the bytes are those of a member's header; `size` where there is none.
    while at < size:
        source.seek(at)
        data = source.read(_CHUNK + len(_MARK))
        place = data.find(_MARK)
        while 0 <= place < len(data) - len(_MARK):
            if not data[place + len(_MARK)] & _RESERVED_FLAGS:
                return at + place
            place = data.find(_MARK, place + 1)
        at += _CHUNK
    return size


def _text_at(source: BinaryIO, at: int) -> bytes:
    source.seek(at)
    try:
        with gzip.GzipFile(fileobj=source) as stream:
            return stream.read(SEEN + LONGEST)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        return b""


def first_line(source: BinaryIO) -> bytes:
    """The first line of a gzip file; nothing where it does not end soon."""
    source.seek(0)
    with gzip.GzipFile(fileobj=source) as stream:
        line = stream.readline(SEEN)
    return line if line.endswith(b"\n") else b""


@contextmanager
def text_of(source: BinaryIO, members: Members) -> Iterator[BinaryIO]:
    """The text of ``members``."""
    over = b""
    if members.stop is not None:
        source.seek(members.stop)
        with gzip.GzipFile(fileobj=source) as following:
            over = following.read(members.over)
    source.seek(members.start)
    within = source if members.stop is None else cast(BinaryIO, _LimitedBytes(source, members.stop - members.start))
    with gzip.GzipFile(fileobj=within) as stream:
        text = io.BufferedReader(_JoinedStreams([stream, io.BytesIO(over)]))
        text.read(members.skip)
        yield text


class _LimitedBytes(io.RawIOBase):
    """The next ``left`` bytes of ``source``."""

    def __init__(self, source: BinaryIO, left: int) -> None:
        self._source, self._left = source, left

    def readable(self) -> bool:
        return True

    def readinto(self, target: memoryview) -> int:  # type: ignore[override]
        data = self._source.read(min(len(target), self._left))
        target[: len(data)] = data
        self._left -= len(data)
        return len(data)


class _JoinedStreams(io.RawIOBase):
    """``streams``, one after the other."""

    def __init__(self, streams: list[io.BufferedIOBase]) -> None:
        self._streams = streams

    def readable(self) -> bool:
        return True

    def readinto(self, target: memoryview) -> int:  # type: ignore[override]
        while self._streams:
            if count := self._streams[0].readinto(target):
                return count
            del self._streams[0]
        return 0
