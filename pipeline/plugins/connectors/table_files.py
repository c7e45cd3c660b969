"""Tables that are Parquet files and a record of which of them count: what Delta Lake and Iceberg have in common.

A file never changes once it is written, so the names of the files say what a snapshot holds.
"""

from __future__ import annotations

import hashlib
import io
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, BinaryIO, cast

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.data import DataConfig
from pipeline.core.errors import ConfigError, DataError, UnreachableError
from pipeline.ingest.formats.columnar import WHOLE, Parquet, Part, check_types, frame_of, row_groups
from pipeline.ingest.schema import DataSpec, require_columns
from pipeline.ingest.schema_of_config import data_spec
from pipeline.ingest.sources import PART_BLOCKS, Block, RawBlock, Source, readable
from pipeline.specs.connector import Delivery, Excerpt, Snapshot

EXCERPT_FILES = 8  # number of files that an excerpt reads
_DECORATION = re.compile("\x1b\\[[0-9;]*m|\u21b3")
_FIELD_ID = b"PARQUET:field_id"
_STRINGS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """A table's column: its current ``name`` and ``type``, and its key in files, a name or a field number."""

    name: str
    type: pa.DataType
    key: str | int


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """A Parquet file of a table, small enough to be handed to another process.

    ``path``: the name in messages. ``mark``: differs if other rows of the file count. ``rows``: the table's record of
    their number. ``open``: opens its bytes. ``constants``: values of columns that all its rows share and the file
    lacks. ``deleted``: the rows, from 0 on, that do not count; None if all do.
    """

    path: str
    mark: str
    bytes: int
    rows: int
    open: Callable[[], BinaryIO]
    constants: dict[str, Any]
    deleted: Callable[[], np.ndarray] | None = None

    def tables(
        self, columns: Sequence[TableColumn], block_bytes: int, part: Part = WHOLE, first: int = 0
    ) -> Iterator[tuple[pa.Table, np.ndarray]]:
        """Yield blocks of the rows that count, as ``columns``, with their numbers in the file from 1 on.

        ``part`` selects row groups of the file, which have ``first`` rows before them.
        """
        gone = np.asarray(self.deleted(), dtype=np.int64) if self.deleted is not None else None
        with readable(self.path), self.open() as stream:
            # Map the file's columns by name, and by field number if the file has field numbers.
            physical: dict[str | int, str] = {}
            numbers: dict[str | int, str] = {}
            for column in pq.ParquetFile(stream).schema_arrow:
                physical[column.name] = column.name
                if column.metadata and _FIELD_ID in column.metadata:
                    numbers[int(column.metadata[_FIELD_ID])] = column.name
            physical |= numbers
            names: dict[str, str | None] = {}
            for column in columns:
                if column.name not in self.constants:
                    names[column.name] = physical.get(column.key)
            wanted = [name for name in names.values() if name is not None]
            if not wanted:
                # Any column tells how many rows there are.
                wanted = list(physical.values())[:1]
            for batch in Parquet().batches(stream, wanted, block_bytes, part):
                rows = np.arange(first, first + batch.num_rows)
                table = pa.table({column.name: self._values(batch, column, names) for column in columns})
                if gone is not None:
                    # Select the deleted rows of this batch first: searching all deleted rows of the file for each batch
                    # is slow.
                    kept = ~np.isin(rows, gone[(gone >= first) & (gone < first + batch.num_rows)])
                    table, rows = table.filter(pa.array(kept)), rows[kept]
                first += batch.num_rows
                yield table, rows + 1

    def _values(self, batch: pa.RecordBatch, column: TableColumn, names: dict[str, str | None]) -> pa.Array:
        # The values come from the file or the partition; they are null if the column was added later.
        if column.name in self.constants:
            return pa.repeat(pa.scalar(self.constants[column.name], column.type), batch.num_rows)
        name = names[column.name]
        if name is None:
            return pa.nulls(batch.num_rows, column.type)
        values = batch.column(name)
        one, other = values.type, column.type
        # Values of both types become the same rows. Elements of lists keep the file's type.
        text = any(is_text(one) for is_text in _STRINGS) and any(is_text(other) for is_text in _STRINGS)
        if one.equals(other) or text or pa.types.is_nested(one) or pa.types.is_dictionary(one):
            return values
        # The column's type may have been widened since the file was written.
        return values.cast(other)


