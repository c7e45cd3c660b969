"""Raw logs as blocks: files on any fsspec URL, compressed or not, text or Parquet."""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import BinaryIO, Protocol, Self, cast

import fsspec
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from fsspec import AbstractFileSystem

from pipeline.artifacts import Store
from pipeline.config import Config, DataConfig
from pipeline.errors import ConfigError, DataError, NightjarError, UnreachableError
from pipeline.ingest.spec import CRITEO_COLUMNS, DataSpec, require_columns
from pipeline.ingest.text import Layout, Reject, read_lines, text_blocks

_CLIENTS = ("aiobotocore", "aiohttp", "botocore", "fsspec", "gcsfs", "s3fs", "urllib3")
BLOCK_UNIT = 1 << 20  # bytes in the unit of ingest.block_mib
PART_BLOCKS = 4  # blocks of a part that another process reads
COMPRESSED = (".gz", ".zst", ".zstd")
_SEEN = 1 << 20  # bytes in which a line must end where parts meet
_LINE_END = re.compile(rb"[^\r\n]\r*\n")


@dataclass(frozen=True, kw_only=True)
class RawBlock:
    """Some rows of one file as they came: ``lines`` numbers them (1-based), ``rejects`` are left out of ``frame``.

    ``bytes``: size of the rows as text (synthetic logs only; files are counted on disk).
    """

    frame: pl.DataFrame
    file: str
    lines: np.ndarray
    rejects: list[Reject] = field(default_factory=list)
    bytes: int = 0

    def read(self) -> RawBlock:
        """Itself: it is read already."""
        return self


@dataclass(frozen=True, kw_only=True)
class TextBlock:
    """Whole lines of one file, the first of them ``first_line``, that are yet to be taken apart."""

    data: bytes
    file: str
    first_line: int
    layout: Layout
    columns: tuple[str, ...]

    def read(self) -> RawBlock:
        """The rows as strings (numbers, where all of them are plain ones), the other lines aside."""
        frame, lines, rejects = read_lines(self.data, self.first_line, self.layout)
        return RawBlock(frame=frame.select(self.columns), file=self.file, lines=lines, rejects=rejects)


Block = RawBlock | TextBlock


@dataclass(frozen=True)
class Files:
    """The files of a log in order; ``labels`` name them relative to where they lie together."""

    fs: AbstractFileSystem
    paths: list[str]
    labels: list[str]
    bytes: int


@contextmanager
def answering(config: Config, store: Store | None) -> Iterator[None]:
    """Turn what clients of a remote file system raise, after their own retries, into an UnreachableError."""
    try:
        yield
    except (NightjarError, FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        remote = _is_remote(config.data.path or "") or (store is not None and not store.is_local)
        client = type(error).__module__.split(".")[0] in _CLIENTS or isinstance(error, OSError)
        if not (remote and client):
            raise
        place = f" or {store.url}" if store is not None else ""
        raise UnreachableError(
            f"{config.data.path or 'the log'}{place} does not answer: {type(error).__name__}: {error}",
            hint="the same command again once it does; nothing half-written was kept",
        ) from error


def _is_remote(url: str) -> bool:
    return "://" in url and not url.startswith("file://")


def missing_data(path: str) -> DataError:
    """The error for a ``data.path`` that leads nowhere."""
    return DataError(
        f"nothing exists at data.path={path}, expected a file, a directory or a glob that matches files",
        hint="data.path=<file, directory or glob>",
    )


def find_files(path: str) -> Files:
    """Files at ``path`` sorted by name, hidden ones (starting with . or _) left out; DataError if none."""
    try:
        fs, root = fsspec.core.url_to_fs(path)
    except (ValueError, ImportError) as error:
        raise DataError(f"data.path={path} cannot be opened: {error}", hint="data.path=<a supported URL>") from None
    fs.invalidate_cache()  # a listing from before the day was delivered
    if fsspec.core.has_magic(root):
        paths = [name for name in fs.glob(root) if not fs.isdir(name)]
    elif fs.isdir(root):
        paths = fs.find(root)
    else:
        paths = [root] if fs.exists(root) else []
    if len(paths) > 1 or fs.isdir(root):
        paths = sorted(name for name in paths if name.rsplit("/", 1)[-1][0] not in "._")
    if not paths:
        raise missing_data(path)
    common = _common_folder(paths)
    return Files(fs, paths, [name[len(common) :] for name in paths], sum(fs.info(name)["size"] for name in paths))


def _common_folder(paths: list[str]) -> str:
    folders = [name.rsplit("/", 1)[0] + "/" if "/" in name else "" for name in paths]
    common = min(folders, key=len)
    while not all(folder.startswith(common) for folder in folders):
        common = common.rstrip("/").rpartition("/")[0] + "/"
    return common


class Source(Protocol):
    """A part of a log, small enough to be handed to another process: it is read where ``blocks`` is called."""

    def blocks(self) -> Iterator[Block]:
        """The rows in order, in blocks of about ``ingest.block_mib``."""

    def parts(self) -> Sequence[Part]:
        """The source in parts that can be read by themselves."""


class Part(Protocol):
    """What one process reads. ``is_later``: its file has a part before it, and it numbers its lines from 1.

    ``lines_before``: lines of its file that are no rows, before the first one.
    """

    @property
    def is_later(self) -> bool: ...

    @property
    def lines_before(self) -> int: ...

    def blocks(self) -> Iterator[Block]:
        """The rows in order, in blocks of about ``ingest.block_mib``."""


class WholePart:
    """A source that is its only part."""

    is_later: bool = False
    lines_before: int = 0

    def parts(self) -> list[Self]:
        """Itself."""
        return [self]


@dataclass(frozen=True)
class FrameSource(WholePart):
    """Raw rows that are there already."""

    rows: pl.DataFrame
    label: str

    def blocks(self) -> Iterator[Block]:
        """All rows at once."""
        yield RawBlock(frame=self.rows, file=self.label, lines=np.arange(1, self.rows.height + 1))


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


@contextmanager
def readable(label: str) -> Iterator[None]:
    """Turn what a damaged or locked file raises into a DataError that names it."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError, lzma.LZMAError) as error:
        raise DataError(f"{label} is damaged or cut off: {error}", hint="fetch the file again") from None
    except pa.ArrowInvalid as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{label} is not a readable Parquet file: {reason}", hint="data.format=csv, if it is text"
        ) from None
    except PermissionError:
        raise DataError(f"{label} may not be read", hint="grant read permission on data.path") from None


@contextmanager
def decompressed(source: BinaryIO, path: str) -> Iterator[BinaryIO]:
    """The bytes of a .gz or .zst file, of any other as they are."""
    if path.endswith(".gz"):
        with gzip.open(source, "rb") as stream:
            yield cast(BinaryIO, stream)
    elif path.endswith((".zst", ".zstd")):
        with zstandard.ZstdDecompressor().stream_reader(source, read_across_frames=True) as stream:
            yield cast(BinaryIO, stream)
    else:
        yield source


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


def counted_lines(stream: BinaryIO, enough: int) -> int:
    """Lines that are not blank at the end of ``stream``, counted until there are ``enough``."""
    lines, open_line = 0, False
    while lines < enough and (block := stream.read(1 << 22)):
        lines += block.count(b"\n")
        open_line = not block.endswith(b"\n")
    return lines + open_line
