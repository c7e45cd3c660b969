"""Tells whole numbers that are codes (a user, a city, a weekday) from those that are quantities, by points."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import polars as pl

LEAST_POINTS = 3  # from which on a column is taken for codes; no single piece of evidence has as many
LEAST_ROWS = 100
SURE = 4.0  # standard deviations from which on a covariance of halves of the sample is no luck
LEFT = 0.3  # of what values say of the label, that a curve by their order leaves: codes have more
LEAST_VALUES = 20  # by which the shape of a histogram is judged
LEAST_RATES = 5  # values by which order is judged: a curve goes through fewer
LEAST_ORDERED = 10  # values from which on a curve through them is no luck, and speaks against codes
LEAST_COUNT = 3  # rows a value on average, by which frequencies are judged
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_CODE_WORDS = frozenset((
    "user", "item", "ad", "movie", "city", "country", "weekday", "id", "code", "key", "campaign", "advertiser",
    "category", "brand", "genre", "region", "state", "shop", "store", "site", "device", "product", "customer",
    "member", "publisher", "creative", "occupation", "gender", "sex", "race", "status", "zip", "type", "class",
    "relationship",
))  # fmt: skip
_QUANTITY_WORDS = frozenset((
    "age", "price", "count", "cnt", "num", "number", "amount", "duration", "year", "years", "hours", "minutes",
    "seconds", "days", "timestamp", "time", "gain", "loss", "cost", "total", "sum", "size", "length", "width",
    "height", "weight", "score", "rating", "rate", "rank", "income", "distance", "views", "clicks",
))  # fmt: skip


def why_codes(name: str, numbers: pl.Series, clicks: np.ndarray) -> str:
    """Why a column of numbers is taken for codes, in words; "" where it is taken for a quantity.

    Args:
        name: Of the column.
        numbers: Float64, null where missing.
        clicks: Label of each row, 0 or 1.
    """
    here = numbers.is_not_null().to_numpy()
    values = numbers.drop_nulls().to_numpy()
    if len(values) < LEAST_ROWS or (values != np.floor(values)).any() or values.min() < 0:
        return ""
    distinct, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    if len(distinct) < 2:
        return ""
    found = [*_by_name(name), *_by_values(distinct, counts), *_by_label(place, clicks[here])]
    if sum(points for points, _ in found) < LEAST_POINTS:
        return ""
    return "codes, not a quantity: " + ", ".join(words for points, words in found if points > 0)


def _by_name(name: str) -> Iterator[tuple[int, str]]:
    """Points for words of codes in ``name``, and against for words of quantities."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if any(word in _QUANTITY_WORDS for word in words):
        yield -4, "its name"
    elif code := next((word for word in words if word in _CODE_WORDS), None):
        yield 2, f'"{code}" in its name'


def _by_values(distinct: np.ndarray, counts: np.ndarray) -> Iterator[tuple[int, str]]:
    """Points for values without gaps from 0 or 1 and frequencies in no order; against for a tail, or a smooth shape."""
    span = distinct[-1] - distinct[0] + 1
    if distinct[0] <= 1 and len(distinct) >= 0.9 * span:
        yield 1, f"values from {distinct[0]:g} to {distinct[-1]:g} almost without gaps"
    elif distinct[0] == 0 and counts[0] > 0.5 * counts.sum():
        yield -2, "mostly 0, and a tail"
    logs = np.log(counts)
    if len(distinct) < LEAST_VALUES or counts.mean() < LEAST_COUNT or logs.std() == 0:
        return
    alike = np.corrcoef(logs[:-1], logs[1:])[0, 1]
    if alike < 0.2:
        yield 1, "neighbouring values not alike in frequency"
    elif alike > 0.6:
        yield -1, "a smooth histogram"


def _by_label(place: np.ndarray, clicks: np.ndarray) -> Iterator[tuple[int, str]]:
    """Points by whether the order of values explains their click rates.

    What values say is the covariance of their click rates in two halves of the rows; noise is not common to both, so
    few rows decide nothing. A parabola by the values' rank, fitted in each half, takes away what their order says.
    """
    count = int(place.max()) + 1
    if count < LEAST_RATES or len(np.unique(clicks)) < 2:
        return
    half = np.random.default_rng(0).random(len(place)) < 0.5
    residuals = clicks - clicks.mean()
    halves = [_effects(place[rows], residuals[rows], count) for rows in (half, ~half)]
    said = float((halves[0][0] * halves[1][0]).sum())
    left = float((halves[0][1] * halves[1][1]).sum())
    sure = SURE * clicks.var() * np.sqrt(count)  # the sum's deviation where values say nothing
    if left > sure and left > LEFT * said:
        yield 2, "click rates in no order of the values"
    elif count >= LEAST_ORDERED and said > sure and left <= LEFT * said:
        yield -3, "click rates in order"


def _effects(place: np.ndarray, residuals: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Effects of ``count`` values times the root of their rows, and those without a parabola by rank, float64 [count].

    Either has the variance of ``residuals`` where values say nothing.
    """
    rows = np.bincount(place, minlength=count)
    root = np.sqrt(rows)
    effects = np.bincount(place, residuals, count) / np.maximum(root, 1)
    rank = (np.cumsum(rows) - rows / 2) / rows.sum()
    powers = np.stack([root, root * rank, root * rank**2], axis=1)
    fitted = powers @ np.linalg.lstsq(powers, effects, rcond=None)[0]
    return effects, effects - fitted
