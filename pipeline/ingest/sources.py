"""Raw logs as blocks: files on any fsspec URL, compressed or not, text or Parquet."""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO, cast

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


def file_blocks(config: Config, spec: DataSpec, files: Files) -> Iterator[RawBlock]:
    """Every file's rows in blocks of about ``ingest.block_mib`` MiB of uncompressed data."""
    block_bytes = config.ingest.block_mib * BLOCK_UNIT
    for path, label in zip(files.paths, files.labels, strict=True):
        with readable(label), files.fs.open(path, "rb") as source:
            if config.data.format == "parquet":
                yield from _parquet_blocks(source, label, spec, block_bytes)
            else:
                with decompressed(source, path) as stream:
                    yield from _text_file_blocks(stream, label, config.data, spec, block_bytes)


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


def _text_file_blocks(
    stream: BinaryIO, label: str, data: DataConfig, spec: DataSpec, block_bytes: int
) -> Iterator[RawBlock]:
    buffered = io.BufferedReader(cast(io.RawIOBase, stream), 1 << 20)
    start = buffered.peek(4)[:4]
    if start == b"PAR1":
        raise DataError(f"{label} is a Parquet file, expected text", hint="data.format=parquet")
    if start.startswith(b"\xef\xbb\xbf"):
        buffered.read(3)
    has_header = data.format == "csv" and data.header
    layout = text_layout(data, buffered.readline() if has_header else None)
    if has_header and not any(layout.names) and not buffered.peek(1 << 20).strip():
        return
    require_columns(spec, layout.names, label, header=has_header)
    wanted = list(spec.columns)
    for block, first_line in text_blocks(cast(BinaryIO, buffered), block_bytes, 2 if has_header else 1):
        frame, lines, rejects = read_lines(block, first_line, layout)
        yield RawBlock(frame=frame.select(wanted), file=label, lines=lines, rejects=rejects)


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
