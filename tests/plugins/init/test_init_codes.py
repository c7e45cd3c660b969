"""Whole numbers that are codes are told from quantities by name, values and label together."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from pipeline.plugins.init.code_columns import why_codes
from pipeline.plugins.init.infer import _ID_NAMES, infer
from pipeline.plugins.init.sample import read_sample

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


@pytest.mark.parametrize("days", [(3, 4), (3, 4, 5, 6), (2, 3, 4, 5, 6)])
def test_of_few_values_the_name_decides(days):
    """A log of some days has some weekdays: their order is nothing that a model should go by."""
    values, clicks = pl.Series([float(days[row % len(days)]) for row in range(ROWS)]), np.arange(ROWS) // 7 % 2
    assert '"weekday" in its name' in why_codes("weekday", values, clicks)
    assert why_codes("column_3", values, clicks) == "" == why_codes("visits", values, clicks)


def test_weekends_of_their_own_click_rate_leave_a_weekday_a_code():
    rng = np.random.default_rng(3)
    weekday = rng.integers(1, 8, ROWS)
    clicks = (rng.random(ROWS) < np.where(weekday > 5, 0.6, 0.2)).astype(np.int64)
    assert why_codes("weekday", pl.Series(weekday).cast(pl.Float64), clicks)


def column(values: np.ndarray) -> pl.Series:
    return pl.Series(values).cast(pl.Float64)


def noise(rows: int = ROWS) -> np.ndarray:
    """Clicks that no column says anything of."""
    return (np.random.default_rng(5).random(rows) < 0.3).astype(np.int64)


@pytest.mark.parametrize("name", ["user", "customer", "ip", "item"])
def test_users_of_a_large_log_are_codes_though_most_have_one_row(name):
    rng = np.random.default_rng(3)
    why = why_codes(name, column(rng.integers(1, 1_000_000, 200_000)), noise(200_000))
    assert "values spread over their range" in why
    assert why_codes("column_3", column(rng.integers(1, 1_000_000, 200_000)), noise(200_000)) == ""
    tail = column(np.floor(rng.lognormal(8, 2, 200_000)))
    assert why_codes(name, tail, noise(200_000)) == "", "a quantity of as many values has a tail"


def test_users_that_are_numbered_by_frequency_are_codes():
    rng = np.random.default_rng(3)
    ranked = np.minimum(rng.zipf(1.3, 50_000), 10**6)
    assert "frequent values from the first on" in why_codes("user", column(ranked), noise(50_000))


def test_a_negative_value_stands_for_unknown_and_several_for_a_quantity():
    values, clicks = drawn("codes")
    unknown = np.where(np.random.default_rng(5).random(ROWS) < 0.05, -1, values.to_numpy())
    assert why_codes("city", column(unknown), clicks) and why_codes("column_3", column(unknown), clicks)
    assert why_codes("city", column(unknown - 2), clicks) == ""


def test_codes_by_frequency_are_codes_where_the_label_knows_no_order():
    rng = np.random.default_rng(3)
    share = 1 / (np.arange(60) + 5)
    rank = rng.choice(60, ROWS, p=share / share.sum())
    clicks = (rng.random(ROWS) < rng.uniform(0.1, 0.6, 60)[rank]).astype(np.int64)
    assert "click rates in no order" in why_codes("column_3", column(rank), clicks)
    assert why_codes("city", column(rank), noise()), "its histogram falls, as that of every ranking does"
    assert why_codes("column_3", column(rank), noise()) == ""


@pytest.mark.parametrize(
    "name",
    [
        "user_visits",
        "user_orders",
        "item_stock",
        "product_stars",
        "ad_position",
        "user_level",
        "items",
        "num_users",
        "number_of_items",
        "userAge",
        "age_of_user",
        "price_in_city",
        "velocity",
        "total_by_user",
    ],
)
def test_counts_of_a_named_thing_stay_quantities(name):
    assert why_codes(name, column(np.random.default_rng(3).poisson(4, ROWS)), noise()) == ""


@pytest.mark.parametrize(
    "name",
    [
        "store_number",
        "storeNumber",
        "flight_num",
        "customer_no",
        "account_number",
        "time_zone",
        "age_group",
        "price_category",
        "rate_code",
        "workclass",
        "sitecategory",
        "channel",
        "os",
        "weekday_of_click",
    ],
)
def test_what_is_numbered_or_grouped_is_a_code(name):
    place = np.random.default_rng(3).integers(0, 60, ROWS)
    assert "in its name" in why_codes(name, column(place), noise())


def test_plurals_count_for_less_than_their_words():
    values, clicks = drawn("codes")
    assert '"cities" in its name' in why_codes("cities", values, clicks)
    assert '"users" in its name' in why_codes("users", values, clicks)


def test_blocks_of_consecutive_values_and_few_of_many_are_told():
    values, clicks = drawn("codes")
    place = values.to_numpy()
    blocks = np.where(place < 30, 2000 + place, 7000 + place)
    assert "2 blocks of consecutive values" in why_codes("column_3", column(blocks), clicks)
    sentinel = np.where(place < 50, 17 + place, 999)
    assert "blocks" not in why_codes("column_3", column(sentinel), clicks), "ages, and one that is not known"
    few = np.random.default_rng(4).choice(30_000_000, 9, replace=False)[(place % 9).astype(int)]
    assert why_codes("cat", column(few), noise()) == "", "one sign of codes is not enough"
    assert "9 values out of" in why_codes("category", column(few), noise())
    prices = np.sort(np.random.default_rng(4).choice(2_000_000, 9, replace=False))[(place % 9).astype(int)] * 10
    assert why_codes("category", column(prices), noise()) == "", "prices are round"


@pytest.mark.parametrize("name", ["bid", "paid", "amount_paid", "prepaid", "valid", "maxBid", "rapid"])
def test_words_that_end_with_id_name_no_ids(name):
    assert not _ID_NAMES.search(name)


@pytest.mark.parametrize(
    "name", ["id", "user_id", "userId", "userID", "USERID", "adid", "C-ID", "movieid", "zip", "x.key"]
)
def test_names_of_ids_are_known(name):
    assert _ID_NAMES.search(name)


def test_whole_numbers_that_are_bids_are_no_ids(tmp_path):
    rng = np.random.default_rng(3)
    bids = rng.permutation(4000) + 17
    frame = pl.DataFrame({"label": (rng.random(4000) < 0.3).astype(int), "amount_paid": bids, "c": bids % 7})
    frame.write_csv(tmp_path / "log.csv")
    schema = infer(read_sample(str(tmp_path / "log.csv")))
    assert "amount_paid" in [guess.column for guess in schema.of("dense")]
