"""Writing the dataset: Parquet parts with row groups of exact size, vocabularies, quarantine."""

from __future__ import annotations

from contextlib import ExitStack
from typing import BinaryIO

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config import IngestConfig
from pipeline.ingest.ids import as_text
from pipeline.records import TRUE_PROBABILITY
from pipeline.store import Draft


class PartWriter:
    """The Parquet files of one split. Row groups hold ``rows_per_group`` rows however rows arrive.

    Use as a context manager; ``files`` and ``groups`` are complete after it. ``rows``: how many were added.
    """

    def __init__(self, draft: Draft, split: str, config: IngestConfig) -> None:
        self.draft = draft
        self.split = split
        self.config = config
        self.files: list[str] = []
        self.groups: list[list[int]] = []
        self.pending: list[pl.DataFrame] = []
        self.pending_rows = 0
        self.rows = 0
        self.stack = ExitStack()
        self.writer: pq.ParquetWriter | None = None

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None and self.pending_rows:
                self._write_group(pl.concat(self.pending))
        finally:
            self._close()

    def add(self, frame: pl.DataFrame) -> None:
        """Append rows; full row groups are written at once."""
        self.pending.append(frame)
        self.pending_rows += frame.height
        self.rows += frame.height
        size = self.config.rows_per_group
        if self.pending_rows < size:
            return
        rows = pl.concat(self.pending)
        whole = rows.height // size * size
        for start in range(0, whole, size):
            self._write_group(rows.slice(start, size))
        self.pending, self.pending_rows = [rows.slice(whole)], rows.height - whole

    def _write_group(self, frame: pl.DataFrame) -> None:
        table = _plain(frame.rechunk().to_arrow())
        if self.writer is None:
            name = f"{self.split}/part-{len(self.files):05d}.parquet"
            sink = self.stack.enter_context(self.draft.open(name))
            self.writer = self.stack.enter_context(rows_writer(sink, table.schema, self.config.compression))
            self.files.append(name)
            self.groups.append([])
        self.writer.write_table(table, row_group_size=frame.height)
        self.groups[-1].append(frame.height)
        if len(self.groups[-1]) == self.config.groups_per_file:
            self._close()

    def _close(self) -> None:
        self.writer = None
        stack, self.stack = self.stack, ExitStack()
        stack.close()


def _plain(table: pa.Table) -> pa.Table:
    """Polars' large lists as ordinary ones, which every reader knows; columns that hold no nulls, as such."""
    fields = [
        pa.field(item.name, _plain_type(item.type), nullable=item.name == TRUE_PROBABILITY) for item in table.schema
    ]
    return table.cast(pa.schema(fields))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind.value_type, nullable=False)) if pa.types.is_large_list(kind) else kind


def rows_writer(sink: BinaryIO, schema: pa.Schema, compression: str) -> pq.ParquetWriter:
    """A writer of rows that training reads: plain values, for they decode several times as fast as dictionaries do."""
    return pq.ParquetWriter(sink, schema, compression=compression, use_dictionary=False, write_statistics=False)


def write_frame(draft: Draft, name: str, frame: pl.DataFrame, compression: str) -> None:
    """Write ``frame`` as Parquet file ``name``, its strings as ordinary ones, which every reader knows."""
    table = frame.rechunk().to_arrow()
    fields = [pa.field(f.name, pa.string() if pa.types.is_large_string(f.type) else f.type) for f in table.schema]
    with draft.open(name) as sink:
        pq.write_table(table.cast(pa.schema(fields)), sink, compression=compression)


def joined(parts: list[pl.DataFrame]) -> pl.DataFrame:
    """Raw rows of several blocks: a column that is of numbers in one and of text in another becomes text."""
    mixed = [name for name in parts[0].columns if len({part[name].dtype for part in parts}) > 1]
    return pl.concat([part.with_columns(as_text(part[name]) for name in mixed) for part in parts])
