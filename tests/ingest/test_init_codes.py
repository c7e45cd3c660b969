"""Whole numbers that are codes are told from quantities by name, values and label together."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from pipeline.ingest.codes import why_codes

ROWS = 8000


def drawn(kind: str) -> tuple[pl.Series, np.ndarray]:
    """A column of ``kind`` and its clicks, whose rates follow its values."""
    rng = np.random.default_rng(3)
    if kind == "codes":
        place = rng.integers(0, 60, ROWS)
        values, rate = place, rng.uniform(0.1, 0.6, 60)[place]
    elif kind == "gaps":
        place = rng.integers(0, 60, ROWS)
        values, rate = np.sort(rng.choice(100_000, 60, replace=False))[place], rng.uniform(0.1, 0.6, 60)[place]
    elif kind == "tail":
        values = np.where(rng.random(ROWS) < 0.9, 0, rng.choice([3103, 7688, 15024, 99999], ROWS))
        rate = np.where(values > 5000, 0.9, 0.2)
    else:
        values = np.clip(np.round(rng.normal(40, 12, ROWS)), 17, 90)
        rate = 1 / (1 + np.exp(-(values - 45) / 12))
    return pl.Series(values).cast(pl.Float64), (rng.random(ROWS) < rate).astype(np.int64)


@pytest.mark.parametrize("kind", ["codes", "gaps"])
def test_codes_without_a_name_are_told_by_values_and_label(kind):
    why = why_codes("column_3", *drawn(kind))
    assert why.startswith("codes, not a quantity: ") and "click rates in no order" in why


@pytest.mark.parametrize("kind", ["age", "tail"])
def test_quantities_without_a_name_stay_quantities(kind):
    assert why_codes("column_3", *drawn(kind)) == ""


def test_a_name_alone_decides_nothing_and_few_rows_give_no_points():
    values, clicks = drawn("age")
    assert why_codes("userAge", values, clicks) == "" == why_codes("city", values, clicks)
    some, few = drawn("codes")
    assert why_codes("column_3", some[:99], few[:99]) == "" == why_codes("price", some, few)


@pytest.mark.parametrize("name", ["weekday", "shownWeekday", "WEEKDAY", "weekday_of_click"])
def test_names_of_codes_count_with_consecutive_values(name):
    weekday, clicks = pl.Series(np.arange(ROWS) % 7, dtype=pl.Float64), np.arange(ROWS) // 7 % 2
    assert '"weekday" in its name' in why_codes(name, weekday, clicks)
    assert why_codes("column_3", weekday, clicks) == "", "values alone are too little"


def test_weekends_of_their_own_click_rate_leave_a_weekday_a_code():
    rng = np.random.default_rng(3)
    weekday = rng.integers(1, 8, ROWS)
    clicks = (rng.random(ROWS) < np.where(weekday > 5, 0.6, 0.2)).astype(np.int64)
    assert why_codes("weekday", pl.Series(weekday).cast(pl.Float64), clicks)
