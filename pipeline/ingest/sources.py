"""Raw logs as blocks of rows, and the errors of reading them."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from typing import BinaryIO, Protocol, cast

import numpy as np
import polars as pl
import pyarrow as pa

from pipeline.core.errors import DataError, NightjarError, UnreachableError
from pipeline.ingest.rawfiles import COMPRESSED
from pipeline.ingest.text import TextLayout, line_count, read_lines
from pipeline.ingest.values import Reject
from pipeline.store.artifacts import Store

# Blocks in a part that another process or thread reads.
PART_BLOCKS = 4
# Low bits of a row's place, which number its line; the others number its part.
LINE_BITS = 40
_CLIENTS = ("aiobotocore", "aiohttp", "botocore", "fsspec", "gcsfs", "s3fs", "urllib3")


@dataclass(frozen=True, kw_only=True)
class RawBlock:
    """Some rows of one file as they came: ``lines`` numbers them (1-based), ``rejects`` are left out of ``frame``.

    ``bytes``: size of the rows as text (synthetic logs only; files are counted on disk). ``place``: decides the rows'
    places instead of ``file``, if that name differs though the rows are the same. ``further_lines``: lines of its rows
    and rejects besides the first of each, and of rows that were left out.
    """

    frame: pl.DataFrame
    file: str
    lines: np.ndarray
    rejects: list[Reject] = field(default_factory=list)
    bytes: int = 0
    place: str = ""
    further_lines: int = 0

    def read(self) -> RawBlock:
        return self


@dataclass(frozen=True, kw_only=True)
class TextBlock:
    """Whole lines of one file, the first of them ``first_line``, that are yet to be taken apart.

    ``place``: see ``RawBlock``.
    """

    data: bytes
    file: str
    first_line: int
    layout: TextLayout
    columns: tuple[str, ...]
    place: str = ""

    def read(self) -> RawBlock:
        """Return the rows as strings (numbers, if all of them are plain ones), without the lines that are no rows."""
        frame, lines, rejects = read_lines(self.data, self.first_line, self.layout)
        further = line_count(self.data) - frame.height - len(rejects)
        return RawBlock(
            frame=frame.select(self.columns),
            file=self.file,
            lines=lines,
            rejects=rejects,
            place=self.place,
            further_lines=further,
        )


class Block(Protocol):
    """Some rows of one file, read or yet to be read."""

    @property
    def file(self) -> str:
        """The file in messages."""

    def read(self) -> RawBlock:
        """Return the rows, and the lines that are no rows."""


@contextmanager
def answering(path: str | None, store: Store | None) -> Iterator[None]:
    """Turn what clients of remote file systems raise after their retries into an UnreachableError.

    ``path``: path of the logs; ``store``: where datasets are read or written, None if nowhere.
    """
    try:
        yield
    except (NightjarError, FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        remote = path is not None and "://" in path and not path.startswith("file://")
        if store is not None and not store.is_local:
            remote = True
        # Compare the name of the module, because clients of stores that are not used need not be installed.
        client = type(error).__module__.split(".")[0] in _CLIENTS or isinstance(error, OSError)
        if not (remote and client):
            raise
        place = path or "the log"
        if store is not None:
            place += f" or {store.url}"
        raise UnreachableError(
            f"{place} does not answer: {type(error).__name__}: {error}",
            hint="run the same command once it answers; no partial output was kept",
        ) from error


class Source(ABC):
    """A log, or a part of one. It can be handed to another process, because it is read where ``blocks`` is called."""

    # Lines of its file before the first row.
    lines_before: int = 0
    # Whether another part of its file comes before it; the source then numbers its lines from 1.
    is_later: bool = False
    # Whether reading takes work, such as decompression, that threads share part by part.
    decodes: bool = False

    @abstractmethod
    def blocks(self) -> Iterator[Block]:
        """Yield the rows in order, in blocks of about ``ingest.block_mib``."""

    def parts(self) -> Sequence[Source]:
        """Divide it into sources that can be read by themselves, in order."""
        return [self]

    def numbered(self, before: int) -> Source:
        """Return the same part, with ``before`` lines of its file before it."""
        return self


# Changes a block that was read. The array holds the line numbers of its rows within the part.
RowChange = Callable[[RawBlock, np.ndarray], RawBlock]


@dataclass(frozen=True)
class ChangedBlock:
    """A block whose rows are changed as they are read; ``before``: lines of the file before the part."""

    block: Block
    change: RowChange
    before: int

    @property
    def file(self) -> str:
        return self.block.file

    def read(self) -> RawBlock:
        raw = self.block.read()
        return self.change(raw, raw.lines - self.before)


@dataclass(frozen=True)
class WrappedSource(Source):
    """A source whose rows are changed as they are read.

    ``changes``: one for each part, or the one of this part. ``before``: lines of the file before the part, which
    changes do not count.
    """

    source: Source
    changes: Sequence[RowChange] = field(repr=False)
    before: int = field(default=0, kw_only=True)

    @property
    def is_later(self) -> bool:  # type: ignore[override]
        return self.source.is_later

    @property
    def lines_before(self) -> int:  # type: ignore[override]
        return self.source.lines_before

    @property
    def decodes(self) -> bool:  # type: ignore[override]
        return self.source.decodes

    def numbered(self, before: int) -> Source:
        # The first part of a file needs no shift: its lines are numbered from the first one.
        shift = before if self.source.is_later else 0
        return replace(self, source=self.source.numbered(before), before=shift)

    def parts(self) -> list[Source]:
        pairs = zip(self.source.parts(), self.changes, strict=True)
        return [WrappedSource(part, [change]) for part, change in pairs]

    def blocks(self) -> Iterator[Block]:
        for block in self.source.blocks():
            yield ChangedBlock(block, self.changes[0], self.before)


def wrap_sources(
    day: date | None, sources: Sequence[Source], changes: Mapping[date | None, Sequence[Sequence[RowChange]]]
) -> list[Source]:
    """Return the ``sources`` of ``day`` with the changes that an earlier pass found for their parts.

    Args:
        day: None is the whole log.
        sources: those that the earlier pass read.
        changes: for each source of a day, or (None) of the whole log, one for each of its parts.

    Raises:
        DataError: if there are more or fewer sources now.
    """
    known = changes.get(day)
    if known is None:
        # One log holds all days, so the pass read it once, for no day in particular.
        known = changes[None]
    if len(known) != len(sources):
        raise DataError(
            f"the logs of {day} changed while they were read: {len(known)} files, then {len(sources)}",
            hint="run the same command once all of them are delivered",
        )
    return [WrappedSource(source, of_parts) for source, of_parts in zip(sources, known, strict=True)]


@dataclass(frozen=True)
class FrameSource(Source):
    """Raw rows in memory: rows of a day that came with the files of another, ``place``."""

    rows: pl.DataFrame
    label: str
    place: str = ""

    def blocks(self) -> Iterator[Block]:
        lines = np.arange(1, self.rows.height + 1)
        yield RawBlock(frame=self.rows, file=self.label, lines=lines, place=self.place)


@contextmanager
def readable(label: str) -> Iterator[None]:
    """Turn errors of a damaged or locked file into a DataError that names it."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{label} is damaged or cut off: {error}", hint="fetch the file again") from None
    except pa.ArrowInvalid as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{label} is not a readable Parquet or ORC file: {reason}", hint="data.format=csv, if it is text"
        ) from None
    except pa.ArrowNotImplementedError as error:
        raise DataError(
            f"{label} holds what Arrow does not read: {error}", hint="write such columns in another type or compression"
        ) from None
    except PermissionError:
        raise DataError(f"no permission to read {label}", hint="grant read permission on data.path") from None
    except OSError as error:
        if type(error) is not OSError or error.errno is not None:
            raise
        # Arrow raises such an error for bytes that it cannot decode: no system call failed.
        reason = str(error).splitlines()[0]
        raise DataError(f"{label} is damaged or cut off: {reason}", hint="fetch the file again") from None


