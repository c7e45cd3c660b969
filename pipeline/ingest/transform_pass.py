"""Pass 2: typed rows to the dataset's columns, a pure function of a frame and the fitted state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

import numpy as np
import polars as pl

from pipeline.ingest.dictionary_encoding import Coded
from pipeline.ingest.ids import of_bits
from pipeline.ingest.moments import prepared, small_numbers
from pipeline.ingest.schema import DAY, DataSpec, DenseSpec, SparseSpec
from pipeline.ingest.sketch import bin_of
from pipeline.ingest.tasks import stored_columns
from pipeline.ingest.times import HOUR
from pipeline.ingest.values import FLOAT32_MAX
from pipeline.ingest.vectors import scaled
from pipeline.native.columns import looked_up, taken, unseen
from pipeline.records.dataset import (
    LABEL,
    MISSING_ROW,
    SPLIT_HOUR,
    TRUE_PROBABILITY,
    UNSEEN_ROW,
    raw_column,
    unseen_column,
    weight_column,
)
from pipeline.specs.id_mapping import FittedMapping

_TABLES = 4096  # that are kept


@dataclass(frozen=True, kw_only=True)
class DenseTransform:
    """(t(x) - mean) / std, t = clip and signed log or identity; ``missing`` for a missing value.

    ``bounds``: of the bins, where the value becomes the share of them below it, minus 1/2 (0: the median).
    """

    mean: float = 0.0
    std: float = 1.0
    missing: float = 0.0
    bounds: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class FittedState:
    """Everything pass 2 needs to know, by feature."""

    dense: dict[str, DenseTransform]
    sparse: dict[str, FittedMapping]


def transform(
    frame: pl.DataFrame, spec: DataSpec, state: FittedState, coded: Mapping[str, Coded] = MappingProxyType({})
) -> pl.DataFrame:
    """Typed rows as the dataset holds them: label, dense, sparse (with weights), probability, day, hour, other labels.

    ``coded``: the ids of some features, which ``frame`` then need not hold.
    """
    plain = [f for f in spec.dense if state.dense[f.name].bounds is None and not f.vector]
    counts = {f.name: _looked_up(frame, f, state.dense[f.name]) for f in plain if f.logarithmic}
    ready = {name: column for name, column in counts.items() if column is not None}
    others = frame.select(_dense(f, state.dense[f.name]) for f in plain if f.name not in ready)
    ready |= {column.name: column for column in others.get_columns()}
    columns = [frame[LABEL]]
    for feature in spec.dense:
        if feature.vector:
            fitted = state.dense[feature.name]
            columns += scaled(frame[f"dense:{feature.name}"], feature, fitted.mean, fitted.std)
            continue
        column = ready.get(feature.name)
        columns.append(dense_column(frame, feature, state.dense[feature.name]) if column is None else column)
    for sparse in spec.sparse:
        ids = coded.get(sparse.name) or Coded.of(frame, sparse)
        columns += _sparse(frame, sparse, state.sparse[sparse.name], ids)
    columns += [frame[name] for name in (TRUE_PROBABILITY, DAY) if name in frame.columns]
    columns += [frame[HOUR].cast(pl.Int8).alias(SPLIT_HOUR)] if HOUR in frame.columns else []
    columns += stored_columns(frame, spec)
    return pl.DataFrame(columns)


def lossy(spec: DataSpec, state: FittedState) -> list[str]:
    """The features, dense ones first, whose values do not tell the number.

    Those of bins, clipped ones, those whose 0 is a number and a missing value, and standardised ones: where the mean
    lies far from a number, as one that is off by a factor of 1e9 moves it, float32 rounds the number away.
    """
    unclear = {f.name for f in spec.dense if (f.clip or f.zero_is_missing or f.linear) and not f.vector}
    dense = [name for name, each in state.dense.items() if each.bounds is not None or name in unclear]
    return [*dense, *(name for name, each in state.sparse.items() if each.bounds is not None)]


def raw_numbers(frame: pl.DataFrame, chosen: pl.Series, spec: DataSpec, state: FittedState) -> list[pl.Series]:
    """Numbers of the ``lossy`` features of the ``chosen`` typed rows as float64 columns ``raw_column``.

    NaN is a missing one.

    The gate scores a model by them that was fitted to other bounds, clips less, or tells zeros from missing values.
    """
    sparse = {f.name for f in spec.sparse}
    columns = []
    for name in lossy(spec, state):
        column = frame[f"hash:{name}" if name in sparse else f"dense:{name}"].filter(chosen)
        numbers = pl.Series(of_bits(column)) if name in sparse else column.cast(pl.Float64).fill_null(math.nan)
        columns.append(numbers.alias(raw_column(name)))
    return columns


def with_vocabulary(state: FittedState) -> list[str]:
    """The features whose ids have rows by a vocabulary; of the others' rows none tells which id it was."""
    return [name for name, fitted in state.sparse.items() if fitted.lookup is not None]


