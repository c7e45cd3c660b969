"""Tells whole numbers that are codes (a user, a city, a weekday) from those that are quantities, by points."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import polars as pl

LEAST_POINTS = 3  # from which on a column is taken for codes; no single piece of evidence has as many
LEAST_ROWS = 100
SURE = 4.0  # standard deviations from which on a covariance of halves of the sample is no luck
SHARED = 0.3  # of what a value says of the label, that its neighbour says too: codes have less
ORDERED = 0.5  # quantities have more
LEAST_VALUES = 20  # by which the shape of a histogram is judged
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_CODE_WORDS = frozenset((
    "user", "item", "ad", "movie", "city", "country", "weekday", "id", "code", "key", "campaign", "advertiser",
    "category", "brand", "genre", "region", "state", "shop", "store", "site", "device", "product", "customer",
    "member", "publisher", "creative", "occupation", "gender", "zip", "type", "class",
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
    if len(distinct) < 3:
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
    if len(distinct) < LEAST_VALUES or logs.std() == 0:
        return
    alike = np.corrcoef(logs[:-1], logs[1:])[0, 1]
    if alike < 0.2:
        yield 1, "neighbouring values not alike in frequency"
    elif alike > 0.6:
        yield -1, "a smooth histogram"


def _by_label(place: np.ndarray, clicks: np.ndarray) -> Iterator[tuple[int, str]]:
    """Points by whether neighbours say the same of the label as the value itself does.

    The effects of values in one half of the rows are compared with those in the other half, of the same value and of
    the next one. Noise is not common to both halves, so few rows decide nothing.
    """
    if len(np.unique(clicks)) < 2:
        return
    half = np.random.default_rng(0).random(len(place)) < 0.5
    count = int(place.max()) + 1
    residuals = clicks - clicks.mean()
    first, second = (_effects(place[rows], residuals[rows], count) for rows in (half, ~half))
    same = first * second
    following = (first[:-1] * second[1:] + first[1:] * second[:-1]) / 2
    if same.sum() <= 0:
        return
    scale = clicks.var() * np.sqrt(count)  # of each sum, where values say nothing
    shared = following.sum() / same.sum()
    if same.sum() > SURE * scale and shared < SHARED:
        yield 2, "neighbouring values not alike in their click rate"
    elif following.sum() > SURE * scale and shared > ORDERED:
        yield -3, "click rates in order"


def _effects(place: np.ndarray, residuals: np.ndarray, count: int) -> np.ndarray:
    """Sum of ``residuals`` of each of ``count`` values over the root of its rows, float64 [count]."""
    rows = np.bincount(place, minlength=count)
    return np.asarray(np.bincount(place, residuals, count) / np.sqrt(np.maximum(rows, 1)))