@contextmanager
def decompressed(source: BinaryIO, path: str) -> Iterator[BinaryIO]:
    """Decompress a .gz, .zst, .bz2 or .xz file; any other stays as it is. EOFError for one of them without bytes.

    Every program writes some bytes even for empty input, so such a file was cut off before its first byte was written.
    """
    if path.endswith(COMPRESSED):
        if not source.read(1):
            raise EOFError("it is compressed, by its name, and has no bytes")
        source.seek(0)
    if path.endswith(".gz"):
        with gzip.open(source, "rb") as unpacked:
            yield cast(BinaryIO, unpacked)
    elif path.endswith(".bz2"):
        with io.BufferedReader(Streams(source, bz2.BZ2Decompressor)) as text:
            yield cast(BinaryIO, text)
    elif path.endswith(".xz"):
        with io.BufferedReader(Streams(source, lzma.LZMADecompressor)) as text:
            yield cast(BinaryIO, text)
    elif path.endswith((".zst", ".zstd")):
        # Arrow's stream can tell a file that is cut off from one that ends.
        with pa.CompressedInputStream(source, "zstd") as stream:
            yield cast(BinaryIO, stream)
    else:
        yield source


def counted_lines(stream: BinaryIO, enough: int) -> int:
    """Count lines that are not blank at the end of ``stream``, until there are ``enough``."""
    lines, open_line = 0, False
    while lines < enough:
        block = stream.read(1 << 22)
        if not block:
            break
        lines += block.count(b"\n")
        # The last line may end with the file instead of a newline.
        open_line = not block.endswith(b"\n")
    return lines + open_line


