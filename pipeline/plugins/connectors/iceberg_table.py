"""A snapshot of an Iceberg table: which of its files count, which rows of them are deleted, which may hold a day."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import orc
from pyiceberg import expressions
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import (
    AuthorizationExpiredError,
    ForbiddenError,
    NoSuchNamespaceError,
    NoSuchTableError,
    NotInstalledError,
    OAuthError,
    RESTError,
    UnauthorizedError,
)
from pyiceberg.expressions import AlwaysTrue, BooleanExpression
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile as IcebergFile
from pyiceberg.manifest import FileFormat
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, Table
from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
from pyiceberg.table.puffin import PuffinFile
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import DateType, IntegerType, LongType, StringType, TimestampType, TimestamptzType

from pipeline.config.data import DataConfig
from pipeline.core.errors import ConfigError, DataError, NightjarError, UnreachableError
from pipeline.core.retrying import passes, retried
from pipeline.ingest.days import day_number
from pipeline.ingest.times import end_of_day
from pipeline.plugins.connectors.table_files import (
    DataFile,
    TableColumn,
    TableSnapshot,
    error_message,
    opened,
    snapshot_number,
)
from pipeline.specs.connector import newest

_where: Any = expressions  # pyiceberg's annotations leave out the forms that its documentation has
_REFUSALS = (UnauthorizedError, ForbiddenError, OAuthError, AuthorizationExpiredError)
_CLIENTS = ("sqlalchemy", "thrift")  # client libraries of catalogs, besides those of a store
MOST_BACK = 1000  # snapshots to search for one that has the files of a key


def _open_file(io: FileIO, path: str) -> BinaryIO:
    return opened(path, lambda: cast(BinaryIO, io.new_input(path).open()))


def _deleted_rows(io: FileIO, path: str, delete_files: Sequence[IcebergFile]) -> np.ndarray:
    """Return the rows that delete files remove from the file at ``path``: positions, or vectors of version 3."""
    rows = [np.zeros(0, np.int64)]
    for file in delete_files:
        with _open_file(io, file.file_path) as stream:
            # Column names are those of the format's specification, "Delete Formats".
            if file.file_format == FileFormat.PUFFIN:
                for vector in deletion_vectors_from_puffin_file(PuffinFile(stream.read())):
                    if vector.referenced_data_file == path:
                        rows.append(vector.to_vector().to_numpy().astype(np.int64))
                continue
            if file.file_format == FileFormat.PARQUET:
                table = pq.read_table(stream, columns=["file_path", "pos"])
            elif file.file_format == FileFormat.ORC:
                table = orc.read_table(stream, columns=["file_path", "pos"])
            else:
                raise DataError(
                    f"{file.file_path}, which deletes rows of {path}, is {file.file_format.name}, expected "
                    "Parquet, ORC or Puffin",
                    hint="rewrite the position deletes: CALL <catalog>.system.rewrite_position_delete_files(...)",
                )
        rows.append(table.filter(pc.field("file_path") == path).column("pos").to_numpy().astype(np.int64))
    return np.unique(np.concatenate(rows))


class IcebergSnapshot(TableSnapshot):
    """Snapshot ``number`` of ``table``; None for a table that was never written to."""

    def __init__(self, data: DataConfig, table: Table, number: int | None) -> None:
        self.data, self.table, self.number = data, table, number
        types = schema_to_pyarrow(self._schema, include_field_ids=False)
        columns = []
        for field in self._schema.fields:
            # Find columns by their field id, since a file keeps the names of the time when it was written.
            columns.append(TableColumn(name=field.name, type=types.field(field.name).type, key=field.field_id))
        self._planned: dict[date | None, list[DataFile]] = {}
        identity = str(table.metadata.table_uuid)
        super().__init__(data, columns, identity=identity, version=f"snapshot {number} of {data.path}")

    @property
    def _schema(self) -> Schema:
        """The columns as they were in this snapshot."""
        if self.number is None:
            return self.table.schema()
        return cast(Schema, self._scan(AlwaysTrue()).projection())

    def _scan(self, where: BooleanExpression) -> Any:
        return self.table.scan(row_filter=where, snapshot_id=self.number)

    def files(self, day: date | None) -> list[DataFile]:
        if day not in self._planned:
            tasks: list[FileScanTask] = []
            if self.number is not None:
                tasks = self._tasks(AlwaysTrue() if day is None else self._of(day))
            # Sort by path, since the order of a plan may differ from call to call.
            self._planned[day] = sorted(map(self._file, tasks), key=lambda file: file.path)
        return self._planned[day]

    def has_later(self, day: date) -> bool:
        """Return whether a plan for all later days has files."""
        return self.number is not None and bool(self._tasks(self._of(day + timedelta(days=1), on=True)))

    def _tasks(self, where: BooleanExpression) -> list[FileScanTask]:
        try:
            with answering(self.data):
                return retried(lambda: list(self._scan(where).plan_files()), f"planning {self.version}")
        except (NotImplementedError, ValueError) as error:
            # pyiceberg has no error class for deletes that it cannot read, so check the message.
            if "equality deletes" not in str(error):
                raise
            raise DataError(
                f"{self.version} has equality deletes, which pyiceberg does not read",
                hint="rewrite the table's data files first: CALL <catalog>.system.rewrite_data_files(...)",
            ) from None

    def _of(self, first: date, *, on: bool = False) -> BooleanExpression:
        """Return the condition for rows of the day ``first``; with ``on``, for that day and all later ones."""
        name = self.data.day_column or self.data.timestamp or ""
        if name not in self.columns:
            return AlwaysTrue()  # ``sources`` reports the missing column
        kind, zone, one = self._schema.find_type(name), self.data.time_zone, timedelta(days=1)
        low, start = int(end_of_day(first - one, zone)), first.isoformat()
        # If ``on`` asks for all later days as well, there is no upper bound.
        high: int | None = None
        end: str | None = None
        if not on:
            high, end = int(end_of_day(first, zone)), (first + one).isoformat()
        if isinstance(kind, DateType):
            return _between(name, start, end)
        if isinstance(kind, TimestampType):
            return _between(name, f"{start}T00:00:00", end and f"{end}T00:00:00")
        if isinstance(kind, TimestamptzType):
            start = datetime.fromtimestamp(low, UTC).isoformat()
            return _between(name, start, high and datetime.fromtimestamp(high, UTC).isoformat())
        packed = start.replace("-", "")
        if isinstance(kind, StringType) and self.data.time_format is not None:
            return AlwaysTrue()  # such text does not sort by day
        if isinstance(kind, StringType):
            around = one if zone else timedelta()  # text with UTC offsets does not sort by time
            begin, end = (first - around).isoformat(), end and (first + one + around).isoformat()
            return _where.Or(_between(name, begin, end), _packed(name, packed, on))
        if not isinstance(kind, IntegerType | LongType):
            return AlwaysTrue()
        # A whole number may be days since 1970 or YYYYMMDD; in a timestamp column it may also be a time.
        number = day_number(first)
        after = None if on else number + 1
        whole = _where.Or(_between(name, number, after), _packed(name, int(packed), on))
        if self.data.day_column is not None:
            return whole
        # Only seconds since 1970 fit into 32 bits.
        units = (1,) if isinstance(kind, IntegerType) else (1, 10**3, 10**6, 10**9)
        for unit in units:
            whole = _where.Or(whole, _between(name, low * unit, high and high * unit))
        return whole

    def _file(self, task: FileScanTask) -> DataFile:
        file, io = task.file, self.table.io
        if file.file_format != FileFormat.PARQUET:
            raise DataError(
                f"{file.file_path} of {self.version} is {file.file_format.name}, expected Parquet",
                hint="write.format.default=parquet for the table, and rewrite its data files",
            )
        # Collect the values of the columns that partition the table: files that came from Hive lack these columns.
        constants = {}
        for place, field in enumerate(self.table.metadata.specs()[file.spec_id].fields):
            name = self._schema.find_column_name(field.source_id)
            if not isinstance(field.transform, IdentityTransform) or name not in self.columns:
                continue
            value, kind = file.partition[place], self.columns[name].type
            # Manifests store days or microseconds since 1970, which Arrow converts only by a cast.
            if isinstance(value, int) and pa.types.is_temporal(kind):
                whole = pa.int32() if pa.types.is_date32(kind) else pa.int64()
                value = pa.array([value], whole).cast(kind)[0].as_py()
            constants[name] = value
        # The same file has other rows with other delete files, so these are part of its mark.
        deletes = tuple(sorted(task.delete_files, key=lambda each: each.file_path))
        marks = [f"{each.file_path}|{each.file_size_in_bytes}" for each in deletes]
        deleted = partial(_deleted_rows, io, file.file_path, deletes) if deletes else None
        return DataFile(
            path=file.file_path.removeprefix(f"{self.table.location()}/"),
            bytes=file.file_size_in_bytes,
            mark="|".join([file.file_path, str(file.file_size_in_bytes), *marks]),
            rows=file.record_count,
            open=partial(_open_file, io, file.file_path),
            constants=constants,
            deleted=deleted,
        )


def _between(name: str, low: Any, high: Any) -> BooleanExpression:
    """Return the condition that a value is at least ``low`` and, if given, below ``high``."""
    at_least: BooleanExpression = _where.GreaterThanOrEqual(name, low)
    if high is None:
        return at_least
    return _where.And(at_least, _where.LessThan(name, high))  # type: ignore[no-any-return]


def _packed(name: str, value: Any, on: bool) -> BooleanExpression:
    """Return the condition for a day as YYYYMMDD; with ``on``, also for later days, which compare as larger."""
    return _where.GreaterThanOrEqual(name, value) if on else _where.EqualTo(name, value)


def open_table(data: DataConfig, mark: str) -> IcebergSnapshot:
    """Return the snapshot that ``data.snapshot`` names, or the newest; with ``mark``, the newest that has its files."""
    with answering(data):
        table = retried(lambda: _table(data), f"opening {data.path}")
        # List the snapshots from the newest on, each followed by its parent, up to a parent that has expired.
        numbers: list[int] = []
        if data.snapshot is not None:
            numbers.append(_number(table, data))
        else:
            snapshot = table.current_snapshot()
            while snapshot is not None:
                numbers.append(snapshot.snapshot_id)
                parent = snapshot.parent_snapshot_id
                snapshot = table.snapshot_by_id(parent) if parent is not None else None
        current = IcebergSnapshot(data, table, next(iter(numbers), None))

        def earlier(back: int) -> IcebergSnapshot | None:
            if back >= len(numbers):
                return None
            return IcebergSnapshot(data, table, numbers[back])

        found = newest(current, earlier, mark, min(MOST_BACK, max(len(numbers), 1)) + 1)
    if not isinstance(found, IcebergSnapshot):
        raise DataError(
            f"no snapshot of {data.path} that is still there has the files that this dataset is made of: they were "
            "replaced, and that snapshot expired",
            hint="run the same command again: it reads the newest snapshot",
        )
    return found


def _table(data: DataConfig) -> Table:
    catalog, _, name = (data.path or "").partition(".")
    try:
        return load_catalog(catalog, **data.options).load_table(name)
    except (NoSuchTableError, NoSuchNamespaceError):
        raise DataError(
            f"data.path={data.path}: catalog {catalog!r} has no table {name!r}",
            hint="data.path=<catalog>.<namespace>.<table>",
        ) from None
    except ValueError as error:  # the configuration does not describe this catalog
        raise ConfigError(
            f"data.path={data.path}: catalog {catalog!r} is not configured: {error}",
            hint=f"describe it in ~/.pyiceberg.yaml, or data.options={{type: sql, uri: ...}}; {catalog} is its name",
        ) from None


def _number(table: Table, data: DataConfig) -> int:
    # A table that was never written to has no snapshot.
    newest = getattr(table.current_snapshot(), "snapshot_id", "null")
    number = snapshot_number(data, "the id of a snapshot of an Iceberg table", newest)
    if table.snapshot_by_id(number) is None:
        raise DataError(
            f"{data.path} has no snapshot {number}, or none any more: it expired",
            hint="data.snapshot=null reads the newest",
        )
    return number


@contextmanager
def answering(data: DataConfig) -> Iterator[None]:
    """Turn what catalogs raise into errors that say what to do; an UnreachableError if they do not answer."""
    try:
        yield
    except (NightjarError, FileNotFoundError, PermissionError):
        raise
    except NotInstalledError as error:
        raise ConfigError(
            f"the catalog of {data.path} needs a package: {error}", hint="pip install what the message names"
        ) from None
    except _REFUSALS as error:
        raise DataError(
            f"the catalog of {data.path} refuses: {type(error).__name__}: {error_message(error)}",
            hint="its credentials are in .pyiceberg.yaml: token or credential, and the rights of that account",
        ) from None
    except Exception as error:
        # A catalog may be a database, whose driver's errors pass through pyiceberg. A ValueError is about a setting.
        client = type(error).__module__.partition(".")[0] in _CLIENTS and not isinstance(error, ValueError)
        if not (isinstance(error, RESTError | OSError) or client or passes(error)):
            raise
        raise UnreachableError(
            f"the catalog of {data.path} does not answer: {type(error).__name__}: {error_message(error)}",
            hint="run the same command once it answers; its address is in .pyiceberg.yaml or data.options",
        ) from error
