"""Files of a log as sources of blocks, whole or in parts.

A gzip file may have several members (RFC 1952, section 2.2), as ``cat a.gz b.gz``, bgzip and log collectors write
them. Every member can be unpacked by itself. Where one begins is found by its first bytes and by unpacking what
follows: bytes that look so by chance unpack to nothing of that length. Members end anywhere, also within a line, so a
part is some members without the rest of the line before, and with the rest of its own last line.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import BinaryIO, cast
from urllib.parse import unquote

import polars as pl
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from pipeline.config.data import DataConfig
from pipeline.core.units import MIB
from pipeline.ingest.formats import FORMATS
from pipeline.ingest.formats.file_format import SEEN, FileFormat, LimitedBytes, LogFile
from pipeline.ingest.rawfiles import COMPRESSED, LogFiles
from pipeline.ingest.schema import DataSpec
from pipeline.ingest.sources import PART_BLOCKS, Block, RawBlock, Source, decompressed, readable
from pipeline.ingest.text import LONGEST

# The unit of ingest.block_mib.
BLOCK_UNIT = MIB
# Number of columns; with twice as many, blocks are half as large.
WIDE = 512
# Marks a missing value in the name of a partition's folder.
_MISSING = "__HIVE_DEFAULT_PARTITION__"
# The first bytes of a gzip member that is deflated.
_MARK = b"\x1f\x8b\x08"
_RESERVED_FLAGS = 0xE0
# Bytes searched at a time.
_CHUNK = 1 << 22
# Maximum number of members to try, for each part, that begin where records cannot be told apart.
_TRIES = 8


@dataclass(frozen=True)
class Members:
    """The text of the members in the bytes from ``start`` to ``stop`` (None: the end of the file).

    The first ``skip`` bytes of that text are left out, and ``over`` bytes of the text that follows are added.
    """

    start: int
    stop: int | None
    skip: int
    over: int


def members_of(source: BinaryIO, part_bytes: int, first_cut: Callable[[bytes], int | None]) -> list[Members]:
    """Find parts of a gzip file, of at least ``part_bytes`` on disk each; only one if none can be told apart.

    ``first_cut``: returns how many bytes of a member's text belong to the part before; None if it cannot tell.
    """
    cuts, size, at = [(0, 0)], source.seek(0, io.SEEK_END), part_bytes
    while (at := _next_mark(source, at, size)) < size:
        source.seek(at)
        try:
            with gzip.GzipFile(fileobj=source) as stream:
                text = stream.read(SEEN + LONGEST)
        except (EOFError, gzip.BadGzipFile, zlib.error):
            text = b""
        if not text:
            # The bytes look like a header by chance: the next match may be a real one.
            at += 1
            continue
        skip = first_cut(text)
        if skip is not None:
            cuts.append((at, skip))
            at += part_bytes
        else:
            at += max(part_bytes // _TRIES, 1)
    ends: list[tuple[int | None, int]] = [*cuts[1:], (None, 0)]
    return [Members(start, stop, skip, over) for (start, skip), (stop, over) in zip(cuts, ends, strict=True)]


def _next_mark(source: BinaryIO, at: int, size: int) -> int:
    # Returns the first place from `at` on that looks like a member's header; `size` if there is none.
    while at < size:
        source.seek(at)
        # Read a few bytes more than a chunk, because a mark may lie across its end.
        data = source.read(_CHUNK + len(_MARK))
        place = data.find(_MARK)
        while 0 <= place < len(data) - len(_MARK):
            if not data[place + len(_MARK)] & _RESERVED_FLAGS:
                return at + place
            place = data.find(_MARK, place + 1)
        at += _CHUNK
    return size


@contextmanager
def text_of(source: BinaryIO, members: Members) -> Iterator[BinaryIO]:
    """Open the text of ``members``."""
    over, within = b"", source
    if members.stop is not None:
        # The rest of the last line, which the reader of the next part skips.
        source.seek(members.stop)
        with gzip.GzipFile(fileobj=source) as following:
            over = following.read(members.over)
        within = cast(BinaryIO, LimitedBytes(source, members.stop - members.start))
    source.seek(members.start)
    with gzip.GzipFile(fileobj=within) as stream:
        text = io.BufferedReader(_JoinedStreams([stream, io.BytesIO(over)]))
        text.read(members.skip)
        yield text


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


@dataclass(frozen=True)
class FileSource(Source):
    """A file, or part of one, on any filesystem, at ``path``. ``members``: the part's members of a gzip file."""

    fs: AbstractFileSystem
    path: str
    file: LogFile
    members: Members | None = None

    @property
    def format(self) -> FileFormat:
        """How its bytes are read."""
        return FORMATS[self.file.data.format]

    @property
    def is_later(self) -> bool:  # type: ignore[override]
        """Whether another part comes before it; False for formats that number their own rows."""
        return self.format.by_line and self.file.start > 0

    @property
    def decodes(self) -> bool:  # type: ignore[override]
        """Whether reading it takes decoding: True for all but plain text."""
        return not self.format.by_line or self.path.endswith(COMPRESSED)

    @property
    def lines_before(self) -> int:  # type: ignore[override]
        """Lines of the file before the first row: the header, where there is one."""
        return self.format.header_lines(self.file.data)

    def numbered(self, before: int) -> FileSource:
        if not self.is_later:
            return self
        return replace(self, file=replace(self.file, first_line=before + 1))

    def parts(self) -> list[FileSource]:
        """Divide the file: into ranges of a few blocks of lines, row groups, or members of gzip.

        A file that is small or of another kind stays whole.
        """
        block, size = self.file.block_bytes, PART_BLOCKS * self.file.block_bytes
        # Formats that must be decoded are slow to read, so files of more than one block are divided already.
        least = block if self.decodes else size
        if self.fs.size(self.path) <= least:
            return [self]
        with readable(self.file.label), self.fs.open(self.path, "rb") as source:
            if not self.format.by_line:
                return [replace(self, file=part) for part in self.format.parts(source, self.file, size)]
            if not self.path.endswith(COMPRESSED):
                return self._by_lines(source, size)
            if self.path.endswith(".gz"):
                return self._by_members(source, block)
            # Files of other compressions are not searched for parts that can be unpacked by themselves.
            return [self]

    def _by_lines(self, source: BinaryIO, size: int) -> list[FileSource]:
        cuts = [0]
        for at in range(size, self.fs.size(self.path), size):
            cut = self.format.cut(source, max(at, cuts[-1]), self.file)
            if cut is not None:
                cuts.append(cut)
        parts = []
        for start, stop in zip(cuts, [*cuts[1:], None], strict=True):
            parts.append(replace(self, file=replace(self.file, start=start, stop=stop)))
        return parts

    def _by_members(self, source: BinaryIO, size: int) -> list[FileSource]:
        # A file that is not on this machine's disks is searched for members only where it likely has several. Its last
        # four bytes are the length of the last member's text, up to 4 GiB: if that is more than the file has bytes, the
        # member is most likely the only one.
        if not isinstance(self.fs, LocalFileSystem):
            file_bytes = source.seek(0, io.SEEK_END)
            source.seek(max(file_bytes - 4, 0))
            if int.from_bytes(source.read(4), "little") > file_bytes:
                return [self]
        parts = members_of(source, size, lambda text: self.format.first_cut(text, self.file))
        if len(parts) == 1:
            return [self]
        source.seek(0)
        with gzip.GzipFile(fileobj=source) as stream:
            head = stream.readline(SEEN)
        if not head.endswith(b"\n"):
            # Later parts take the names of columns from the first line: without a whole one the file is not divided.
            return [self]
        sources = list[FileSource]()
        for part in parts:
            file = replace(self.file, start=part.start, head=head if sources else b"")
            sources.append(replace(self, members=part, file=file))
        return sources

    def blocks(self) -> Iterator[Block]:
        """Yield the rows in blocks of about ``block_bytes`` of uncompressed data; DataError if the file is damaged."""
        for block, _ in self.placed_blocks():
            yield block

    def placed_blocks(self) -> Iterator[tuple[Block, int]]:
        """Yield ``blocks``, each with the position (bytes on disk) that its reader has reached in the file."""
        values, columns = self.file.values, list(self.file.spec.columns)
        with readable(self.file.label), self.fs.open(self.path, "rb") as source:
            if self.members is not None:
                uncompressed = text_of(source, self.members)
            else:
                # Columnar files compress their own pages, so their bytes are taken as they are, whatever the files are
                # called.
                uncompressed = decompressed(source, self.path if self.format.by_line else "")
            with uncompressed as stream:
                for block in self.format.blocks(stream, self.file):
                    if values:
                        block = PartitionBlock(block=block, values=values, columns=columns)
                    yield block, source.tell()


