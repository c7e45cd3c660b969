"""What ``make bench-ingest`` compares with: the same transform of a Criteo TSV, and nothing else.

``plain_polars`` is a script as one writes it with the log in memory: parse, hash the ids, rank those seen often
enough by count, map, log1p, standardise, write Parquet. ``per_column_numpy`` is the preprocessing in use around
DLRM and TorchRec: rows parsed one by one into arrays, then ids counted and made contiguous column by column, with a
dictionary, value by value. ``per_column_unique`` does the same by ``np.unique``, the faster way to write it. No split,
quarantine, profile, checks or bounded memory in any of them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import polars_hash as plh

INTEGERS = [f"I{i}" for i in range(1, 14)]
CATEGORIES = [f"C{i}" for i in range(1, 27)]
ROWS_PER_GROUP = 65_536
FIRST_ROW = 2  # 0: missing, 1: too rare


def plain_polars(tsv: str, out: str, min_count: int, most_rows: int) -> int:
    """Write ``out``/train.parquet and a vocabulary per category; returns the rows."""
    schema: dict[str, pl.DataType | type[pl.DataType]] = {
        "label": pl.Float32,
        **dict.fromkeys(INTEGERS, pl.Float64),
        **dict.fromkeys(CATEGORIES, pl.String),
    }
    log = pl.read_csv(tsv, separator="\t", has_header=False, schema=schema, quote_char=None)
    hashed = [
        pl.when(pl.col(name) != "").then(plh.col(name).nchash.xxhash64(seed=seed))  # type: ignore[attr-defined]
        for seed, name in enumerate(CATEGORIES)
    ]
    value = pl.col(INTEGERS)
    logs = value.sign() * value.abs().log1p()
    dense = ((logs - logs.mean()) / logs.std()).fill_null(0.0).cast(pl.Float32)
    log = log.select("label", dense, *(column.alias(name) for name, column in zip(CATEGORIES, hashed, strict=True)))
    for name in CATEGORIES:
        counts = log[name].drop_nulls().value_counts().filter(pl.col("count") >= min_count)
        ranked = counts.sort(["count", name], descending=[True, False]).head(most_rows - FIRST_ROW)
        vocab = ranked.with_row_index("row", offset=FIRST_ROW)
        vocab.write_parquet(f"{out}/{name}.parquet", compression="zstd")
        rows = log.select(name).join(vocab, on=name, how="left", maintain_order="left")
        row = pl.when(pl.col(name).is_null()).then(0).otherwise(pl.col("row").fill_null(1)).cast(pl.Int32)
        log = log.with_columns(rows.select(row.alias(name))[name])
    log.write_parquet(f"{out}/train.parquet", compression="lz4", row_group_size=ROWS_PER_GROUP)
    return log.height


def per_column_numpy(tsv: str, out: str, min_count: int, most_rows: int) -> int:
    """Write ``out``/dense.npy, labels.npy, sparse.npy (one column after the other); returns the rows."""
    labels, sparse = _dense_part(tsv, out)
    for column in range(sparse.shape[1]):
        counts: dict[int, int] = {}
        for value in sparse[:, column]:
            counts[value] = counts.get(value, 0) + 1
        frequent = [value for value, count in counts.items() if count >= min_count and value >= 0]
        kept = sorted(frequent, key=counts.__getitem__, reverse=True)[: most_rows - FIRST_ROW]
        rows = {value: row for row, value in enumerate(kept, start=FIRST_ROW)}
        rows[-1] = 0
        for row, value in enumerate(sparse[:, column]):
            sparse[row, column] = rows.get(value, 1)
    np.save(f"{out}/sparse.npy", np.ascontiguousarray(sparse.astype(np.int32).T))
    return len(labels)


def per_column_unique(tsv: str, out: str, min_count: int, most_rows: int) -> int:
    """As ``per_column_numpy``, the ids of a column sorted, counted and numbered by ``np.unique``."""
    labels, sparse = _dense_part(tsv, out)
    found = np.empty((sparse.shape[1], len(labels)), np.int32)
    for column in range(sparse.shape[1]):
        values, places, counts = np.unique(sparse[:, column], return_inverse=True, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        order = order[(counts[order] >= min_count) & (values[order] >= 0)][: most_rows - FIRST_ROW]
        rows = np.ones(len(values), np.int32)
        rows[order] = np.arange(FIRST_ROW, FIRST_ROW + len(order))
        rows[values < 0] = 0
        found[column] = rows[places]
    np.save(f"{out}/sparse.npy", found)
    return len(labels)


def _dense_part(tsv: str, out: str) -> tuple[np.ndarray, np.ndarray]:
    """Write the labels and the standardised logarithms; returns labels and ids as they were read."""
    labels, dense, sparse = _parsed(tsv)
    logs = np.sign(dense) * np.log1p(np.abs(dense))
    means, deviations = np.nanmean(logs, axis=0), np.nanstd(logs, axis=0)
    np.save(f"{out}/dense.npy", np.nan_to_num((logs - means) / deviations).astype(np.float32))
    np.save(f"{out}/labels.npy", labels)
    return labels, sparse


def _parsed(tsv: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels [rows], integers [rows, 13] (NaN: missing) and ids [rows, 26] as numbers (-1: missing)."""
    parts = []
    with Path(tsv).open() as lines:
        for line in lines:
            fields = line.rstrip("\n").split("\t")
            numbers = [int(field) if field else np.nan for field in fields[1:14]]
            parts.append((int(fields[0]), numbers, [int(field, 16) if field else -1 for field in fields[14:]]))
    labels, dense, sparse = zip(*parts, strict=True)
    return np.array(labels, np.float32), np.array(dense, np.float64), np.array(sparse, np.int64)
