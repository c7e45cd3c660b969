"""Exports tables of a checkpoint as plain fp32 files for other programs: Parquet or safetensors, one per table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO
from urllib.parse import quote

import numpy as np
import torch

from pipeline.checkpoint.container import write_header
from pipeline.checkpoint.reader import ChainReader
from pipeline.core.errors import ConfigError
from pipeline.embeddings.row_access import LocalShard
from pipeline.records.checkpoint import Exported, ExportedTable
from pipeline.store.artifacts import Store
from pipeline.store.files import whole_file
from pipeline.store.manifest import Artifact

Progress = Callable[[int, int], None]


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
    """Write ``<table>.<format>`` into ``out``, rows in order. Needs memory for a window of rows.

    Parquet: column ``row`` (int64), then ``e0``..``eN`` float32. Safetensors: ``weight`` [rows, dim], states by name.

    Args:
        file_format: ``parquet`` or ``safetensors``.
        layout: ``list`` writes one fixed-size list ``e`` instead of columns (Parquet only).
        state: Write a float32 column for each optimizer state; a state of every weight has as many as the weights.
        tables: Names of the tables; None: all.
        progress: Called with the rows done and their total.

    Raises:
        ConfigError: A table is unknown.
        ArtifactError: The checkpoint is damaged. The file that was being written is gone.
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
    done, total = 0, sum(reader.tables[table].rows for table in chosen)

    def read_windows(table: str) -> Iterator[LocalShard]:
        nonlocal done
        for window in reader.windows(table):
            yield window
            done += window.rows
            progress(done, total)

    files = []
    for table in chosen:
        name = f"{quote(table, safe='')}.{file_format}"
        # The file gets its name only once it is complete, so other programs never find half of one.
        with whole_file(out.url_of(name), out.option.strip()) as sink:
            states = reader.states(table) if state else {}
            if file_format == "parquet":
                _write_parquet(sink, reader.tables[table].dim, states, layout == "list", read_windows(table))
            else:
                _write_safetensors(sink, reader, table, states, read_windows(table))
        size = int(out.fs.info(out.full(name))["size"])
        rows, dim = reader.tables[table].rows, reader.tables[table].dim
        files.append(ExportedTable(table=table, file=out.url_of(name), rows=rows, dim=dim, bytes=size))
    return Exported(checkpoint=artifact.path, step=artifact.summary["step"], files=tuple(files))


def _write_parquet(
    sink: BinaryIO, dim: int, states: dict[str, bool], as_list: bool, windows: Iterator[LocalShard]
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields = [pa.field("row", pa.int64())]
    for name, per_weight in {"e": True, **states}.items():
        if not per_weight:
            fields.append(pa.field(name, pa.float32()))
        elif as_list:
            fields.append(pa.field(name, pa.list_(pa.float32(), dim)))
        else:
            fields += [pa.field(f"{name}{i}", pa.float32()) for i in range(dim)]
    schema = pa.schema(fields)
    # Weights do not repeat, so a dictionary would not help; plain pages are smaller and faster.
    with pq.ParquetWriter(sink, schema, compression="zstd", use_dictionary=False) as writer:
        for window in windows:
            arrays = [pa.array(np.arange(window.row, window.row + window.rows, dtype=np.int64))]
            tensors = [window.weight, *(window.state[name] for name in states)]
            for tensor in tensors:
                values = tensor.numpy()
                if values.ndim == 1:
                    arrays.append(pa.array(np.ascontiguousarray(values)))
                elif as_list:
                    arrays.append(pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), dim))
                else:
                    arrays += [pa.array(np.ascontiguousarray(column)) for column in values.T]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _write_safetensors(
    sink: BinaryIO, reader: ChainReader, table: str, states: dict[str, bool], windows: Iterator[LocalShard]
) -> None:
    rows, dim = reader.tables[table].rows, reader.tables[table].dim
    tensors = {"weight": (torch.float32, [rows, dim])}
    for name, per_weight in states.items():
        shape = [rows, dim] if per_weight else [rows]
        tensors[name] = (torch.float32, shape)
    write_header(sink, tensors, {"table": table})
    for window in windows:
        sink.write(window.weight.numpy().tobytes())
    # A file is written front to back, so the states need another pass over the rows.
    for name in states:
        for window in reader.windows(table):
            sink.write(window.state[name].numpy().tobytes())
