"""A split by day of a log of many days: what is counted is that of the days, at a cost that does not grow with them."""

from __future__ import annotations

import datetime as dt
import random

import numpy as np
import polars as pl
import pytest

from pipeline.config import SparseFeature, SplitConfig
from pipeline.ingest.statistics_pass import Partial, SplitCounts

from .conftest import csv_config


def write(path, days: int, rows: int = 600):
    """Rows of ``days`` days in no order of time."""
    rng, first = random.Random(0), dt.date(2020, 1, 1)
    dates = [first + dt.timedelta(days=rng.randrange(days)) for _ in range(rows)]
    lines = [f"{rng.random() < 0.3:d},{rng.random():.3f},c{rng.randrange(30)},{day}" for day in dates]
    path.write_text("\n".join(["label,x,c,d", *lines]) + "\n")
    return path


def config_of(path, **split):
    settings = SplitConfig(**{"by": "day", "test_days": 3, **split})
    return csv_config(path, sparse={"c": SparseFeature()}, day_column="d", split=settings)


def day_by_day(self, frame, coded, looked_at):
    """What ``SplitCounts._add_days`` stands for: every day is counted by itself until it is no test day."""
    days = frame["day"].to_numpy()
    none = np.zeros(frame.height, bool) if looked_at is None else looked_at.to_numpy()
    for day in np.unique(days).tolist():
        part = self._counts_of_day(day)
        part.train.add(frame, coded, (days == day) & ~none)
        part.validation.add(frame["label"].filter(pl.Series((days == day) & none)))
        self._finalize_days()


@pytest.mark.parametrize("days", [2, 4, 200])
@pytest.mark.parametrize("share", [0.0, 0.2])
def test_it_is_what_the_days_give_one_by_one(run_ingest, tmp_path, monkeypatch, days, share):
    config = config_of(write(tmp_path / "a.csv", days), test_days=min(3, days - 1), validation_share=share)
    found = run_ingest(config)
    monkeypatch.setattr(SplitCounts, "_add_days", day_by_day)
    expected = run_ingest(config)
    names = [name for name in expected.artifact.files if name != "sources.json"]
    assert {name: found.artifact.files[name].checksum for name in names} == {
        name: expected.artifact.files[name].checksum for name in names
    }
    assert found.summary["rows_test"] > 0


def test_a_block_is_counted_as_often_for_many_days_as_for_a_few(run_ingest, tmp_path, monkeypatch):
    counted, add = [], Partial.add
    monkeypatch.setattr(Partial, "add", lambda self, *arguments: (counted.append(1), add(self, *arguments))[1])
    costs = []
    for days in (4, 200):
        run_ingest(config_of(write(tmp_path / f"{days}.csv", days)))
        costs.append(len(counted))
        counted.clear()
    assert costs == [4, 4]


def test_many_test_days_cost_their_rows_and_not_a_block_each(run_ingest, tmp_path, monkeypatch):
    rows, add = [], Partial.add

    def counted(self, frame, *arguments):
        rows.append(frame.height)
        add(self, frame, *arguments)

    monkeypatch.setattr(Partial, "add", counted)
    run_ingest(config_of(write(tmp_path / "a.csv", 200), test_days=100))
    assert 600 <= sum(rows) <= 2 * 600
