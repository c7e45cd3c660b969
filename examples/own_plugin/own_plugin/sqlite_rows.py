"""The rows of a table as frames. Imported when rows are read, for settings are checked without Polars."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from pipeline.ingest.sources import Block, RawBlock, Source

BLOCK_ROWS = 50_000


def frames(file: Path, sql: str, rows: int) -> Iterator[pl.DataFrame]:
    """Yield what ``sql`` selects in frames of ``rows`` rows; one empty frame where it selects nothing."""
    # The blocks of a source are read one after another, yet not all by one thread.
    connection = sqlite3.connect(f"file:{file}?mode=ro", uri=True, check_same_thread=False)
    try:
        cursor = connection.execute(sql)
        names = [column[0] for column in cursor.description]
        found = cursor.fetchmany(rows)
        yield pl.DataFrame(found, schema=names, orient="row", infer_schema_length=None)
        while found := cursor.fetchmany(rows):
            yield pl.DataFrame(found, schema=names, orient="row", infer_schema_length=None)
    finally:
        connection.close()


@dataclass(frozen=True, kw_only=True)
class TableSource(Source):
    """A table, in the order of its row ids, so that every reading numbers the rows alike."""

    file: Path
    table: str
    columns: tuple[str, ...]

    def blocks(self) -> Iterator[Block]:
        """Yield the rows as they are typed, numbered from 1."""
        selected = ", ".join(f'"{name}"' for name in self.columns)
        first = 1
        for frame in frames(self.file, f"SELECT {selected} FROM {self.table} ORDER BY rowid", BLOCK_ROWS):
            yield RawBlock(frame=frame, file=self.table, lines=np.arange(first, first + frame.height))
            first += frame.height
