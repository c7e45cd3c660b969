"""Tables of a checkpoint as plain fp32 files for other programs: Parquet or safetensors, one file a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO
from urllib.parse import quote

import numpy as np
import torch

from pipeline.checkpoint.container import write_header
from pipeline.checkpoint.reader import ChainReader
from pipeline.embeddings.row_access import LocalShard
from pipeline.errors import ConfigError
from pipeline.records.checkpoint import Exported, ExportedTable
from pipeline.store.artifacts import Store
from pipeline.store.files import whole_file
from pipeline.store.manifest import Artifact

Progress = Callable[[int, int], None]
Windows = Callable[[str], Iterator[LocalShard]]


def export(
    store: Store,
    artifact: Artifact,
    out: Store,
    *,
    file_format: str = "parquet",
    layout: str | None = None,
    state: bool = False,
    tables: list[str] | None = None,
    progress: Progress = lambda done, total: None,
) -> Exported:
    """Write ``<table>.<format>`` into ``out``, rows in order; what was written. ``progress``: rows done and in all.

    Parquet: column ``row`` (int64), then ``e0``..``eN`` float32, or with ``layout`` list (Parquet only) one fixed-size
    list ``e``; with ``state`` a float32 column for each optimizer state, of those that every weight has as many as
    weights, named alike. Safetensors: ``weight`` [rows, dim], states by name.
    Memory: a window of rows. Raises ConfigError for an unknown table, ArtifactError for damage: then the file that was
    being written is gone.
    """
    if layout is not None and file_format != "parquet":
        raise ConfigError(f"--layout {layout} needs Parquet files, got --format {file_format}", hint="--format parquet")
    reader = ChainReader(store, artifact)
    chosen = list(dict.fromkeys(tables or reader.tables))
    for table in chosen:
        if table not in reader.tables:
            raise ConfigError(
                f"{artifact.path} has no table {table!r}; it has: {', '.join(reader.tables)}",
                hint=f"--table {next(iter(reader.tables))}",
            )
    windows = _counted(reader, chosen, progress)
    write = _write_parquet if file_format == "parquet" else _write_safetensors
    done = []
    for table in chosen:
        name = f"{quote(table, safe='')}.{file_format}"
        with whole_file(out.url_of(name), out.option.strip()) as sink:
            write(sink, reader, table, layout, state, windows)
        size = int(out.fs.info(out.full(name))["size"])
        whole = reader.tables[table]
        done.append(ExportedTable(table=table, file=out.url_of(name), rows=whole.rows, dim=whole.dim, bytes=size))
    return Exported(checkpoint=artifact.path, step=artifact.summary["step"], files=tuple(done))


def _counted(reader: ChainReader, tables: list[str], progress: Progress) -> Windows:
    """Windows of a table, each counted in ``progress`` (rows done, rows of all ``tables``) once it is dealt with."""
    done, total = 0, sum(reader.tables[table].rows for table in tables)

    def windows(table: str) -> Iterator[LocalShard]:
        nonlocal done
        for window in reader.windows(table):
            yield window
            done += window.rows
            progress(done, total)

    return windows


def _write_parquet(
    sink: BinaryIO, reader: ChainReader, table: str, layout: str | None, state: bool, windows: Windows
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    dim = reader.tables[table].dim
    states = reader.states(table) if state else {}

    def fields(name: str, wide: bool) -> list[pa.Field]:
        if layout == "list" and wide:
            return [pa.field(name, pa.list_(pa.float32(), dim))]
        return [pa.field(f"{name}{i}", pa.float32()) for i in range(dim)] if wide else [pa.field(name, pa.float32())]

    def columns(values: np.ndarray) -> list[pa.Array]:
        if layout == "list" and values.ndim > 1:
            return [pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), dim)]
        return [pa.array(np.ascontiguousarray(column)) for column in (values.T if values.ndim > 1 else [values])]

    named = [field for name, wide in {"e": True, **states}.items() for field in fields(name, wide)]
    schema = pa.schema([pa.field("row", pa.int64()), *named])
    # Weights are noise to a dictionary; plain pages are smaller and quicker.
    with pq.ParquetWriter(sink, schema, compression="zstd", use_dictionary=False) as writer:
        for window in windows(table):
            rows = pa.array(np.arange(window.row, window.row + window.rows, dtype=np.int64))
            parts = [window.weight, *(window.state[name] for name in states)]
            arrays = [rows, *(array for part in parts for array in columns(part.numpy()))]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _write_safetensors(
    sink: BinaryIO, reader: ChainReader, table: str, layout: str | None, state: bool, windows: Windows
) -> None:
    rows, dim = reader.tables[table].rows, reader.tables[table].dim
    shapes: dict[str, list[int]] = {"weight": [rows, dim]}
    shapes |= {name: [rows, dim] if wide else [rows] for name, wide in (reader.states(table) if state else {}).items()}
    write_header(sink, {name: (torch.float32, shape) for name, shape in shapes.items()}, {"table": table})
    for window in windows(table):
        sink.write(window.weight.numpy().tobytes())
    for name in list(shapes)[1:]:  # a file is written front to back, so the states are another pass over the rows
        for window in reader.windows(table):
            sink.write(window.state[name].numpy().tobytes())
