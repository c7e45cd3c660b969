"""Tells whole numbers that are codes (a user, a city, a weekday) from those that are quantities, by points.

For ``nightjar init``, which guesses a schema from a sample. Ingestion uses nothing of it, and its codes are something
else: places among the distinct hashes of a block (``ids.Coded``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import takewhile

import numpy as np
import polars as pl

# Minimum points of a column that is taken for codes; no single piece of evidence has as many.
LEAST_POINTS = 3
# The same threshold for few small values: a name suffices if nothing speaks against it.
LEAST_OF_FEW = 2
# The largest of few values, such as weekdays and kinds of devices; larger ones may be prices.
LARGEST_OF_FEW = 99
LEAST_ROWS = 100
# Standard deviations above which a covariance of the halves of the sample is not chance.
SURE = 4.0
# Share of what values say about the label that a curve over their order leaves unexplained: codes leave more.
LEFT = 0.3
# Minimum number of values to judge the shape of a histogram.
LEAST_VALUES = 20
# Minimum number of values of a histogram with one peak; with fewer, codes have one peak by chance.
LEAST_PEAK = 6
# Minimum number of values to judge their order, because a curve fits fewer in any case.
LEAST_RATES = 5
# Minimum number of values for which a curve through them is not chance, and speaks against codes.
LEAST_ORDERED = 10
# Minimum average number of rows per value to judge frequencies.
LEAST_COUNT = 3
# Minimum number of consecutive values that make a block.
LEAST_BLOCK = 5
# Share of a span's values that must occur for it to have almost no gaps.
GAPLESS = 0.9
# Number of values above which a quantity has a tail.
MANY = 1000
# Minimum share of the span that each quarter of the rows takes up if values are spread.
SPREAD = 0.05
# Largest value that may be the most frequent one if codes begin with frequent ones.
FIRST = 10
# Share of a span's values below which those that occur are few of the possible ones.
FEW = 0.001
# Rows per value at which other values would have been seen, too.
FEW_ROWS = 100
# Share of multiples of five above which few values are prices and the like.
MOST_ROUND = 0.5
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_PREPOSITIONS = frozenset(("of", "in", "at", "by", "on", "per", "from", "for", "to"))  # what stands before them counts
# Minimum letters of a listed word by whose ending longer words are known: workclass, but not velocity by city.
_LEAST_ENDING = 5


def _words_of(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_CODE_WORDS = _words_of(
    """
    user visitor item ad movie city country weekday dow campaign advertiser brand genre region state shop store
    site website device product customer member publisher creative occupation gender sex race status
    relationship ip app os channel browser carrier network slot placement banner job education language locale
    seller vendor author artist news hotel route airport department account flight platform domain province
    district currency weather daytime
    """
)
# These make a code of the word before them, even of a quantity: age_group, price_category, time_zone.
_GROUP_WORDS = _words_of(
    """
    id code key zip group bucket bracket band zone timezone category segment cluster type class
    """
)
_QUANTITY_WORDS = _words_of(
    """
    age price count cnt amount duration year years yr hours minutes seconds days timestamp time gain loss cost
    total sum size length width height weight score rating rate rank income distance views clicks visits orders
    impressions stock stars position quantity qty volume balance budget salary revenue sales population percent
    ratio speed temperature latency delay discount bid fee tip feedback pct
    """
)
# These make a quantity (num_visits), unless they number one of the things below.
_NUMBER_WORDS = ("num", "number", "no", "nr", "nbr")
_NUMBERED = _words_of(
    """
    account customer department device flight gate invoice item line member order part phone product room route
    seat serial shop store train user vendor
    """
)
_KINDS = {
    **dict.fromkeys(_CODE_WORDS, "code"),
    **dict.fromkeys(_GROUP_WORDS, "group"),
    **dict.fromkeys(_QUANTITY_WORDS, "quantity"),
    **dict.fromkeys(_NUMBER_WORDS, "number"),
}
# Points for or against codes, and the reasons.
Found = Iterator[tuple[int, str]]


def why_codes(name: str, numbers: pl.Series, clicks: np.ndarray) -> str:
    """Say why a column of numbers is taken for codes; "" if it is taken for a quantity.

    Args:
        name: Name of the column.
        numbers: Float64, null where missing. A single negative value, most often -1, stands for an unknown one.
        clicks: Label of each row, 0 or 1.
    """
    here = numbers.is_not_null().to_numpy()
    values, clicks = numbers.drop_nulls().to_numpy(), clicks[here]
    negative = values < 0
    if len(np.unique(values[negative])) == 1:
        values, clicks = values[~negative], clicks[~negative]
    if len(values) < LEAST_ROWS or (values != np.floor(values)).any() or values.min() < 0:
        return ""
    distinct, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    if len(distinct) < 2:
        return ""
    by_name, by_label = list(_by_name(name)), list(_by_label(place, clicks))
    found = [*by_name, *_by_values(distinct, counts), *_by_neighbours(counts), *by_label]
    # Codes that were given out by frequency have the histogram of a count, so the shape is no evidence if the label
    # speaks for codes.
    if not any(points > 0 for points, _ in by_label):
        found += _against_by_shape(counts)
    named = any(points == 2 for points, _ in by_name)
    if named:
        found += _by_many(values, distinct, counts)
    few = named and len(distinct) < LEAST_VALUES and distinct[-1] <= LARGEST_OF_FEW
    least = LEAST_OF_FEW if few else LEAST_POINTS
    total, reasons = 0, []
    for points, words in found:
        total += points
        if points > 0:
            reasons.append(words)
    if total < least:
        return ""
    return "codes, not a quantity: " + ", ".join(reasons)


def _by_name(name: str) -> Found:
    # Yields points for words of codes in `name`, and against for words of quantities; the last word says what it is.
    words = list(map(str.lower, _WORDS.findall(name)))
    if not words:
        return
    kinds = list(map(_kind, words))
    own = list(takewhile(lambda word: word not in _PREPOSITIONS, words)) or words
    head, before = own[-1], own[-2] if len(own) > 1 else ""
    kind = _kind(head)
    if kind == "number" and before in _NUMBERED:
        yield 2, f'"{before} {head}" in its name'
    elif kind == "group":
        yield 2, f'"{head}" in its name'
    elif "quantity" in kinds or "number" in kinds:
        yield -4, "its name"
    elif kind == "code":
        yield 2, f'"{head}" in its name'
    elif any(kinds):
        # The name is about a user or users, say: it may be an id of theirs or a number of them. Only kinds of codes are
        # left here.
        codes = [word for word, each in zip(words, kinds, strict=True) if each]
        yield 1, f'"{codes[-1]}" in its name'


def _kind(word: str) -> str:
    # Returns what a word of a name stands for: code | codes | group | quantity | number; "" if no list has it. `codes`
    # is a plural, which is as often a count. Longer words are known by their end: workclass, sitecategory.
    if word in _KINDS:
        return _KINDS[word]
    single = f"{word[:-3]}y" if word.endswith("ies") else word.removesuffix("s")
    if single in _KINDS:
        kind = _KINDS[single]
        return "codes" if kind in ("code", "group") else kind
    for ending in (*_GROUP_WORDS, *_CODE_WORDS):
        if len(ending) >= _LEAST_ENDING and word.endswith(ending):
            return _KINDS[ending]
    return ""


def _by_values(distinct: np.ndarray, counts: np.ndarray) -> Found:
    # Yields points for values that somebody gave out: from 0 or 1 without gaps, in blocks, or few out of very many.
    span = distinct[-1] - distinct[0] + 1
    if distinct[0] <= 1 and len(distinct) >= GAPLESS * span:
        yield 1, f"values from {distinct[0]:g} to {distinct[-1]:g} almost without gaps"
        return
    if distinct[0] == 0 and counts[0] > 0.5 * counts.sum():
        yield -2, "mostly 0, and a tail"
        return
    # Codes are given out a block at a time, so there are several blocks. Ages are a single one, and a sentinel is none.
    steps = np.diff(distinct)
    blocks = np.diff(np.flatnonzero(np.append(steps != 1, True)), prepend=-1)
    long = blocks[blocks >= LEAST_BLOCK]
    if len(long) > 1 and long.sum() >= GAPLESS * len(distinct) and steps.max() > len(distinct):
        yield 1, f"{len(long)} blocks of consecutive values"
        return
    # Quantities of many rows have few values only if they are rounded, as prices and limits are.
    few = len(distinct) < FEW * span and counts.mean() >= FEW_ROWS
    if few and (distinct % 5 == 0).mean() <= MOST_ROUND:
        yield 1, f"{len(distinct):,} values out of {span:,.0f}"


def _by_neighbours(counts: np.ndarray) -> Found:
    # Yields a point if the frequency of a value says nothing about its neighbour's, because quantities have a shape.
    logs = np.log(counts)
    if len(counts) < LEAST_VALUES or counts.mean() < LEAST_COUNT or logs.std() == 0:
        return
    if _likeness(logs) < 0.2:
        yield 1, "neighbouring values not alike in frequency"


def _likeness(logs: np.ndarray) -> float:
    # Returns the correlation of each of `logs` with the next one; NaN if all, except for one at an end, are equal.
    if np.ptp(logs[:-1]) == 0 or np.ptp(logs[1:]) == 0:
        return math.nan
    return float(np.corrcoef(logs[:-1], logs[1:])[0, 1])


def _against_by_shape(counts: np.ndarray) -> Found:
    # Yields a point against codes if the histogram is like a quantity's: smooth, or of few values with one peak. A
    # histogram that falls from the first value on says nothing: codes that were given out by frequency have it, too.
    logs, ranks = np.log(counts), np.argsort(np.argsort(-counts, kind="stable"))
    if len(counts) >= LEAST_VALUES and counts.mean() >= LEAST_COUNT and logs.std() > 0:
        falls = np.corrcoef(ranks, np.arange(len(counts)))[0, 1] > 0.8
        if _likeness(logs) > 0.6 and not falls:
            yield -1, "a smooth histogram"
    elif LEAST_PEAK <= len(counts) < LEAST_VALUES:
        # The rare values at the ends of a count occur by chance.
        frequent = counts[counts > 0.02 * counts.max()]
        steps, peak = np.diff(frequent), int(np.argmax(frequent))
        one_peak = peak > 0 and (steps[:peak] > 0).all() and (steps[peak:] < 0).all()
        # Days of a week are about as frequent as each other.
        if one_peak and counts.max() > 3 * counts.min():
            yield -1, "one peak"


def _by_many(values: np.ndarray, distinct: np.ndarray, counts: np.ndarray) -> Found:
    # Yields a point for very many values if the name says code, because so many values of a quantity would have a tail.
    # This finds a column of users in a log that has one or two rows of each, in which the label can say nothing.
    if len(distinct) <= MANY:
        return
    low, *_, high = quarters = np.quantile(values, [0, 0.25, 0.5, 0.75, 1])
    if (np.diff(quarters) > SPREAD * (high - low)).all():
        yield 1, f"{len(distinct):,} values spread over their range"
    # Codes that were given out by frequency, or as they appeared: the first ones are the most frequent.
    elif distinct[np.argmax(counts)] <= FIRST and (distinct <= quarters[3]).sum() >= GAPLESS * (quarters[3] - low + 1):
        yield 1, "frequent values from the first on without gaps"


def _by_label(place: np.ndarray, clicks: np.ndarray) -> Found:
    # Yields points by whether the order of values explains their click rates. What values say about the label is the
    # covariance of their click rates in two halves of the rows. The halves share no noise, so few rows decide nothing.
    # A parabola over the values' rank, fitted in each half, takes away what their order says.
    count = int(place.max()) + 1
    if count < LEAST_RATES or len(np.unique(clicks)) < 2:
        return
    half = np.random.default_rng(0).random(len(place)) < 0.5
    residuals = clicks - clicks.mean()
    halves = [_effects(place[rows], residuals[rows], count) for rows in (half, ~half)]
    covariance = float((halves[0][0] * halves[1][0]).sum())
    left = float((halves[0][1] * halves[1][1]).sum())
    # SURE standard deviations of the sum if values say nothing.
    sure = SURE * clicks.var() * np.sqrt(count)
    if left > sure and left > LEFT * covariance:
        yield 2, "click rates in no order of the values"
    elif count >= LEAST_ORDERED and covariance > sure and left <= LEFT * covariance:
        yield -3, "click rates in order"


def _effects(place: np.ndarray, residuals: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    # Returns the effects of `count` values times the root of their rows, and the same without a parabola over their
    # rank, float64 [count]. Both have the variance of `residuals` if values say nothing.
    rows = np.bincount(place, minlength=count)
    root = np.sqrt(rows)
    effects = np.bincount(place, residuals, count) / np.maximum(root, 1)
    rank = (np.cumsum(rows) - rows / 2) / rows.sum()
    powers = np.stack([root, root * rank, root * rank**2], axis=1)
    fitted = powers @ np.linalg.lstsq(powers, effects, rcond=None)[0]
    return effects, effects - fitted
