"""Writing the dataset: Parquet parts with row groups of exact size, vocabularies, quarantine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.ingest import IngestConfig
from pipeline.ingest.footers import Encoded, RowsFile, encoded
from pipeline.ingest.ids import as_text
from pipeline.records.dataset import TRUE_PROBABILITY
from pipeline.store.artifacts import Draft

# Columns that are encoded together.
_TOGETHER = 10
# Bytes of a row group in memory, at a value a column, and its rows, however wide it is.
_GROUP_BYTES = 32 << 20
_LEAST_ROWS = 1024


def narrowed_groups(config: IngestConfig, columns: int) -> IngestConfig:
    """``config`` with smaller row groups where a row has many ``columns``.

    One row group of each split is in memory, and training shuffles within several of them.
    """
    rows = max(_GROUP_BYTES // (4 * columns) // _LEAST_ROWS * _LEAST_ROWS, _LEAST_ROWS)
    return replace(config, rows_per_group=min(config.rows_per_group, rows))


class PartWriter:
    """The Parquet files of one split. Row groups hold ``rows_per_group`` rows however rows arrive.

    ``pool``: the threads that encode the columns of a row group; None: the calling one. Use as a context manager;
    ``files`` and ``groups`` are complete after it. ``rows``: how many were added.
    """

    def __init__(self, draft: Draft, split: str, config: IngestConfig, pool: ThreadPoolExecutor | None = None) -> None:
        self.draft, self.split, self.config, self.pool = draft, split, config, pool
        self.files: list[str] = []
        self.groups: list[list[int]] = []
        self.pending: list[pl.DataFrame] = []
        self.pending_rows = 0
        self.rows = 0
        self.stack = ExitStack()
        self.writer: RowsFile | None = None

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None and self.pending_rows:
                self._write_group(pl.concat(self.pending))
            if kind is None:
                self._finish()
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
        if self.writer is None:
            name = f"{self.split}/part-{len(self.files):05d}.parquet"
            sink = self.stack.enter_context(self.draft.open(name))
            self.writer = RowsFile(sink, plain(frame.clear()).schema, self.config.compression)
            self.files.append(name)
            self.groups.append([])
        slices = [frame[:, at : at + _TOGETHER] for at in range(0, frame.width, _TOGETHER)]
        columns = map(self._encode, slices) if self.pool is None else self.pool.map(self._encode, slices)
        self.writer.add(columns, frame.height)
        self.groups[-1].append(frame.height)
        if len(self.groups[-1]) == self.config.groups_per_file:
            self._finish()

    def _encode(self, columns: pl.DataFrame) -> Encoded:
        return encoded(plain(columns), self.config.compression)

    def _finish(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self._close()

    def _close(self) -> None:
        self.writer = None
        stack, self.stack = self.stack, ExitStack()
        stack.close()


def plain(frame: pl.DataFrame) -> pa.Table:
    """Polars' large lists as ordinary ones, which every reader knows; columns that hold no nulls, as such."""
    table = frame.rechunk().to_arrow()
    fields = []
    for field in table.schema:
        kind = field.type
        if pa.types.is_large_list(kind):
            kind = pa.list_(pa.field("element", kind.value_type, nullable=False))
        fields.append(pa.field(field.name, kind, nullable=field.name == TRUE_PROBABILITY))
    return table.cast(pa.schema(fields))


def write_frame(draft: Draft, name: str, frame: pl.DataFrame, compression: str) -> None:
    """Write ``frame`` as Parquet file ``name``."""
    data = encoded_frame(frame, compression)
    with draft.open(name) as sink:
        sink.write(data)


def encoded_frame(frame: pl.DataFrame, compression: str) -> pa.Buffer:
    """Return ``frame`` as the bytes of a Parquet file, its strings as ordinary ones, which every reader knows."""
    table = frame.rechunk().to_arrow()
    fields = []
    for field in table.schema:
        kind = pa.string() if pa.types.is_large_string(field.type) else field.type
        fields.append(pa.field(field.name, kind))
    sink = pa.BufferOutputStream()
    pq.write_table(table.cast(pa.schema(fields)), sink, compression=compression)
    return sink.getvalue()


def joined(parts: list[pl.DataFrame]) -> pl.DataFrame:
    """Concatenate raw rows of several blocks: a column of numbers in one and of text in another becomes text."""
    mixed = []
    for name in parts[0].columns:
        if len({part[name].dtype for part in parts}) > 1:
            mixed.append(name)
    return pl.concat([part.with_columns(as_text(part[name]) for name in mixed) for part in parts])
