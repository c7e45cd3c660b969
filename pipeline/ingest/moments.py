"""Count, range, mean and variance of numeric columns, summed exactly.

Sums are kept as integers, so merging partial sums is associative: the figures, down to the last bit, do
not depend on how rows were cut into blocks. Logarithms are rounded to multiples of 2^-16 for the sums
(not in the data), which moves mean and deviation by less than 1e-5.

Vectors are dense features whose value is several numbers, such as an embedding of another model. A typed column of
vectors is an Array(Float32, width), null where missing. Float32 is what such vectors are stored as, so that 0.1 is
the same number out of a Parquet file and out of text. Statistics are of all numbers together; what a sketch counts is
the vector's length. -0 is 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import polars as pl

from pipeline.core.kernels import load_kernels
from pipeline.ingest.schema import DataSpec, DenseSpec
from pipeline.ingest.values import FLOAT32_MAX, RejectedRows, absent_in, nulls, shown

# Whole numbers below this have their logarithms looked up.
SMALL = 1024
# Lookup tables that are kept, one per feature.
_TABLES = 4096
# Maximum number of rows for which the sum of looked-up squares fits into 63 bits.
_MOST_ROWS = 1 << 20
LOG_QUANTUM = 1.0 / 65536
# Sums are in units of 2^-2200, below the square of the smallest float64.
_SHIFT = 2200
# A float64 is mantissa * 2^(exponent - 1075).
_ULP = 1075
# Cuts a float64 into halves whose products are exact.
_SPLIT = 2.0**27 + 1.0
# Columns that are measured together. In a wide log, all at once would be a copy of the block.
_TOGETHER = 64
# Deviation that is only rounding, as a share of the largest value: 0.3 and 0.1 + 0.2 differ by less.
_NOISE = 2.0**-48


@dataclass
class Moments:
    """Exact sums over the values seen: ``total`` and ``squares`` in units of 2^-_SHIFT."""

    count: int = 0
    minimum: float = math.inf
    maximum: float = -math.inf
    total: int = 0
    squares: int = 0

    def merge(self, other: Moments) -> None:
        self.count += other.count
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)
        self.total += other.total
        self.squares += other.squares

    @property
    def mean(self) -> float:
        """Mean; 0 where nothing was seen."""
        if not self.count:
            return 0.0
        return float(Fraction(self.total, self.count << _SHIFT))

    @property
    def std(self) -> float:
        """Population standard deviation; 0 where nothing was seen, and where values differ by rounding alone."""
        if not self.count:
            return 0.0
        mean = Fraction(self.total, self.count << _SHIFT)
        # Squares below the smallest float64 are 0, so the difference can be negative for values that small.
        std = math.sqrt(max(float(Fraction(self.squares, self.count << _SHIFT) - mean * mean), 0.0))
        return std if std > _NOISE * max(abs(self.minimum), abs(self.maximum)) else 0.0


def measure(frame: pl.DataFrame, expressions: list[pl.Expr], keep: pl.Series | None = None) -> list[Moments]:
    """Return moments of each expression (float64, nulls left out) over ``frame``, or over its rows of ``keep``."""
    moments = []
    for start in range(0, len(expressions), _TOGETHER):
        some = expressions[start : start + _TOGETHER]
        values = frame.select(value.alias(str(number)) for number, value in enumerate(some))
        if keep is not None:
            values = values.filter(keep)
        for column in values.get_columns():
            present = column.drop_nulls() if column.null_count() else column
            moments.append(_moments(present.to_numpy()))
    return moments


def _moments(values: np.ndarray) -> Moments:
    if not len(values):
        return Moments()
    kernels = load_kernels("rows")
    if kernels is None:
        moments = Moments(len(values), float(values.min()), float(values.max()))
    else:
        low, high, sums = kernels.whole_sums(values)
        moments = Moments(len(values), low, high)
        if sums is not None:
            moments.total, moments.squares = sums[0] << _SHIFT, sums[1] << _SHIFT
            return moments
    # Whole numbers (counts) are the rule. Their sums are exact below 2^53, in whatever order they are added.
    bound = max(abs(moments.minimum), abs(moments.maximum), 1.0) ** 2 * len(values)
    if bound < 2.0**62 and bool((np.rint(values) == values).all()):
        whole = values
        if bound >= 2.0**53:
            whole = values.astype(np.int64)
        # np.dot would let the threads of a BLAS spin until its next call, on cores that parse the next block.
        moments.total, moments.squares = int(whole.sum()) << _SHIFT, int(np.einsum("i,i", whole, whole)) << _SHIFT
    elif moments.minimum == moments.maximum:
        one = values[:1]
        moments.total, moments.squares = exact_sum(one) * len(values), exact_squares(one) * len(values)
    elif kernels is not None and (exact := kernels.exact_sums(values)) is not None:
        moments.total, moments.squares = exact[0] << _SHIFT - _ULP, exact[1] << _SHIFT - 2 * _ULP
    else:
        moments.total, moments.squares = exact_sum(values), exact_squares(values)
    return moments


def exact_squares(values: np.ndarray) -> int:
    """Return the exact sum of the squares of float64 ``values`` below 1e150, in units of 2^-2200.

    A square is the rounded product and its error, which is a float64 too (Dekker 1971). Without the error the variance
    of values far from 0 drowns in the rounding of their squares, and that of a constant comes out negative.
    """
    product = values * values
    scaled = values * _SPLIT
    high = scaled - (scaled - values)
    low = values - high
    error = ((high * high - product) + 2.0 * high * low) + low * low
    total = exact_sum(product)
    # Values with at most 26 significant bits, such as all of float32, have exact squares.
    if error.any():
        total += exact_sum(error)
    return total


def exact_sum(values: np.ndarray) -> int:
    """Return the exact sum of finite float64 ``values`` in units of 2^-2200, whatever their magnitudes.

    Mantissas are summed per exponent in two halves of 27 and 26 bits, each sum exact in float64.
    """
    total = 0
    for start in range(0, len(values), 1 << 24):
        mantissa, exponent = np.frexp(values[start : start + (1 << 24)])
        high = np.floor(mantissa * 2.0**27)
        low = (mantissa * 2.0**27 - high) * 2.0**26
        lowest = int(exponent.min())
        sums = (np.bincount(exponent - lowest, half) for half in (high, low))
        for i, (upper, lower) in enumerate(zip(*sums, strict=True)):
            total += ((int(upper) << 26) + int(lower)) << (lowest + i - 53 + _SHIFT)
    return total


def prepared(feature: DenseSpec) -> pl.Expr:
    """Return the feature's value as it is standardised: clipped, then sign(x) log1p(|x|), if its settings say so.

    It is float64, whatever typed rows keep it in: widening a column at a time takes less memory than a block at once.
    """
    value = pl.col(f"dense:{feature.name}").cast(pl.Float64)
    if feature.clip:
        value = value.clip(*feature.clip)
    if feature.logarithmic:
        value = value.sign() * value.abs().log1p()
    return value


def quantised_moments(frame: pl.DataFrame, feature: DenseSpec) -> Moments:
    """Return moments of the ``quantised`` values of typed rows; small whole numbers, such as counts, are looked up."""
    column = frame[f"dense:{feature.name}"]
    kernels, known = load_kernels("rows"), None
    if feature.logarithmic and kernels is not None:
        known = kernels.look_up_sums(column.to_arrow(), _quanta(feature))
    if known is None or frame.height > _MOST_ROWS:
        return measure(frame, [quantised(feature)])[0]
    (low, high), (total, squares), rest = known
    count = frame.height - column.null_count() - len(rest)
    moments = Moments()
    if count:
        moments = Moments(count, float(low), float(high), total << _SHIFT, squares << _SHIFT)
    if len(rest):
        moments.merge(measure(column.gather(rest).to_frame(), [quantised(feature)])[0])
    return moments


@lru_cache(_TABLES)
def _quanta(feature: DenseSpec) -> np.ndarray:
    # Returns `quantised` values of the whole numbers below SMALL, int32, by the same expression, so that bits are the
    # same.
    return small_numbers(feature).select(quantised(feature)).to_series().to_numpy().astype(np.int32)


def small_numbers(feature: DenseSpec) -> pl.DataFrame:
    """Return the whole numbers below SMALL as typed rows."""
    return pl.DataFrame({f"dense:{feature.name}": np.arange(SMALL, dtype=np.float64)})


def quantised(feature: DenseSpec) -> pl.Expr:
    """Return ``prepared`` for exact sums: a logarithm in whole multiples of LOG_QUANTUM."""
    value = prepared(feature)
    if feature.logarithmic:
        value = (value / LOG_QUANTUM).round()
    return value


# Hash of a missing vector.
_ABSENT = np.uint64(0x9AE16A3B2F90404F)


def vector_of(
    values: pl.Series, text: pl.Series | None, feature: DenseSpec, spec: DataSpec, rejected: RejectedRows
) -> pl.Series:
    """Return the typed column of ``feature``: of lists of numbers (or of their text), or of ``text``."""
    lists = values
    if text is not None:
        # Python and NumPy write lists with brackets around the numbers.
        plain = text.str.strip_chars().str.strip_prefix("[").str.strip_suffix("]")
        present = ~absent_in(text, spec) & (plain != "").fill_null(False)
        lists = plain.str.split(feature.separator).zip_with(present, nulls(pl.List(pl.String), len(text)))
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

    name = f"dense:{feature.name}"
    if not len(matrix):
        return pl.Series(name, [], dtype=pl.Array(pl.Float32, feature.width))
    column = pl.Series(name, matrix)
    if whole.all():
        return column
    frame = pl.DataFrame({name: column, "whole": whole})
    return frame.select(pl.when("whole").then(name).alias(name)).to_series()


def _numbers(lists: pl.Series, rows: np.ndarray, feature: DenseSpec, rejected: RejectedRows) -> np.ndarray:
    # Returns float32 [len(rows), width] of lists of that width; rejects rows with anything but finite numbers.
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
        rejected.add(~whole, f"{column} is missing", column=column)
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


def matrix_of(column: pl.Series) -> tuple[np.ndarray, np.ndarray]:
    """Return a typed column as (float32 [rows, width], 0 where missing; bool [rows], which rows have a vector)."""
    width = column.dtype.size  # type: ignore[attr-defined]
    present = column.is_not_null().to_numpy()
    values = column.to_numpy() if len(column) else np.zeros((0, width), np.float32)
    if not present.all():
        values = np.where(present[:, None], values, np.float32(0.0))
    return values, present


def lengths_of(column: pl.Series) -> np.ndarray:
    """Return the length (L2 norm, float64) of each vector; NaN where it is missing."""
    matrix, present = matrix_of(column)
    lengths = np.sqrt(np.einsum("ij,ij->i", matrix, matrix, dtype=np.float64))
    return np.where(present, lengths, np.nan)


def moments_of(column: pl.Series, feature: DenseSpec) -> tuple[Moments, Moments]:
    """Return moments of the numbers of all vectors that are not missing: as they are, and as they are standardised."""
    matrix, present = matrix_of(column)
    if not present.all():
        matrix = matrix[present]
    # One number a row, named like the column of vectors, because `quantised` reads that name.
    flat = pl.DataFrame({column.name: matrix.astype(np.float64).ravel()})
    raw, ready = measure(flat, [pl.col(column.name), quantised(feature)])
    return raw, ready


def scaled(column: pl.Series, feature: DenseSpec, mean: float, std: float) -> list[pl.Series]:
    """Return the dataset's columns (Float32) of a typed column, as ``feature`` says; a missing vector is zeros."""
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
    """Return one uint64 a row: the sum of its numbers' bits times odd numbers by place (Carter and Wegman 1979)."""
    # The factors are the same in every run, because hashes decide the split.
    matrix, present = matrix_of(column)
    bits = np.ascontiguousarray(matrix).view(np.uint32)
    factors = np.random.default_rng(0).integers(0, 1 << 63, bits.shape[1], np.uint64) * np.uint64(2) + np.uint64(1)
    total = np.zeros(len(bits), np.uint64)
    for place, factor in enumerate(factors):
        total += bits[:, place].astype(np.uint64) * factor
    return np.where(present, total, _ABSENT)
