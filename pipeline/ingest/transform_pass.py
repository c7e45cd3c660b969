"""Pass 2: typed rows to the dataset's columns, a pure function of a frame and the fitted state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

import numpy as np
import polars as pl

from pipeline.core.kernels import load_kernels
from pipeline.ingest.ids import Coded, of_bits
from pipeline.ingest.labels import stored_columns
from pipeline.ingest.moments import prepared, scaled, small_numbers
from pipeline.ingest.schema import DAY, DataSpec, DenseSpec, SparseSpec
from pipeline.ingest.sketch import bin_of
from pipeline.ingest.times import HOUR
from pipeline.ingest.values import FLOAT32_MAX
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

# Lookup tables that are kept, one per feature.
_TABLES = 4096
# Bytes of the codes that the compiled kernels take.
_CODE_BYTES = (2, 4)


@dataclass(frozen=True, kw_only=True)
class DenseTransform:
    """(t(x) - mean) / std, t = clip and signed log or identity; ``missing`` for a missing value.

    ``bounds``: bounds of bins; the value becomes the share of them below it, minus 1/2 (0: the median).
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
    """Transform typed rows to the columns of the dataset.

    Args:
        frame: typed rows.
        spec: their schema.
        state: the fit on the train rows.
        coded: the ids of some features, which ``frame`` then need not hold.

    Returns:
        Label, dense, sparse (with weights), probability, day, hour, further labels, in that order.
    """
    # 1. Plain numbers: counts, which mostly are small, are looked up; all others are one query of Polars.
    plain, others = dict[str, pl.Series](), list[pl.Expr]()
    for dense in spec.dense:
        fitted = state.dense[dense.name]
        if dense.vector or fitted.bounds is not None:
            continue
        column = None
        if dense.logarithmic:
            column = _look_up_small_numbers(frame, dense, fitted)
        if column is None:
            others.append(_dense_expression(dense, fitted))
        else:
            plain[dense.name] = column
    for column in frame.select(others).get_columns():
        plain[column.name] = column

    # 2. All columns in the order of the schema.
    columns = [frame[LABEL]]
    for dense in spec.dense:
        fitted = state.dense[dense.name]
        if dense.vector:
            columns += scaled(frame[f"dense:{dense.name}"], dense, fitted.mean, fitted.std)
        elif dense.name in plain:
            columns.append(plain[dense.name])
        else:
            columns.append(dense_column(frame, dense, fitted))
    for sparse in spec.sparse:
        ids = coded.get(sparse.name) or Coded.of(frame, sparse)
        columns += _sparse_columns(frame, sparse, state.sparse[sparse.name], ids)
    for name in (TRUE_PROBABILITY, DAY):
        if name in frame.columns:
            columns.append(frame[name])
    if HOUR in frame.columns:
        columns.append(frame[HOUR].cast(pl.Int8).alias(SPLIT_HOUR))
    columns += stored_columns(frame, spec)
    return pl.DataFrame(columns)


def lossy(spec: DataSpec, state: FittedState) -> list[str]:
    """Return the features, dense ones first, whose values do not tell the number.

    These are features of bins, clipped ones, those whose 0 is a number and a missing value, and standardised ones: if
    the mean lies far from a number, as an outlier of a factor of 1e9 can move it, float32 rounds the number away.
    """
    unclear = set()
    for feature in spec.dense:
        if not feature.vector and (feature.clip or feature.zero_is_missing or feature.linear):
            unclear.add(feature.name)
    # Use the order of the state, which is that of the schema. The order of a set is not fixed.
    dense = [name for name, fitted in state.dense.items() if fitted.bounds is not None or name in unclear]
    sparse = [name for name, fitted in state.sparse.items() if fitted.bounds is not None]
    return dense + sparse


def raw_numbers(frame: pl.DataFrame, chosen: pl.Series, spec: DataSpec, state: FittedState) -> list[pl.Series]:
    """Return numbers of the ``lossy`` features of the ``chosen`` typed rows as float64 columns ``raw_column``.

    NaN is a missing one.

    The gate uses them to score a model that was fitted to other bounds, clips less, or tells zeros from missing values.
    """
    columns = []
    for name in lossy(spec, state):
        if name in state.sparse:
            # The hashes of a feature that is cut into bins are the bits of its numbers.
            numbers = pl.Series(of_bits(frame[f"hash:{name}"].filter(chosen)))
        else:
            numbers = frame[f"dense:{name}"].filter(chosen).cast(pl.Float64).fill_null(math.nan)
        columns.append(numbers.alias(raw_column(name)))
    return columns


def with_vocabulary(state: FittedState) -> list[str]:
    """Return the features whose ids have rows by a vocabulary; a row of other features does not tell the id."""
    return [name for name, fitted in state.sparse.items() if fitted.lookup is not None]


def unseen_ids(rows: pl.DataFrame, state: FittedState, coded: Mapping[str, Coded]) -> list[pl.Series]:
    """Return for each feature ``with_vocabulary`` the hashes of ids that have no row in its table, and 0 for others.

    ``rows``: transformed rows; ``coded``: their ids. The gate uses the hashes to score a model that has
    rows for ids for which this dataset has none.
    """
    columns = []
    for name in with_vocabulary(state):
        ids, row = coded[name], rows[name]
        if ids.lengths is not None:
            row = row.explode()
        # With the mapping `learned`, unknown ids are spread over several rows.
        first, count = state.sparse[name].spread or (UNSEEN_ROW, 1)
        hashes = hashes_of_rows(row.to_numpy(), ids, first, count)
        columns.append(ids.by_row(pl.Series(hashes)).alias(unseen_column(name)))
    return columns