# Compressed bytes that are read at a time.
_CHUNK = 1 << 16


class Decompressor(Protocol):
    """``bz2.BZ2Decompressor`` and ``lzma.LZMADecompressor``, for one stream."""

    @property
    def eof(self) -> bool:
        """Whether the stream has ended."""

    @property
    def needs_input(self) -> bool:
        """Whether it needs more input to unpack anything."""

    @property
    def unused_data(self) -> bytes:
        """Bytes of its input behind the end of the stream."""

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        """Return at most ``max_length`` more bytes of the text."""


class Streams(io.RawIOBase):
    """The text of all compressed streams of ``source``, one after the other, as ``cat a.xz b.xz`` makes them.

    Raises the error of ``new``'s decompressor if a stream is damaged, EOFError if one is cut off. Python's own readers
    stop at bytes after a stream that do not begin another one. So they silently drop what follows the padding that xz
    allows between streams, and a stream whose first bytes are damaged with all that follows.

    Zero bytes between the streams, and at the end, are padding.
    """

    def __init__(self, source: BinaryIO, new: Callable[[], Decompressor]) -> None:
        self._source, self._new = source, new
        self._stream: Decompressor | None = None
        # Bytes that were read but not yet unpacked.
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, target: memoryview) -> int:  # type: ignore[override]
        """Fill a part of ``target``; 0 at the end."""
        while (stream := self._current()) is not None:
            given, self._left = self._left, b""
            # While a stream holds back text that did not fit the last target, it needs no more bytes.
            if not given and stream.needs_input:
                given = self._source.read(_CHUNK)
                if not given:
                    raise EOFError("the file ends within a compressed stream")
            text = stream.decompress(given, len(target))
            if stream.eof:
                self._stream, self._left = None, stream.unused_data
            # An empty text is not the end: the bytes may have been those of a header.
            if text:
                target[: len(text)] = text
                return len(text)
        return 0

    def _current(self) -> Decompressor | None:
        while self._stream is None:
            self._left = self._left.lstrip(b"\0")
            if self._left:
                self._stream = self._new()
                break
            self._left = self._source.read(_CHUNK)
            if not self._left:
                return None
        return self._stream
