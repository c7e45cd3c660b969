"""A version of a Delta Lake table: which of its files count, what rows of them are deleted, which day they hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import Any, BinaryIO
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import PyFileSystem

from pipeline.config.data import DataConfig
from pipeline.core.errors import DataError, UnreachableError
from pipeline.ingest.days import day_number
from pipeline.plugins.connectors.table_files import (
    DataFile,
    TableColumn,
    TableSnapshot,
    days_between,
    error_message,
    opened,
    snapshot_number,
)
from pipeline.specs.connector import newest

MOST_BACK = 1000  # versions that are looked through for one that has the files of a key
# What tables may have switched on that changes how they are read: docs of the protocol, "Reader Features".
_KNOWN = {
    "deletionVectors",
    "timestampNtz",
    "columnMapping",
    "v2Checkpoint",
    "vacuumProtocolCheck",
    "typeWidening",
    "typeWidening-preview",
    "variantType",
    "variantType-preview",
}
_PHYSICAL = "delta.columnMapping.physicalName"


@dataclass(frozen=True)
class _OpenDelta:
    """Opens a file of the table at ``uri``, by deltalake's own client."""

    uri: str
    options: tuple[tuple[str, str], ...]
    path: str

    def __call__(self) -> BinaryIO:
        files: Any = DeltaStorageHandler(self.uri, dict(self.options))
        return opened(self.path, lambda: PyFileSystem(files).open_input_file(self.path))


@dataclass(frozen=True)
class _DeltaDeletes:
    """The rows of a deletion vector."""

    rows: bytes

    def __call__(self) -> np.ndarray:
        return np.frombuffer(self.rows, dtype=np.int64)


class DeltaSnapshot(TableSnapshot):
    """``table`` as loaded."""

    def __init__(self, data: DataConfig, table: DeltaTable) -> None:
        self.table = table
        _require_known(data, table)
        self._actions = pa.table(table.get_add_actions(flatten=True)).sort_by("path").to_pylist()
        number, identity = table.version(), str(table.metadata().id)
        self.data = data
        super().__init__(data, _columns(table), identity=identity, version=f"version {number} of {data.path}")

    def files(self, day: date | None) -> list[DataFile]:
        """By the partition's value of the day, or by the least and largest value of its column."""
        wanted = None if day is None else day_number(day)
        return [
            file
            for file, days in zip(self._files, self._days, strict=True)
            if wanted is None or days is None or days[0] <= wanted <= days[1]
        ]

    def has_later(self, day: date) -> bool:
        """By the largest values."""
        return any(days is not None and days[1] > day_number(day) for days in self._days)

    @cached_property
    def _days(self) -> list[tuple[int, int] | None]:
        column = self.data.day_column or self.data.timestamp
        if column is None:
            return [None] * len(self._actions)
        physical = next((each.key for each in _columns(self.table) if each.name == column), column)
        timestamp = self.data.day_column is None
        zone, form = self.data.time_zone, self.data.time_format
        names = {column, str(physical)}
        return [_days_of(each, names, timestamp=timestamp, zone=zone, form=form) for each in self._actions]

    @cached_property
    def _files(self) -> list[DataFile]:
        options = tuple(sorted(self.data.options.items()))
        keys = {str(column.key): column.name for column in _columns(self.table)}
        vectors = self._vectors()
        files = []
        for action in self._actions:
            path = unquote(action["path"])
            if "://" in path:
                raise DataError(
                    f"{self.data.path} refers to a file elsewhere, {path}, as shallow clones do: this is not supported",
                    hint="data.path=<the table that was cloned>, or a deep clone",
                )
            parts = {
                name.removeprefix("partition."): value
                for name, value in action.items()
                if name.startswith("partition.")
            }
            gone = vectors.get(path)
            deleted = None if gone is None else _DeltaDeletes(gone.tobytes())
            vector = "" if deleted is None else hashlib.sha256(deleted.rows).hexdigest()
            mark = f"{action['path']}|{action['size_bytes']}|{vector}"
            files.append(
                DataFile(
                    path=path,
                    mark=mark,
                    bytes=action["size_bytes"],
                    rows=(action.get("num_records") or 0) - (0 if gone is None else len(gone)),
                    open=_OpenDelta(str(self.table.table_uri), options, path),
                    constants={keys.get(name, name): value for name, value in parts.items()},
                    deleted=deleted,
                )
            )
        return files

    def _vectors(self) -> dict[str, np.ndarray]:
        """The rows that deletion vectors take out, by the file's path."""
        if "deletionVectors" not in (self.table.protocol().reader_features or ()):
            return {}
        root = str(self.table.table_uri).rstrip("/") + "/"
        vectors = {}
        for batch in pa.RecordBatchReader.from_stream(self.table.deletion_vectors()):
            for path, keep in zip(batch.column("filepath"), batch.column("selection_vector"), strict=True):
                name = unquote(path.as_py()).removeprefix("file://").removeprefix(root.removeprefix("file://"))
                kept = keep.values.to_numpy(zero_copy_only=False)
                vectors[name] = np.flatnonzero(~kept.astype(bool)).astype(np.int64)
        return vectors


