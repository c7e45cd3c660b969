"""Synthetic logs of users: a click depends on the last item of the row's category that the user saw before."""

from __future__ import annotations

from datetime import date

import numpy as np
import polars as pl
import pytest

from pipeline.config import SyntheticConfig
from pipeline.core.errors import ConfigError
from pipeline.ingest import synthetic
from pipeline.ingest.ground_truth import sigmoid
from pipeline.ingest.synthetic import UserLog


def small(**changes) -> SyntheticConfig:
    fields = {"rows": 6000, "users": 120, "days": 3, "ids_per_feature": 60, "categories": 6, "history_effect": 2.0}
    return SyntheticConfig(**{**fields, **changes})


def log_of(config: SyntheticConfig, day: date | None = None) -> pl.DataFrame:
    return pl.concat(list(synthetic.chunks(config, 5, day)))


def test_the_true_probability_is_that_of_the_last_item_of_the_category():
    config = small()
    frame, truth, last = log_of(config), UserLog(config, 5), {}
    assert frame.height == 6000 and frame.columns[:4] == ["label", "user", "item", "category"]
    wanted = []
    for user, item, category in frame.sort("time", maintain_order=True).select("user", "item", "category").iter_rows():
        before = last.get((user, category))
        wanted.append(truth.bias + (truth.effects[int(before[1:])] if before else 0.0))
        last[user, category] = item
    ordered = frame.sort("time", maintain_order=True)
    np.testing.assert_allclose(ordered["true_probability"], sigmoid(np.array(wanted)), rtol=1e-6)
    assert ordered.group_by("user").agg(pl.col("time").n_unique() == pl.len())["time"].all()  # no ties of a user
    assert frame.group_by("user").agg(pl.col("category").n_unique())["category"].max() == 2
    assert frame["label"].cast(pl.Int32).mean() == pytest.approx(frame["true_probability"].mean(), abs=0.02)
    assert frame["day"].value_counts()["count"].to_list() == [2000] * 3


def test_a_day_goes_on_from_what_users_saw_on_the_days_before():
    first, second = (log_of(small(), date(2026, 1, number)) for number in (1, 2))
    assert (second["time"] >= second["day"] * 86_400).all() and second["day"].n_unique() == 1
    assert second["day"][0] == first["day"][0] + 1
    truth = UserLog(small(), 5)
    seen = first.sort("time").group_by("user", "category").agg(pl.col("item").last())
    new = second.sort("time").unique(["user", "category"], keep="first", maintain_order=True)
    joined = new.join(seen, on=["user", "category"], how="inner", suffix="_before", maintain_order="left")
    assert joined.height > 200
    effects = truth.effects[joined["item_before"].str.slice(1).cast(pl.Int64).to_numpy()]
    np.testing.assert_allclose(joined["true_probability"], sigmoid(truth.bias + effects), rtol=1e-6)


def test_fewer_rows_than_days_leave_days_without_rows():
    log = log_of(small(rows=5, days=7))
    assert log.height == log["day"].n_unique() == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"interests": 7}, r"interests is 7, expected at most .*categories=6"),
        ({"rows": 86_400 * 121}, r"expected at most a row a second for each"),
        ({"conversion_rate": 0.1}, r"has no conversions"),
    ],
)
def test_logs_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        small(**changes).check("data.synthetic")