def hashes_of_rows(rows: np.ndarray, ids: Coded, first: int, count: int) -> np.ndarray:
    """Return the hash (uint64) of each lookup whose row is one of ``count`` from ``first`` on; 0 for the others.

    ``rows``: int32, for the lookups in ``ids``.
    """
    kernels = load_kernels("rows")
    if kernels is not None and ids.codes.itemsize in _CODE_BYTES:
        return kernels.unseen(rows, ids.codes, ids.hashes, first, count)
    hashes = np.zeros(len(rows), np.uint64)
    among = (rows >= first) & (rows < first + count)
    hashes[among] = ids.hashes[ids.codes[among]]
    return hashes


def take_rows(rows: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return ``rows[codes]``, int32, for ``codes`` that lie within them."""
    kernels = load_kernels("rows")
    if kernels is None or codes.itemsize not in _CODE_BYTES:
        return rows[codes]
    return kernels.take(rows, codes)


def _dense_expression(feature: DenseSpec, fitted: DenseTransform) -> pl.Expr:
    value = ((prepared(feature) - fitted.mean) / fitted.std).clip(-FLOAT32_MAX, FLOAT32_MAX)
    return value.fill_null(fitted.missing).cast(pl.Float32).alias(feature.name)


def _look_up_small_numbers(frame: pl.DataFrame, feature: DenseSpec, fitted: DenseTransform) -> pl.Series | None:
    # Returns the values of `_dense_expression`, without the logarithm of each row. None without the compiled kernels,
    # and unless most are small whole numbers.
    kernels = load_kernels("rows")
    if kernels is None:
        return None
    column = frame[f"dense:{feature.name}"].cast(pl.Float64)
    table = _small_number_values(feature, fitted.mean, fitted.std, fitted.missing)
    known = kernels.look_up(column.to_arrow(), table, fitted.missing)
    if known is None:
        return None
    # The rest are large numbers or fractions, which have to be computed.
    values, rest = known
    if len(rest):
        others = column.gather(rest).to_frame()
        values[rest] = others.select(_dense_expression(feature, fitted)).to_series().to_numpy()
    return pl.Series(feature.name, values)


@lru_cache(_TABLES)
def _small_number_values(feature: DenseSpec, mean: float, std: float, missing: float) -> np.ndarray:
    # Returns float32 [SMALL] by the same expression, so that bits are the same.
    fitted = DenseTransform(mean=mean, std=std, missing=missing)
    return small_numbers(feature).select(_dense_expression(feature, fitted)).to_series().to_numpy()


def dense_column(frame: pl.DataFrame, feature: DenseSpec, fitted: DenseTransform) -> pl.Series:
    """Return column ``feature`` (Float32) of the dataset, from ``dense:<name>`` (null: missing) of typed rows."""
    if fitted.bounds is None:
        return frame.select(_dense_expression(feature, fitted)).to_series()
    # Bin numbers are scaled to -0.5 to 0.5, however many bins there are. With a single bin all values are 0.
    values = frame.select(prepared(feature).alias("v"))["v"].to_numpy()
    bins = len(fitted.bounds)
    shares = bin_of(values, fitted.bounds) / max(bins, 1) - 0.5 * (bins > 0)
    return pl.Series(feature.name, np.where(np.isnan(values), 0.0, shares).astype(np.float32))


def _sparse_columns(frame: pl.DataFrame, feature: SparseSpec, fitted: FittedMapping, ids: Coded) -> list[pl.Series]:
    # 1. Map each distinct id once, by each way of the mapping (``double_hash`` has two). A lookup without an id takes
    #    the row of missing values, with weight 1.
    ways = feature.mapping.rows(fitted, pl.Series(ids.hashes))
    # Row numbers of the table; the rows of ``frame`` are another matter.
    table_rows = []
    for way in ways:
        # The code of a missing id is one past the last id's.
        row_of_code = np.append(way.to_numpy(), np.int32(MISSING_ROW))
        table_rows.append(take_rows(row_of_code, ids.codes))
    weights = None
    if feature.weighted:
        weights = frame[f"weight:{feature.name}"].explode(empty_as_null=True).fill_null(1.0)

    # 2. A mapping of several ways sums several rows for each lookup, but one for a missing value.
    if len(ways) == 1:
        values = table_rows[0]
    else:
        present = ids.codes < len(ids.hashes)
        keep = np.stack([np.ones_like(present), *[present] * (len(ways) - 1)], axis=1)
        values, repeats = np.stack(table_rows, axis=1)[keep], keep.sum(axis=1)
        if weights is not None:
            weights = pl.Series(np.repeat(weights.to_numpy(), repeats))
        row = ids.by_lookup(np.arange(frame.height))
        ids = replace(ids, lengths=np.bincount(np.repeat(row, repeats), minlength=frame.height))

    # 3. Lookups to a value, or a list, for each row.
    columns = [ids.by_row(pl.Series(values)).alias(feature.name)]
    if weights is not None:
        columns.append(ids.by_row(weights).alias(weight_column(feature.name)))
    return columns