def _days_of(
    action: dict[str, Any], names: set[str], *, timestamp: bool, zone: str | None, form: str | None
) -> tuple[int, int] | None:
    """The days of a file by what the log says of the day's column, called one of ``names``."""
    for name in names:
        if f"partition.{name}" in action:
            value = action[f"partition.{name}"]
            return days_between(value, value, timestamp=timestamp, zone=zone, form=form)
        if action.get(f"max.{name}") is not None:
            low, high = action.get(f"min.{name}"), action[f"max.{name}"]
            return days_between(low, high, timestamp=timestamp, zone=zone, form=form)
    return None


def _columns(table: DeltaTable) -> list[TableColumn]:
    """The table's columns, by the names that its files have."""
    types = pa.schema(table.schema().to_arrow())
    fields = json.loads(table.schema().to_json())["fields"]
    return [
        TableColumn(
            name=each["name"], type=types.field(each["name"]).type, key=each["metadata"].get(_PHYSICAL, each["name"])
        )
        for each in fields
    ]


def _require_known(data: DataConfig, table: DeltaTable) -> None:
    strange = sorted({*(table.protocol().reader_features or ())} - _KNOWN)
    if strange:
        raise DataError(
            f"{data.path} uses features of Delta Lake that are not supported: {', '.join(strange)}",
            hint=f"ALTER TABLE ... DROP FEATURE {strange[0]}, or a copy of the table without it",
        )


def open_table(data: DataConfig, mark: str) -> DeltaSnapshot:
    """The version that ``data.snapshot`` names, else the newest; with ``mark``, the newest that has its files."""
    with answering(data):
        table = DeltaTable(data.path or "", storage_options=dict(data.options) or None)
        if data.snapshot is not None:
            _load(table, data)
        current, number = DeltaSnapshot(data, table), table.version()

        def earlier(back: int) -> DeltaSnapshot | None:
            try:
                table.load_as_version(number - back)
            except (DeltaError, OverflowError):
                return None
            return DeltaSnapshot(data, table)

        snapshot = newest(current, earlier, mark, 1 if data.snapshot else min(MOST_BACK, number + 1))
    if not isinstance(snapshot, DeltaSnapshot):
        raise DataError(
            f"no version of {data.path} that is still there has the files that this dataset is made of: they were "
            "replaced, and the log of that version was cleaned up",
            hint="run the same command again: it reads the newest version",
        )
    return snapshot


def _load(table: DeltaTable, data: DataConfig) -> None:
    number = snapshot_number(data, "the number of a version of a Delta Lake table", table.version())
    try:
        table.load_as_version(number)
    except DeltaError as error:
        raise DataError(
            f"{data.path} has no version {number}, or none any more; the newest is {table.version()}: "
            f"{error_message(error)}",
            hint="data.snapshot=null reads the newest",
        ) from None


@contextmanager
def answering(data: DataConfig) -> Iterator[None]:
    """Turn what deltalake raises into errors that say what to do."""
    try:
        yield
    except TableNotFoundError:
        raise DataError(
            f"data.path={data.path} is no Delta Lake table: there is no _delta_log",
            hint="data.path=<the table's folder>, or data.format=parquet for plain files",
        ) from None
    except DeltaError as error:
        raise DataError(
            f"{data.path} cannot be read as a Delta Lake table: {error_message(error)}", hint="repair the table"
        ) from None
    except PermissionError:
        raise
    except OSError as error:
        raise UnreachableError(
            f"{data.path} does not answer: {error_message(error)}",
            hint="run the same command once it answers; data.options are the storage options of deltalake",
        ) from error
