"""The split by hours: a day's last hours are its test rows, and nothing that is fitted sees them."""

import dataclasses
import datetime

import numpy as np
import polars as pl
import pytest

from pipeline.config import Config, DataConfig, HardwareConfig, SparseFeature, SplitConfig
from pipeline.core.errors import ConfigError, DataError
from pipeline.ingest.engines import LocalEngine
from pipeline.ingest.times import hour_of
from pipeline.ingest.values import RejectedRows

from .conftest import csv_config
from .test_days import Nights, write_day

DAY = "2026-01-01"


def by_hours(hours: int = 2) -> SplitConfig:
    return SplitConfig(by="hours", test_hours=hours)


def rows_of(day: str, hours=range(24), minutes=(0, 59)) -> list[str]:
    """Two rows an hour; dense x is the hour, the id names it."""
    return [
        f"{(hour + minute) % 2},{hour},id{hour},{day} {hour:02}:{minute:02}:30" for hour in hours for minute in minutes
    ]


def config_of(folder, day: str | None = DAY, hours: int = 2, **changes) -> Config:
    fields = {"timestamp": "t", "day": day, "split": by_hours(hours), **changes}
    return csv_config(fields.pop("path", f"{folder}/{{day}}/*.csv"), **fields)


@pytest.fixture
def nights(tmp_path):
    return Nights(tmp_path)


def test_the_last_hours_of_the_day_are_test_rows_and_nothing_is_fitted_on_them(nights, tmp_path):
    write_day(tmp_path, DAY, rows_of(DAY)[::-1])
    dataset = nights.ingest(config_of(tmp_path))
    assert dataset.schema.rows == {"train": 44, "test": 4}
    known = dict(dataset.vocab("c").select("id", "row").iter_rows())
    assert set(known) == {f"id{hour}" for hour in range(22)}
    assert dataset.split("test")["c"].to_list() == [1] * 4
    fitted = dataset.json("transforms.json")["dense"]["x"]
    logs = np.log1p(np.repeat(np.arange(22), 2))
    assert (fitted["mean"], fitted["std"]) == pytest.approx((logs.mean(), logs.std()), abs=1e-5)
    assert "hour" not in dataset.split("train").columns
    one = nights.ingest(config_of(tmp_path, hours=1))
    assert one.schema.rows == {"train": 46, "test": 2}
    assert one.artifact.key != dataset.artifact.key


def test_blocks_workers_and_order_change_no_byte(nights, run_ingest, tmp_path, monkeypatch):
    write_day(
        tmp_path, DAY, [*rows_of(DAY, minutes=range(60)), "1,1,late,2026-01-01 noon", "1,1,other,2026-01-02 01:00:00"]
    )
    config = config_of(tmp_path)
    whole = run_ingest(config)
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 3000)
    monkeypatch.setattr("pipeline.ingest.stage.engine_of", lambda _: LocalEngine(3))
    cut = run_ingest(dataclasses.replace(config, ingest=dataclasses.replace(config.ingest, block_mib=1)))
    assert cut.checksums == whole.checksums
    assert whole.schema.rows == {"train": 22 * 60, "test": 120}
    assert [entry["reason"] for entry in whole.quarantine] == [
        "t is '2026-01-01 noon', expected seconds since 1970 or YYYY-MM-DD HH:MM:SS",
        "the row is of 2026-01-02, expected 2026-01-01",
    ]


@pytest.mark.slow
@pytest.mark.ray
def test_ray_makes_the_dataset_that_threads_make(run_ingest, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    write_day(tmp_path, DAY, rows_of(DAY, minutes=range(60)))
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 3000)
    config = config_of(tmp_path)
    local = run_ingest(dataclasses.replace(config, ingest=dataclasses.replace(config.ingest, block_mib=1)))
    by_ray = run_ingest(
        dataclasses.replace(config, ingest=dataclasses.replace(config.ingest, block_mib=1, engine="ray"))
    )
    assert by_ray.checksums == local.checksums
    assert local.schema.rows == {"train": 22 * 60, "test": 120}


def test_of_a_range_the_last_day_is_split(nights, tmp_path):
    for day in (DAY, "2026-01-02"):
        write_day(tmp_path, day, rows_of(day))
    dataset = nights.ingest(config_of(tmp_path, day=f"{DAY}..2026-01-02"))
    assert dataset.schema.rows == {"train": 48 + 44, "test": 4}
    assert dataset.split("test")["day"].unique().to_list() == [20_455]


def test_days_go_on_and_late_hours_of_a_day_delivered_again_are_taken_in(nights, tmp_path):
    write_day(tmp_path, DAY, rows_of(DAY))
    first = nights.ingest(config_of(tmp_path))
    write_day(tmp_path, "2026-01-02", [*rows_of("2026-01-02"), f"1,3,late,{DAY} 23:10:00"])
    second = nights.ingest(config_of(tmp_path, day="2026-01-02", mapping_from=first.artifact.path, late="own_day"))
    assert second.summary["rows_late"] == {DAY: 1}
    before = dict(first.vocab("c").select("id", "row").iter_rows())
    assert before.items() <= dict(second.vocab("c").select("id", "row").iter_rows()).items()
    again = nights.ingest(config_of(tmp_path, late="own_day"))
    assert again.schema.rows == {"train": 44, "test": 5}
    assert again.summary["replaces"] == first.artifact.path


