"""Days and hours of a time zone: against the standard library's clocks, on days of 23 and 25 hours too."""

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import DataConfig, SparseFeature, SplitConfig, WatermarkConfig
from pipeline.core.errors import ConfigError, DataError
from pipeline.ingest.days import day_number, day_state
from pipeline.ingest.times import day_of, end_of_day, hour_of, skipped_hours
from pipeline.ingest.values import RejectedRows

from .conftest import csv_config
from .test_days import Nights, write_day

ZONES = ["Europe/Berlin", "America/New_York", "America/Santiago", "Asia/Kolkata", "Australia/Lord_Howe", "Etc/UTC"]
SPRING, AUTUMN = date(2026, 3, 29), date(2026, 10, 25)  # clocks of Berlin go forward, and back
FIRST = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp())


def read(values: pl.Series, zone: str | None, *, timestamp: bool = True) -> list[tuple[int, int]]:
    """Day and hour of each value; all of them must have both."""
    values, text = values.alias("t"), values.cast(pl.String)
    rejected = RejectedRows(np.arange(1, len(values) + 1))
    days = day_of(values, text, timestamp=timestamp, rejected=rejected, zone=zone)
    hours = hour_of(values, text, rejected, zone)
    assert not rejected.bad.any(), rejected.rejects
    return list(zip(days.to_list(), hours.to_list(), strict=True))


def expected(second: int, zone: str) -> tuple[int, int]:
    """By the standard library: the day, and its hours counted back from 23."""
    day = datetime.fromtimestamp(second, ZoneInfo(zone)).date()
    following = day + timedelta(days=1)
    end = datetime(following.year, following.month, following.day, tzinfo=ZoneInfo(zone)).timestamp()
    return day_number(day), 24 + (second - int(end)) // 3600


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(FIRST, FIRST + 366 * 86_400), min_size=1, max_size=20), st.sampled_from(ZONES))
def test_every_way_to_write_a_point_in_time_has_the_day_and_hour_of_the_zone(seconds, zone):
    wanted = [expected(second, zone) for second in seconds]
    there = [datetime.fromtimestamp(second, UTC) for second in seconds]
    away = [each.astimezone(ZoneInfo("America/Los_Angeles")) for each in there]
    stamps = pl.Series(there).cast(pl.Datetime("ms", "UTC"))
    written = [
        pl.Series(seconds),
        pl.Series([second * 1000 for second in seconds]),
        stamps,
        stamps.dt.convert_time_zone("Asia/Tokyo"),
        pl.Series([f"{each:%Y-%m-%dT%H:%M:%SZ}" for each in there]),
        pl.Series([each.isoformat(sep=" ") for each in away]),
        pl.Series([f"{each:%Y-%m-%d %H:%M:%S.5%z}" for each in away]),
    ]
    for values in written:
        assert read(values, zone) == wanted, values


@pytest.mark.parametrize("kind", [str, datetime])
def test_times_without_a_zone_are_those_of_the_zone(kind):
    times = [datetime(2026, 3, 29, 1, 59), datetime(2026, 3, 29, 23, 30), datetime(2026, 10, 25, 0, 5)]
    times += [datetime(2026, 10, 25, 23, 59, 59), datetime(2026, 7, 1, 12)]
    values = pl.Series([str(each) for each in times]) if kind is str else pl.Series(times)
    spring, autumn, plain = (day_number(each) for each in (SPRING, AUTUMN, date(2026, 7, 1)))
    wanted = [(spring, 2), (spring, 23), (autumn, -1), (autumn, 23), (plain, 12)]
    assert read(values, "Europe/Berlin") == wanted
    assert read(values.slice(4), None) == [(plain, 12)]


def test_a_time_that_clocks_leave_out_is_an_hour_later_and_one_of_two_is_the_earlier():
    left_out, twice = "2026-03-29 02:30:00", "2026-10-25 02:30:00"
    moments = pl.Series([left_out, "2026-03-29 03:30:00", twice, "2026-10-25 02:30:00+02:00"])
    read_as = read(moments, "Europe/Berlin")
    assert read_as[0] == read_as[1]
    assert read_as[2] == read_as[3] == (day_number(AUTUMN), 1)


