"""Pass 2: typed rows to the dataset's columns, a pure function of a frame and the fitted state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from pipeline.contracts import (
    LABEL,
    MISSING_ROW,
    RESERVED_ROWS,
    TRUE_PROBABILITY,
    UNSEEN_ROW,
    DatasetSchema,
    SparseColumn,
    weight_column,
)
from pipeline.ingest.fit import Fit, Partial, VocabCounts, flat_hashes, hash_rows_of
from pipeline.ingest.moments import LOG_QUANTUM, signed_log
from pipeline.ingest.parse import FLOAT32_MAX, as_lists
from pipeline.ingest.spec import DAY, DataSpec, DenseSpec, SparseSpec


@dataclass(frozen=True, kw_only=True)
class DenseTransform:
    """(t(x) - mean) / std, t = signed log or identity; a missing value becomes 0."""

    logarithmic: bool
    mean: float
    std: float


@dataclass(frozen=True, kw_only=True)
class SparseTransform:
    """Id hash to table row. ``vocab``: hash, id, row, count by falling count; None where ids are hash-mapped."""

    rows: int
    vocab: pl.DataFrame | None


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything pass 2 needs to know, by feature."""

    dense: dict[str, DenseTransform]
    sparse: dict[str, SparseTransform]


def fitted_state(spec: DataSpec, fit: Fit) -> State:
    """The transforms that the train rows ask for."""
    return State(
        dense={feature.name: _fit_dense(feature, fit.train) for feature in spec.dense},
        sparse={feature.name: _fit_sparse(feature, fit.train) for feature in spec.sparse},
    )


def _fit_dense(feature: DenseSpec, train: Partial) -> DenseTransform:
    mean, std = 0.0, 1.0
    if feature.standardised:
        moments = (train.logs if feature.logarithmic else train.raw)[feature.name]
        unit = LOG_QUANTUM if feature.logarithmic else 1.0
        mean, std = moments.mean * unit, moments.std * unit or 1.0
    return DenseTransform(logarithmic=feature.logarithmic, mean=mean, std=std)


def _fit_sparse(feature: SparseSpec, train: Partial) -> SparseTransform:
    counts = train.counts[feature.name]
    if not isinstance(counts, VocabCounts):
        return SparseTransform(rows=feature.rows, vocab=None)
    kept = counts.table().filter(pl.col("count") >= feature.min_count)
    # Ties by hash: any order will do, as long as it is always the same.
    ranked = kept.sort(["count", "hash"], descending=[True, False]).head(feature.rows - RESERVED_ROWS)
    vocab = ranked.with_row_index("row", offset=RESERVED_ROWS).with_columns(pl.col("row").cast(pl.Int32))
    return SparseTransform(
        rows=RESERVED_ROWS + vocab.height, vocab=vocab.select("id", "hash", "row", "count").rechunk()
    )


def transform(frame: pl.DataFrame, spec: DataSpec, state: State) -> pl.DataFrame:
    """Typed rows as the dataset holds them: label, dense, sparse (with weights), probability, day."""
    dense = [_dense(feature, state.dense[feature.name]) for feature in spec.dense]
    columns = frame.select(pl.col(LABEL), *dense).get_columns()
    for feature in spec.sparse:
        columns += _sparse(frame, feature, state.sparse[feature.name])
    columns += [frame[name] for name in (TRUE_PROBABILITY, DAY) if name in frame.columns]
    return pl.DataFrame(columns)


def _dense(feature: DenseSpec, fitted: DenseTransform) -> pl.Expr:
    value = pl.col(f"dense:{feature.name}")
    if fitted.logarithmic:
        value = signed_log(value)
    value = ((value - fitted.mean) / fitted.std).clip(-FLOAT32_MAX, FLOAT32_MAX)
    return value.fill_null(0.0).cast(pl.Float32).alias(feature.name)


def _sparse(frame: pl.DataFrame, feature: SparseSpec, fitted: SparseTransform) -> list[pl.Series]:
    rows = _rows(flat_hashes(frame, feature), fitted)
    if not feature.multi:
        return [rows.alias(feature.name)]
    # A row without ids looks up the row of missing values, with weight 1.
    lengths = frame[f"hash:{feature.name}"].list.len().fill_null(0).to_numpy()
    offsets = np.concatenate([[0], np.cumsum(np.maximum(lengths, 1).astype(np.int64))])
    columns = [as_lists(rows, offsets).alias(feature.name)]
    if feature.weighted:
        weights = frame[f"weight:{feature.name}"].explode(empty_as_null=True).fill_null(1.0)
        columns.append(as_lists(weights, offsets).alias(weight_column(feature.name)))
    return columns


def _rows(hashes: pl.Series, fitted: SparseTransform) -> pl.Series:
    """Table row (Int32) of each hash: 0 for null, 1 for what the vocabulary does not hold."""
    frame = hashes.to_frame("hash")
    if fitted.vocab is None:
        rows = frame.with_columns(hash_rows_of(hashes, fitted.rows).cast(pl.Int32).alias("row"))
    else:
        rows = frame.join(fitted.vocab.select("hash", "row"), on="hash", how="left", maintain_order="left")
    known = pl.col("row").fill_null(UNSEEN_ROW)
    missing = pl.lit(MISSING_ROW, dtype=pl.Int32)
    return rows.select(pl.when(pl.col("hash").is_null()).then(missing).otherwise(known).alias("row"))["row"]


def dataset_schema(
    spec: DataSpec, state: State, rows: dict[str, int], files: dict[str, list[str]], groups: dict[str, list[list[int]]]
) -> DatasetSchema:
    """``schema.json`` of the dataset."""
    sparse = tuple(
        SparseColumn(name=f.name, rows=state.sparse[f.name].rows, multi=f.multi, weighted=f.weighted)
        for f in spec.sparse
    )
    return DatasetSchema(
        dense=tuple(feature.name for feature in spec.dense), sparse=sparse, rows=rows, files=files, groups=groups,
        true_probability=spec.true_probability,
    )  # fmt: skip


def transforms_json(spec: DataSpec, state: State) -> dict[str, Any]:
    """``transforms.json``: what was fitted, enough to transform other rows the same way."""
    dense = {
        feature.name: {
            "column": feature.column, "transform": feature.transform,
            "mean": state.dense[feature.name].mean, "std": state.dense[feature.name].std, "missing": 0.0,
        }
        for feature in spec.dense
    }  # fmt: skip
    sparse = {
        feature.name: {
            "column": feature.column, "mapping": feature.mapping, "rows": state.sparse[feature.name].rows,
            "hash": "xxhash64", "seed": feature.seed, "separator": feature.separator,
            "weight_separator": feature.weight_separator,
            "vocab": f"vocab/{feature.name}.parquet" if feature.mapping == "vocab" else None,
        }
        for feature in spec.sparse
    }  # fmt: skip
    label = {"column": spec.label, "positive": spec.positive, "negative": spec.negative}
    return {"label": label, "missing": list(spec.missing), "strip": spec.strip, "dense": dense, "sparse": sparse}