def unseen_ids(rows: pl.DataFrame, state: FittedState, coded: Mapping[str, Coded]) -> list[pl.Series]:
    """Of each feature ``with_vocabulary`` the hashes of ids that it does not hold in transformed ``rows``, else 0.

    ``coded``: the ids of the same rows. The gate scores a model by them that has rows for ids which this dataset has
    none for.
    """
    columns = []
    for name in with_vocabulary(state):
        ids, row = coded[name], rows[name]
        values = (row if ids.lengths is None else row.explode()).to_numpy()
        first, count = state.sparse[name].spread or (UNSEEN_ROW, 1)
        hashes = unseen(values, ids.codes, ids.hashes, first, count)
        columns.append(ids.by_row(pl.Series(hashes)).alias(unseen_column(name)))
    return columns


def _dense(feature: DenseSpec, fitted: DenseTransform) -> pl.Expr:
    value = ((prepared(feature) - fitted.mean) / fitted.std).clip(-FLOAT32_MAX, FLOAT32_MAX)
    return value.fill_null(fitted.missing).cast(pl.Float32).alias(feature.name)


def _looked_up(frame: pl.DataFrame, feature: DenseSpec, fitted: DenseTransform) -> pl.Series | None:
    # The same of a column that mostly holds small whole numbers; None of any other.
    column = frame[f"dense:{feature.name}"].cast(pl.Float64)
    table = _values(feature, fitted.mean, fitted.std, fitted.missing)
    known = looked_up(column.to_arrow(), table, fitted.missing)
    if known is None:
        return None
    values, rest = known
    if len(rest):
        values[rest] = column.gather(rest).to_frame().select(_dense(feature, fitted)).to_series().to_numpy()
    return pl.Series(feature.name, values)


@lru_cache(_TABLES)
def _values(feature: DenseSpec, mean: float, std: float, missing: float) -> np.ndarray:
    # The values of the whole numbers below SMALL, float32; of the very expression, so that bits are the same.
    fitted = DenseTransform(mean=mean, std=std, missing=missing)
    return small_numbers(feature).select(_dense(feature, fitted)).to_series().to_numpy()


def dense_column(frame: pl.DataFrame, feature: DenseSpec, fitted: DenseTransform) -> pl.Series:
    """Column ``feature`` (Float32) of the dataset, from ``dense:<name>`` (a float, null: missing) of typed rows."""
    if fitted.bounds is None:
        return frame.select(_dense(feature, fitted)).to_series()
    values, bins = frame.select(prepared(feature).alias("v"))["v"].to_numpy(), len(fitted.bounds)
    shares = bin_of(values, fitted.bounds) / max(bins, 1) - 0.5 * (bins > 0)
    return pl.Series(feature.name, np.where(np.isnan(values), 0.0, shares).astype(np.float32))


def _sparse(frame: pl.DataFrame, feature: SparseSpec, fitted: FittedMapping, ids: Coded) -> list[pl.Series]:
    # Rows of `ids`, each looked up once; one without an id looks up the row of missing values, with weight 1.
    ways = feature.mapping.rows(fitted, pl.Series(ids.hashes))
    rows = [taken(np.append(way.to_numpy(), np.int32(MISSING_ROW)), ids.codes) for way in ways]
    weights = frame[f"weight:{feature.name}"].explode(empty_as_null=True).fill_null(1.0) if feature.weighted else None
    if len(ways) == 1:
        looked_up = rows[0]
    else:  # a lookup sums several rows, but one of the row of missing values
        some = ids.codes < len(ids.hashes)
        keep = np.stack([np.ones_like(some), *[some] * (len(ways) - 1)], axis=1)
        looked_up, each = np.stack(rows, axis=1)[keep], keep.sum(axis=1)
        weights = None if weights is None else pl.Series(np.repeat(weights.to_numpy(), each))
        row = ids.by_lookup(np.arange(frame.height))
        ids = replace(ids, lengths=np.bincount(np.repeat(row, each), minlength=frame.height))
    columns = [ids.by_row(pl.Series(looked_up)).alias(feature.name)]
    if weights is not None:
        columns.append(ids.by_row(weights).alias(weight_column(feature.name)))
    return columns