def block_bytes(block_mib: int, spec: DataSpec) -> int:
    """Return the uncompressed bytes of a block: fewer if rows have very many columns, each with counts of its own."""
    return max(block_mib * BLOCK_UNIT // max(len(spec.columns) // WIDE, 1), 1)


def file_sources(
    data: DataConfig, spec: DataSpec, files: LogFiles, block_mib: int, whole: DataSpec | None = None
) -> list[FileSource]:
    """Return every file of a log, in order, to be read in blocks of ``block_mib``.

    ``whole``: the schema of which ``spec`` reads some columns. Files are cut by it, so that all passes have the same
    parts, because a row is known by its part's number and its line.
    """
    size = block_bytes(block_mib, whole or spec)
    sources = []
    for path, label, place in zip(files.paths, files.labels, files.places, strict=True):
        # Folders may tell more than the schema reads.
        values = {name: value for name, value in partition_values(path).items() if name in spec.columns}
        file = LogFile(label=label, data=data, spec=spec, block_bytes=size, place=place, values=values)
        sources.append(FileSource(files.fs, path, file))
    return sources


def partition_values(path: str) -> dict[str, str | None]:
    """Return the values of Hive's partitions (folders ``name=value``) of ``path``, by column; None where missing."""
    values: dict[str, str | None] = {}
    # Only folders: the name of the file may have a `=` by chance.
    for folder in path.split("/")[:-1]:
        name, mark, value = folder.partition("=")
        if mark:
            # Hive writes characters that paths may not hold as %XX.
            values[unquote(name)] = None if value == _MISSING else unquote(value)
    return values


@dataclass(frozen=True, kw_only=True)
class PartitionBlock:
    """Rows of a file of a partition: ``block`` lacks the columns whose ``values`` the path tells."""

    block: Block
    values: dict[str, str | None]
    columns: Sequence[str]

    @property
    def file(self) -> str:
        return self.block.file

    def read(self) -> RawBlock:
        raw = self.block.read()
        # The values stay text, so that parsing types them like fields of a text file.
        columns = [pl.lit(value, pl.String).alias(name) for name, value in self.values.items()]
        return replace(raw, frame=raw.frame.with_columns(columns).select(self.columns))