HOURS = {
    "text": pl.Series(["2026-01-01 22:10:00", "2026-01-01T05:00:00Z", "2026-01-01 07:59:59.5+02:00", "2026-01-01 23"]),
    "seconds": pl.Series(["79200", "18000.5", "28799", "1767308400"]),
    "milliseconds": pl.Series([1767304800000, 1767243600000, 1767250800000, 1767308400000]),
    "timestamps": pl.Series([datetime.datetime(2026, 1, 1, hour) for hour in (22, 5, 7, 23)]),
}


@pytest.mark.parametrize("kind", HOURS)
def test_hours_come_from_text_numbers_and_timestamps(kind):
    values = HOURS[kind].alias("t")
    rejected = RejectedRows(np.arange(4))
    assert hour_of(values, values.cast(pl.String), rejected).to_list() == [22, 5, 7, 23]
    assert not rejected.rejects


@pytest.mark.parametrize("value", ["2026-01-01", "2026-01-01 24:00:00", "22:00", "", None, "2026-01-01 2:00"])
def test_what_tells_no_hour_is_rejected(value):
    rejected = RejectedRows(np.array([7]))
    hour_of(pl.Series("t", [value], pl.String), pl.Series([value], dtype=pl.String), rejected)
    assert rejected.rejects[0].line == 7
    assert "expected seconds since 1970 or YYYY-MM-DD HH:MM:SS" in rejected.rejects[0].reason


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"timestamp": None}, "data.timestamp names no column with the hour", "data.timestamp=<column>"),
        ({"timestamp": None, "day_column": "t"}, "data.timestamp names no column", "data.split.by=hash"),
        ({"day": None, "path": "a.csv"}, "the last hours of data.day, but data.day is null", "data.day=2026-01-31"),
        ({"hours": 24}, "data.split.test_hours is 24, expected", "data.split.test_hours=23"),
    ],
)
def test_settings_that_cannot_be(nights, tmp_path, changes, message, hint):
    with pytest.raises(ConfigError) as caught:
        nights.ingest(config_of(tmp_path, **changes))
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("hours", "message", "hint"),
    [
        (
            range(21),
            "none of the 42 rows of 2026-01-01 falls into the test split, which is the last 2 hours of the "
            "day, from 22:00 by data.timestamp",
            "data.split.test_hours=<more>",
        ),
        (
            range(22, 24),
            "all 4 rows fall into the test split, expected some train rows (the last 2 hours of the day",
            "data.split.test_hours=<fewer>",
        ),
    ],
)
def test_a_day_with_rows_on_one_side_alone_is_refused(nights, tmp_path, hours, message, hint):
    write_day(tmp_path, DAY, rows_of(DAY, hours))
    with pytest.raises(DataError) as caught:
        nights.ingest(config_of(tmp_path))
    assert message in caught.value.message
    assert hint in caught.value.hint


def synthetic(**changes) -> Config:
    data = DataConfig(name="s", format="synthetic", day=DAY, split=by_hours(6), sparse={"C1": SparseFeature()})
    config = Config(data=data, hardware=HardwareConfig(name="x"), stages=["ingest"])
    for name, value in {"rows": 24_000, "ids_per_feature": 50, **changes}.items():
        setattr(config.data.synthetic, name, value)
    return config


def test_synthetic_days_have_hours(run_ingest):
    still = run_ingest(synthetic())
    assert still.schema.rows == {"train": 18_000, "test": 6_000}
    turning = run_ingest(synthetic(drift=2.0, hourly=True))
    assert turning.schema.rows == still.schema.rows
    # The world is the same at midnight, and another in the evening.
    both = [dataset.split("train")["true_probability"].head(500) for dataset in (still, turning)]
    late = [dataset.split("test")["true_probability"].tail(500) for dataset in (still, turning)]
    assert np.corrcoef(*both)[0, 1] > 0.99
    assert np.corrcoef(*late)[0, 1] < 0.5


def test_day_and_hour_of_a_timestamp_with_a_zone_are_those_of_utc():
    values = pl.Series("t", [1_767_225_600_000 + 3_600_000 * i for i in range(3)]).cast(pl.Datetime("ms", "UTC"))
    local = values.dt.convert_time_zone("America/New_York")
    rejected = RejectedRows(np.arange(3))
    assert hour_of(local, None, rejected).to_list() == [0, 1, 2] and not rejected.rejects
    assert local.cast(pl.Date).cast(pl.Int32).to_list() == [20_454] * 3
