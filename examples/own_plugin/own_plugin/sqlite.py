"""Connector ``sqlite``: a table of an SQLite database, ``data.format=sqlite data.options.table=<table>``."""

from __future__ import annotations

import hashlib
import sqlite3
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, DataError
from pipeline.specs.connector import Connector, Delivery, Excerpt, Snapshot


class Sqlite(Connector):
    """``data.path`` is the database's file, ``data.options.table`` the table."""

    name = "sqlite"
    doc = "a table of an SQLite database at `data.path`; `data.options.table` names it."
    extra, package, module = "sqlite", "sqlite3", "sqlite3"
    options = {"table": "the table"}
    on_disk = True

    def check(self, data: Any, path: str) -> None:
        """The name of the table must be one, as it becomes part of a query."""
        table = data.options.get("table", "")
        if not table.isidentifier():
            raise ConfigError(
                f"{path}.options.table is {table!r}, expected the name of a table", hint=f"{path}.options.table=clicks"
            )

    def opened(self, data: Any, mark: str) -> Snapshot:
        """Open the table as it is now; SQLite keeps no earlier ones."""
        if not Path(data.path).is_file():
            raise DataError(f"data.path={data.path} is no file", hint="data.path=clicks.db")
        return Table(Path(data.path), data.options["table"])


class Table(Snapshot):
    """All rows of a table."""

    def __init__(self, file: Path, table: str) -> None:
        self.file, self.table = file, table
        # The content decides the mark: a copy of the same rows is the same log, an edited row is another one.
        self.mark = f"sqlite {hashlib.sha256(file.read_bytes()).hexdigest()}"
        self.version = f"{file.name} as it is"
        try:
            connection = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
            with closing(connection):
                (self.rows,) = connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()
        except sqlite3.Error as error:
            raise DataError(f"{file} cannot be read: {error}", hint="data.options.table=<a table of it>") from None

    def delivery(self, day: date | None) -> Delivery:
        """Count the rows of all days: ingestion takes those of ``day`` out of them."""
        return Delivery(parts=1, bytes=self.file.stat().st_size, rows=self.rows)

    def sources(self, day: date | None, spec: Any, block_bytes: int) -> list[Any]:
        """Read the table as one part."""
        from own_plugin.sqlite_rows import TableSource

        return [TableSource(file=self.file, table=self.table, columns=tuple(spec.columns))]

    def excerpt(self, rows: int) -> Excerpt:
        """Read the first ``rows``."""
        from own_plugin.sqlite_rows import frames

        frame = next(frames(self.file, f"SELECT * FROM {self.table} LIMIT {rows}", rows))
        return Excerpt(frame=frame, total=self.rows, parts=1)


SQLITE = Sqlite()