class _TimedStream(io.RawIOBase):
    """A file whose ``stream`` may fall silent, which raises UnreachableError; Arrow would see a damaged file."""

    def __init__(self, path: str, stream: BinaryIO) -> None:
        self._path, self._stream = path, stream

    def read(self, size: int | None = -1) -> bytes:
        with _answered(self._path):
            if size is None or size < 0:
                return bytes(self._stream.read())
            return bytes(self._stream.read(size))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with _answered(self._path):
            self._stream.seek(offset, whence)
            return self._stream.tell()

    def tell(self) -> int:
        return self._stream.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


def opened(path: str, open: Callable[[], BinaryIO]) -> BinaryIO:
    """Return what ``open`` returns, the bytes of ``path``; UnreachableError if the store does not answer, now or later.

    A table's own client has already retried by then.
    """
    with _answered(path):
        return cast(BinaryIO, _TimedStream(path, open()))


@contextmanager
def _answered(path: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, PermissionError):
        # Both are OSErrors, but waiting does not help.
        raise
    except OSError as error:
        raise UnreachableError(
            f"{path} cannot be read: {error_message(error)}", hint="run the same command once its store answers"
        ) from error


def snapshot_number(data: DataConfig, what: str, newest: object) -> int:
    """Return the number that ``data.snapshot`` is.

    Raises:
        ConfigError: It is not ``what``; the hint has the ``newest``.
    """
    text = data.snapshot or ""
    if not text.isdigit():
        raise ConfigError(
            f"data.snapshot is {text!r}, expected {what}", hint=f"data.snapshot={newest}, or null for the newest"
        )
    return int(text)


def error_message(error: Exception) -> str:
    """Return a client's message on one line, without the colours and arrows of a terminal."""
    return " ".join(_DECORATION.sub(" ", str(error)).split())


@dataclass(frozen=True, kw_only=True)
class TableFileSource(Source):
    """A file of ``version``, a snapshot in words; or its row groups ``part``, with ``first`` rows before them."""

    file: DataFile
    columns: tuple[TableColumn, ...]
    spec: DataSpec
    block_bytes: int
    version: str
    part: Part = WHOLE
    first: int = 0
    decodes = True

    def parts(self) -> list[Source]:
        """Split a large file into runs of row groups; a small file stays whole."""
        if self.file.bytes <= self.block_bytes:
            return [self]
        with present(self.file.path, self.version), readable(self.file.path), self.file.open() as stream:
            runs = row_groups(stream, PART_BLOCKS * self.block_bytes)
        return [replace(self, part=(start, stop), first=first) for start, stop, first in runs]

    def blocks(self) -> Iterator[Block]:
        """Yield the rows that count.

        Raises:
            DataError: The file is gone.
        """
        file = self.file
        with present(file.path, self.version):
            for table, lines in file.tables(self.columns, self.block_bytes, self.part, self.first):
                frame = frame_of(table, list(self.spec.columns))
                yield RawBlock(frame=frame, file=file.path, lines=lines, place=file.path)


