"""Vectors: dense features whose value is several numbers, such as an embedding of another model.

A typed column of vectors is an Array(Float32, width), null where missing. Float32 is what such vectors are stored as,
so that 0.1 is the same number out of a Parquet file and out of text. Statistics are of all numbers together; what a
sketch counts is the vector's length. -0 is 0.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from pipeline.ingest.moments import Moments, measure, prepared, quantised
from pipeline.ingest.rejects import RejectedRows, shown
from pipeline.ingest.schema import DataSpec, DenseSpec
from pipeline.ingest.values import FLOAT32_MAX, absent_in, nulls

# Hash of a missing vector.
_ABSENT = np.uint64(0x9AE16A3B2F90404F)


def vector_of(
    values: pl.Series, text: pl.Series | None, feature: DenseSpec, spec: DataSpec, rejected: RejectedRows
) -> pl.Series:
    """The typed column of ``feature``: of lists of numbers (or of their text), or of ``text``."""
    lists = values if text is None else _divided(text, feature, spec)
    lengths = lists.list.len().fill_null(0).to_numpy()
    wrong = (lengths != feature.width) & (lengths > 0)
    rejected.add(
        wrong,
        f"{feature.column} is no vector of {feature.width}",
        lambda i: f"{feature.column} has {lengths[i]} numbers, expected {feature.width}",
        feature.column,
    )
    whole = lengths == feature.width
    matrix = np.zeros((len(values), feature.width), np.float32)
    matrix[whole] = _numbers(lists.filter(pl.Series(whole)), np.flatnonzero(whole), feature, rejected)
    _check(matrix, whole, feature, rejected)
    return _as_column(matrix, whole).alias(f"dense:{feature.name}")


def _divided(text: pl.Series, feature: DenseSpec, spec: DataSpec) -> pl.Series:
    # Lists of text, null where missing; brackets around the numbers are left out.
    plain = text.str.strip_chars().str.strip_prefix("[").str.strip_suffix("]")
    some = ~absent_in(text, spec) & (plain != "").fill_null(False)
    return plain.str.split(feature.separator).zip_with(some, nulls(pl.List(pl.String), len(text)))


def _numbers(lists: pl.Series, rows: np.ndarray, feature: DenseSpec, rejected: RejectedRows) -> np.ndarray:
    # float32 [len(rows), width] of lists of that width; a row with anything else than finite numbers is rejected.
    flat = lists.explode()
    if not (flat.dtype.is_numeric() or flat.dtype == pl.Boolean):
        flat = flat.cast(pl.String, strict=False).str.strip_chars()
    numbers = flat.cast(pl.Float64, strict=False).to_numpy()
    with np.errstate(invalid="ignore"):
        wrong = ~(np.abs(numbers) <= FLOAT32_MAX)
    if wrong.any():
        at = np.flatnonzero(wrong)
        places = rows[at // feature.width]
        pieces = flat.gather(at).cast(pl.String, strict=False)
        rejected.add_values(
            pl.DataFrame({"row": places, "value": pieces}),
            f"a number of {feature.column} is not finite",
            lambda value: f"{feature.column} holds {shown(value)}, expected {feature.width} finite numbers",
            feature.column,
        )
        numbers = np.where(wrong, 0.0, numbers)
    return (numbers.astype(np.float32) + np.float32(0.0)).reshape(len(rows), feature.width)


def _check(matrix: np.ndarray, whole: np.ndarray, feature: DenseSpec, rejected: RejectedRows) -> None:
    column = feature.column
    if feature.required:
        rejected.add(~whole, f"{column} is missing", lambda _: f"{column} is missing", column)
    if feature.bounds is not None:
        low, high = feature.bounds
        outside = whole & ((matrix < low) | (matrix > high)).any(axis=1)
        rejected.add(
            outside,
            f"{column} is out of range",
            lambda i: (
                f"{column} has numbers from {matrix[i].min():g} to {matrix[i].max():g}, expected {low:g} to {high:g}"
            ),
            column,
        )


def _as_column(matrix: np.ndarray, whole: np.ndarray) -> pl.Series:
    if not len(matrix):
        return pl.Series("v", [], dtype=pl.Array(pl.Float32, matrix.shape[1]))
    column = pl.Series("v", matrix)
    if whole.all():
        return column
    return pl.DataFrame({"v": column, "whole": whole}).select(pl.when("whole").then("v").alias("v")).to_series()


def matrix_of(column: pl.Series) -> tuple[np.ndarray, np.ndarray]:
    """A typed column as (float32 [rows, width], 0 where missing; bool [rows], which rows have a vector)."""
    width = column.dtype.size  # type: ignore[attr-defined]
    present = column.is_not_null().to_numpy()
    values = column.to_numpy() if len(column) else np.zeros((0, width), np.float32)
    if not present.all():
        values = np.where(present[:, None], values, np.float32(0.0))
    return values, present


def numbers_of(column: pl.Series) -> pl.DataFrame:
    """All numbers of the vectors of a typed column that are there, one a row, as a column of Float64 of its name."""
    matrix, present = matrix_of(column)
    if not present.all():
        matrix = matrix[present]
    flat = matrix.astype(np.float64).ravel()
    return pl.DataFrame({column.name: flat})


def lengths_of(column: pl.Series) -> np.ndarray:
    """The length (L2 norm, float64) of each vector; NaN where it is missing."""
    matrix, present = matrix_of(column)
    lengths = np.sqrt(np.einsum("ij,ij->i", matrix, matrix, dtype=np.float64))
    return np.where(present, lengths, np.nan)


def moments_of(column: pl.Series, feature: DenseSpec) -> tuple[Moments, Moments]:
    """Moments of all numbers together: as they are, and as they are standardised."""
    raw, ready = measure(numbers_of(column), [pl.col(column.name), quantised(feature)])
    return raw, ready


def scaled(column: pl.Series, feature: DenseSpec, mean: float, std: float) -> list[pl.Series]:
    """The dataset's columns (Float32) of a typed column: each number as ``feature`` says; a missing vector is zeros."""
    matrix, present = matrix_of(column)
    if feature.transform == "unit":
        lengths = np.sqrt(np.einsum("ij,ij->i", matrix, matrix, dtype=np.float64))
        values = matrix / np.where(lengths > 0, lengths, 1.0)[:, None]
    else:
        flat = pl.DataFrame({column.name: matrix.astype(np.float64).ravel()})
        values = flat.select((prepared(feature) - mean) / std).to_series().to_numpy().reshape(matrix.shape)
        values = np.clip(values, -FLOAT32_MAX, FLOAT32_MAX)
    by_column = np.ascontiguousarray(np.where(present[:, None], values, 0.0).astype(np.float32).T)
    return [pl.Series(name, each) for name, each in zip(feature.columns, by_column, strict=True)]


def hashes_of(column: pl.Series) -> np.ndarray:
    """One uint64 a row: a sum of its numbers' bits, each times an odd number of its place (Carter and Wegman 1979)."""
    matrix, present = matrix_of(column)
    bits = np.ascontiguousarray(matrix).view(np.uint32)
    factors = np.random.default_rng(0).integers(0, 1 << 63, bits.shape[1], np.uint64) * np.uint64(2) + np.uint64(1)
    total = np.zeros(len(bits), np.uint64)
    for place, factor in enumerate(factors):
        total += bits[:, place].astype(np.uint64) * factor
    return np.where(present, total, _ABSENT)
