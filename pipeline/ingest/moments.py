"""Count, range, mean and variance of numeric columns, summed exactly.

Sums are kept as integers, so merging partial sums is associative: the figures, down to the last bit, do
not depend on how rows were cut into blocks. Logarithms are rounded to multiples of 2^-16 for the sums
(not in the data), which moves mean and deviation by less than 1e-5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import polars as pl

from pipeline.ingest.schema import DenseSpec
from pipeline.native.column_kernels import exact_sums, looked_up_sums, whole_sums

# Whole numbers below are looked up where they would be taken the logarithm of.
SMALL = 1024
# Lookup tables that are kept, one a feature.
_TABLES = 4096
# Rows whose squares fit into 63 bits.
_MOST_ROWS = 1 << 20
LOG_QUANTUM = 1.0 / 65536
# Below the exponent of the square of the smallest float64.
_SHIFT = 2200
# A float64 is mantissa * 2^(exponent - 1075).
_ULP = 1075
# Cuts a float64 into halves whose products are exact.
_SPLIT = 2.0**27 + 1.0
# Columns measured together: of a wide log, all at once would be a copy of the block.
_TOGETHER = 64
# Share of the largest value: 0.3 and 0.1 + 0.2 differ by less.
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
        """Take in what ``other`` saw."""
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
    """Moments of each expression (float64, nulls left out) over ``frame``, or over its rows of ``keep``."""
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
    low, high, sums = whole_sums(values)
    moments = Moments(len(values), low, high)
    if sums is not None:
        moments.total, moments.squares = sums[0] << _SHIFT, sums[1] << _SHIFT
        return moments
    # Whole numbers (counts) are the rule. Their sums are exact below 2^53, in whatever order they are added.
    bound = max(abs(moments.minimum), abs(moments.maximum), 1.0) ** 2 * len(values)
    if bound < 2.0**62 and bool((np.rint(values) == values).all()):
        whole = values if bound < 2.0**53 else values.astype(np.int64)
        # Not np.dot: the threads of a BLAS wait for its next call by spinning, on cores that parse the next block.
        moments.total, moments.squares = int(whole.sum()) << _SHIFT, int(np.einsum("i,i", whole, whole)) << _SHIFT
    elif moments.minimum == moments.maximum:
        one = values[:1]
        moments.total, moments.squares = exact_sum(one) * len(values), exact_squares(one) * len(values)
    elif (exact := exact_sums(values)) is not None:
        moments.total, moments.squares = exact[0] << _SHIFT - _ULP, exact[1] << _SHIFT - 2 * _ULP
    else:
        moments.total, moments.squares = exact_sum(values), exact_squares(values)
    return moments


def exact_squares(values: np.ndarray) -> int:
    """Exact sum of the squares of float64 ``values`` below 1e150, in units of 2^-2200.

    A square is the rounded product and its error, which is a float64 too (Dekker 1971). Without the error the variance
    of values far from 0 drowns in the rounding of their squares, and that of a constant comes out negative.
    """
    product = values * values
    scaled = values * _SPLIT
    high = scaled - (scaled - values)
    low = values - high
    error = ((high * high - product) + 2.0 * high * low) + low * low
    # Values with at most 26 significant bits, such as all of float32, have exact squares.
    return exact_sum(product) + (exact_sum(error) if error.any() else 0)


def exact_sum(values: np.ndarray) -> int:
    """Exact sum of finite float64 ``values`` in units of 2^-2200, whatever their magnitudes.

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
    """The feature's value as it is standardised: clipped, then sign(x) log1p(|x|), as far as its settings say so.

    In float64, whatever typed rows keep it in: widening a column at a time takes less memory than a block at once.
    """
    value = pl.col(f"dense:{feature.name}").cast(pl.Float64)
    if feature.clip:
        value = value.clip(*feature.clip)
    if feature.logarithmic:
        value = value.sign() * value.abs().log1p()
    return value


def quantised_moments(frame: pl.DataFrame, feature: DenseSpec) -> Moments:
    """Moments of the ``quantised`` values of typed rows; of small whole numbers, which counts mostly are, looked up."""
    column = frame[f"dense:{feature.name}"]
    known = None
    if feature.logarithmic:
        known = looked_up_sums(column.to_arrow(), _quanta(feature))
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
    # `quantised` values of the whole numbers below SMALL, int32: of the very expression, so bits are the same.
    return small_numbers(feature).select(quantised(feature)).to_series().to_numpy().astype(np.int32)


def small_numbers(feature: DenseSpec) -> pl.DataFrame:
    """The whole numbers below SMALL as typed rows."""
    return pl.DataFrame({f"dense:{feature.name}": np.arange(SMALL, dtype=np.float64)})


def quantised(feature: DenseSpec) -> pl.Expr:
    """``prepared`` for exact sums: a logarithm in whole multiples of LOG_QUANTUM."""
    value = prepared(feature)
    if feature.logarithmic:
        value = (value / LOG_QUANTUM).round()
    return value