def test_days_stay_days_and_a_date_alone_tells_no_hour():
    for values in (pl.Series(["2026-07-01", "20260701"]), pl.Series([date(2026, 7, 1)])):
        rejected = RejectedRows(np.arange(1, len(values) + 1))
        text = values.cast(pl.String)
        named = values.alias("t")
        days = day_of(named, text, timestamp=True, rejected=rejected, zone="America/New_York")
        assert set(days) == {day_number(date(2026, 7, 1))} and not rejected.bad.any()
        hour_of(named, text, rejected, "America/New_York")
        assert rejected.bad.all()
    assert read(pl.Series(["2026-07-01 10:00"]), "America/New_York", timestamp=False)[0][0] == day_number(
        date(2026, 7, 1)
    )


@pytest.mark.parametrize(("day", "hours"), [(SPRING, 23), (AUTUMN, 25), (date(2026, 7, 1), 24)])
def test_the_last_hours_of_a_short_or_long_day_are_test_rows(day, hours, tmp_path):
    nights = Nights(tmp_path)
    begin = int(end_of_day(day - timedelta(days=1), "Europe/Berlin"))
    lines = [f"{i % 2},{i},id{i % 7},{begin + 1800 * i}" for i in range(2 * hours)]
    write_day(tmp_path, str(day), lines)
    for held in (2, 22):
        split = SplitConfig(by="hours", test_hours=held)
        config = csv_config(
            f"{tmp_path}/{{day}}/*.csv", timestamp="t", day=str(day), split=split, time_zone="Europe/Berlin"
        )
        assert nights.ingest(config).schema.rows == {"train": 2 * (hours - held), "test": 2 * held}
    with pytest.raises(DataError, match="row of another day"):
        nights.ingest(csv_config(f"{tmp_path}/{{day}}/*.csv", timestamp="t", day=str(day), max_quarantine_share=0.01))


def watched(path: str, **limits) -> DataConfig:
    return DataConfig(
        name="n",
        format="csv",
        path=path,
        time_zone="Europe/Berlin",
        day=str(SPRING),
        timestamp="t",
        watermark=WatermarkConfig(**limits),
    )


def test_the_watermark_waits_for_the_hours_that_the_day_has(tmp_path):
    assert skipped_hours(SPRING, "Europe/Berlin") == {2}
    assert not skipped_hours(AUTUMN, "Europe/Berlin") and not skipped_hours(SPRING, None)
    assert not skipped_hours(date(2026, 10, 4), "Australia/Lord_Howe")  # which loses half of one
    for hour in range(24):
        if hour != 2:
            file = tmp_path / str(SPRING) / f"hour={hour:02}" / "a.csv"
            file.parent.mkdir(parents=True)
            file.write_text("label,x,c,t\n1,1,a,0\n")
    path = f"{tmp_path}/{{day}}/"
    for limits in ({"partitions": ["hour={00..23}"]}, {"min_partitions": 24}):
        assert day_state(watched(path, **limits), SPRING).complete
    utc = watched(path, partitions=["hour={00..23}"])
    utc.time_zone = None
    assert day_state(utc, SPRING).missing == [f"hour=02 below {tmp_path}/{SPRING}/ does not exist yet"]


def test_the_age_of_a_day_counts_from_its_midnight(tmp_path):
    (tmp_path / str(SPRING)).mkdir()
    (tmp_path / str(SPRING) / "a.csv").write_text("label,x,c,t\n1,1,a,0\n")
    data = watched(f"{tmp_path}/{{day}}/*.csv", success="_SUCCESS", max_age_hours=1.0)
    midnight = datetime(2026, 3, 30, tzinfo=ZoneInfo("Europe/Berlin")).timestamp()
    assert not day_state(data, SPRING, midnight + 3500).complete
    assert day_state(data, SPRING, midnight + 3601).complete


def test_zones_that_cannot_act_are_refused():
    with pytest.raises(ConfigError, match="data.time_zone is 'Mars/Base', expected the name of a time zone"):
        DataConfig(name="n", format="csv", path="a", sparse={"c": SparseFeature()}, time_zone="Mars/Base").check("data")
