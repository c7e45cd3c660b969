"""A version of a Delta Lake table: which of its files count, what rows of them are deleted, which day they hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from functools import cached_property, partial
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

MOST_BACK = 1000  # versions to search for one that has the files of a key
# Table features that change how a table is read and that this reader knows (Delta protocol, "Reader Features").
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


def _open_file(uri: str, options: dict[str, str], path: str) -> BinaryIO:
    # Use deltalake's own client, which knows the storage options; Arrow's file systems name them differently.
    files: Any = DeltaStorageHandler(uri, options)
    return opened(path, lambda: PyFileSystem(files).open_input_file(path))


class DeltaSnapshot(TableSnapshot):
    """The loaded version of ``table``."""

    def __init__(self, data: DataConfig, table: DeltaTable) -> None:
        self.data, self.table = data, table
        unknown = sorted({*(table.protocol().reader_features or ())} - _KNOWN)
        if unknown:
            raise DataError(
                f"{data.path} uses features of Delta Lake that are not supported: {', '.join(unknown)}",
                hint=f"ALTER TABLE ... DROP FEATURE {unknown[0]}, or a copy of the table without it",
            )
        self._actions = pa.table(table.get_add_actions(flatten=True)).sort_by("path").to_pylist()
        types = pa.schema(table.schema().to_arrow())
        columns = []
        for field in json.loads(table.schema().to_json())["fields"]:
            # In a table with column mapping, files keep the names that columns had when they were added.
            key = field["metadata"].get(_PHYSICAL, field["name"])
            columns.append(TableColumn(name=field["name"], type=types.field(field["name"]).type, key=key))
        version = f"version {table.version()} of {data.path}"
        super().__init__(data, columns, identity=str(table.metadata().id), version=version)

    def files(self, day: date | None) -> list[DataFile]:
        if day is None:
            return self._files
        wanted = day_number(day)
        files = []
        for file, days in zip(self._files, self._days, strict=True):
            # If the log has no days for a file, the file may hold any day.
            if days is None or days[0] <= wanted <= days[1]:
                files.append(file)
        return files

    def has_later(self, day: date) -> bool:
        return any(days is not None and days[1] > day_number(day) for days in self._days)

    @cached_property
    def _days(self) -> list[tuple[int, int] | None]:
        """Return the first and the last day of every file, by its partition or else by the log's statistics."""
        data = self.data
        column = data.day_column or data.timestamp
        if column is None:
            return [None] * len(self._actions)
        # Partitions and statistics use the logical or the physical name of a column, depending on the log's writer.
        names = {column}
        if column in self.columns:
            names.add(str(self.columns[column].key))
        days: list[tuple[int, int] | None] = []
        for action in self._actions:
            # Partitions are exact, statistics are bounds. A table may have statistics only for its first columns.
            bounds: tuple[Any, Any] | None = None
            for name in names:
                if f"partition.{name}" in action:
                    bounds = action[f"partition.{name}"], action[f"partition.{name}"]
                    break
                if action.get(f"max.{name}") is not None:
                    bounds = action.get(f"min.{name}"), action[f"max.{name}"]
                    break
            if bounds is None:
                days.append(None)
                continue
            timestamp = data.day_column is None
            days.append(days_between(*bounds, timestamp=timestamp, zone=data.time_zone, form=data.time_format))
        return days

    @cached_property
    def _files(self) -> list[DataFile]:
        keys = {str(column.key): column.name for column in self.columns.values()}
        vectors = self._vectors()
        files = []
        for action in self._actions:
            path = unquote(action["path"])
            if "://" in path:
                raise DataError(
                    f"{self.data.path} refers to a file elsewhere, {path}, as shallow clones do: this is not supported",
                    hint="data.path=<the table that was cloned>, or a deep clone",
                )
            constants = {}
            for name, value in action.items():
                if name.startswith("partition."):
                    name = name.removeprefix("partition.")
                    constants[keys.get(name, name)] = value
            rows, deleted, vector = action.get("num_records") or 0, None, ""
            # The same file has other rows with another deletion vector, so the vector is part of its mark.
            if path in vectors:
                rows -= len(vectors[path])
                # Keep the vector as bytes, since a file is sent to other processes.
                packed = vectors[path].tobytes()
                deleted, vector = partial(np.frombuffer, packed, np.int64), hashlib.sha256(packed).hexdigest()
            files.append(
                DataFile(
                    path=path,
                    mark=f"{action['path']}|{action['size_bytes']}|{vector}",
                    bytes=action["size_bytes"],
                    rows=rows,
                    open=partial(_open_file, str(self.table.table_uri), dict(self.data.options), path),
                    constants=constants,
                    deleted=deleted,
                )
            )
        return files

    def _vectors(self) -> dict[str, np.ndarray]:
        """Return the rows that deletion vectors remove, by the file's path."""
        if "deletionVectors" not in (self.table.protocol().reader_features or ()):
            return {}
        root = str(self.table.table_uri).rstrip("/") + "/"
        vectors = {}
        for batch in pa.RecordBatchReader.from_stream(self.table.deletion_vectors()):
            for path, keep in zip(batch.column("filepath"), batch.column("selection_vector"), strict=True):
                # These addresses are absolute, while those in the log are relative to the table.
                name = unquote(path.as_py()).removeprefix("file://").removeprefix(root.removeprefix("file://"))
                kept = keep.values.to_numpy(zero_copy_only=False)
                vectors[name] = np.flatnonzero(~kept.astype(bool)).astype(np.int64)
        return vectors


def open_table(data: DataConfig, mark: str) -> DeltaSnapshot:
    """Return the version that ``data.snapshot`` names, or the newest; with ``mark``, the newest that has its files."""
    with answering(data):
        table = DeltaTable(data.path or "", storage_options=dict(data.options) or None)
        if data.snapshot is not None:
            number = snapshot_number(data, "the number of a version of a Delta Lake table", table.version())
            try:
                table.load_as_version(number)
            except DeltaError as error:
                raise DataError(
                    f"{data.path} has no version {number}, or none any more; the newest is {table.version()}: "
                    f"{error_message(error)}",
                    hint="data.snapshot=null reads the newest",
                ) from None
        current, number = DeltaSnapshot(data, table), table.version()

        def earlier(back: int) -> DeltaSnapshot | None:
            try:
                table.load_as_version(number - back)
            except (DeltaError, OverflowError):
                # The log of that version was cleaned up, or the version never existed.
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
        # PermissionError is an OSError, too, but waiting does not help.
        raise
    except OSError as error:
        raise UnreachableError(
            f"{data.path} does not answer: {error_message(error)}",
            hint="run the same command once it answers; data.options are the storage options of deltalake",
        ) from error