@contextmanager
def present(path: str, version: str) -> Iterator[None]:
    """Turn a missing file of ``version`` into a DataError that says why files of tables go missing."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(
            f"{path} is gone, a file of {version}: the table was cleaned up (vacuum, expired snapshots) while it was "
            "read or before",
            hint="run the same command again, without data.snapshot: it reads the newest snapshot; keep the files of "
            "old snapshots for as long as an ingestion takes",
        ) from None


class TableSnapshot(Snapshot):
    """A snapshot of a table of Parquet files. ``identity`` distinguishes the table from every other one."""

    def __init__(self, data: DataConfig, columns: Sequence[TableColumn], *, identity: str, version: str) -> None:
        self.data, self.columns, self.version = data, {column.name: column for column in columns}, version
        # The mark covers all that decides the rows: the files of ``data.day``, their deleted rows, and the types of the
        # columns.
        marks = set[str]()
        for day in data.days or (None,):
            marks.update(file.mark for file in self.files(day))
        types = []
        for name in data_spec(data).columns:
            # A missing column is not an error yet: ``sources`` reports all missing columns at once.
            if name in self.columns:
                types.append(f"{name}: {self.columns[name].type}")
        text = "\n".join([identity, *types, *sorted(marks)])
        self.mark = f"{data.format} {hashlib.sha256(text.encode()).hexdigest()[:32]}"

    @abstractmethod
    def files(self, day: date | None) -> list[DataFile]:
        """Return the files that may hold rows of ``day``, sorted by path."""

    @abstractmethod
    def has_later(self, day: date) -> bool:
        """Return whether some file holds rows of a day after ``day``."""

    def delivery(self, day: date | None) -> Delivery:
        files = self.files(day)
        size = sum(file.bytes for file in files)
        rows = sum(file.rows for file in files)
        # Compute this only if needed, since Iceberg makes another plan for it.
        later = day is not None and self.data.watermark.later_rows and self.has_later(day)
        return Delivery(parts=len(files), bytes=size, rows=rows, later=later)

    def sources(self, day: date | None, spec: DataSpec, block_bytes: int) -> list[Source]:
        require_columns(spec, list(self.columns), self.version, header=False)
        read = tuple(self.columns[name] for name in spec.columns)
        # Check the types of the table, not of its files: older types in files are cast to them.
        check_types(spec, pa.schema([(column.name, column.type) for column in read]), self.version)
        sources: list[Source] = []
        for file in self.files(day):
            source = TableFileSource(file=file, columns=read, spec=spec, block_bytes=block_bytes, version=self.version)
            sources.append(source)
        return sources

    def excerpt(self, rows: int) -> Excerpt:
        files = self.files(None)
        # Spread the files evenly, since neighbouring files may be of the same day or partition and show little of the
        # table.
        chosen = [files[round(at)] for at in np.linspace(0, len(files) - 1, min(len(files), EXCERPT_FILES))]
        frames = []
        for file in chosen:
            with present(file.path, self.version):
                left = rows // len(chosen)
                for table, _ in file.tables(list(self.columns.values()), 16 << 20):
                    frames.append(frame_of(table.slice(0, left), list(self.columns)))
                    left -= table.num_rows
                    if left <= 0:
                        break
        frame = pl.concat(frames, how="vertical_relaxed") if frames else pl.DataFrame()
        return Excerpt(frame=frame, total=sum(file.rows for file in files), parts=len(files))


def days_between(
    low: Any, high: Any, *, timestamp: bool, zone: str | None, form: str | None = None
) -> tuple[int, int] | None:
    """Return the days, as numbers, of the least and the largest value of a column; None if they are unknown.

    ``timestamp``: numbers are times, not days. The days are those that ingestion gives such values in ``zone``.
    """
    from pipeline.ingest.times import day_of
    from pipeline.ingest.values import RejectedRows, strings_of

    values = pl.Series("day", [low, high])
    text = strings_of(values)
    if form is not None and not (values.dtype.is_numeric() or values.dtype.is_temporal()):
        # Such text does not sort by day.
        return None
    if values.has_nulls() or (values.dtype == pl.String and text.str.contains("-").n_unique() > 1):
        # Text in two formats does not sort by day.
        return None
    rejected = RejectedRows(np.arange(2))
    days = day_of(values, text, timestamp=timestamp, rejected=rejected, zone=zone)
    # Text with UTC offsets does not sort by time.
    around = int(zone is not None and values.dtype == pl.String)
    if rejected.bad.any():
        return None
    return int(days[0]) - around, int(days[1]) + around
