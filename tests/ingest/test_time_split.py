"""The split by time: a share of the rows at the end are test rows, those of a gap before them are left out."""

import dataclasses
import datetime
import itertools

import numpy as np
import polars as pl
import pytest

from pipeline.config import Config, DataConfig, DedupeConfig, HardwareConfig, SparseFeature, SplitConfig
from pipeline.config.checks import check
from pipeline.core.errors import ConfigError, DataError
from pipeline.ingest.engines import LocalEngine
from pipeline.ingest.schema import SPLIT_TIME
from pipeline.ingest.time_split import TimeCounts, cut_of
from pipeline.ingest.times import beginning_of, seconds_of_rows

from .conftest import csv_config
from .test_days import write_day

START = datetime.datetime(2026, 1, 1)
HOUR = 3600


def by_time(share: float = 0.2, gap_hours: float = 0.0, **more) -> SplitConfig:
    return SplitConfig(by="time", test_share=share, gap_hours=gap_hours, **more)


def line(seconds: int) -> str:
    """A row at that time after the start: x is its hour, the id names it, every second hour has clicks."""
    return f"{seconds // HOUR % 2},{seconds // HOUR},id{seconds // HOUR},{START + datetime.timedelta(seconds=seconds)}"


def write_log(path, seconds, seed: int = 7):
    """A log of rows at ``seconds``, shuffled."""
    lines = [line(each) for each in np.random.default_rng(seed).permutation(list(seconds)).tolist()]
    path.write_text("\n".join(["label,x,c,t", *lines]) + "\n")
    return path


def config_of(path, split: SplitConfig | None = None, **changes) -> Config:
    return csv_config(path, timestamp="t", split=split or by_time(), **changes)


def hours(frame: pl.DataFrame, dataset) -> set[str]:
    """The ids of the rows, which name their hours; of test rows too, whose ids have no row of the table."""
    names = dict(dataset.vocab("c").select("row", "id").iter_rows())
    return {names.get(row, "unseen") for row in frame["c"].to_list()}


def test_the_last_share_of_a_log_in_one_file_are_test_rows_and_nothing_is_fitted_on_them(run_ingest, tmp_path):
    path = write_log(tmp_path / "log.csv", range(0, 100 * HOUR, HOUR // 2))  # 200 rows, two an hour
    dataset = run_ingest(config_of(path))
    assert dataset.schema.rows == {"train": 160, "test": 40}
    assert set(dataset.vocab("c")["id"]) == {f"id{hour}" for hour in range(80)}
    assert hours(dataset.split("test"), dataset) == {"unseen"}
    fitted = dataset.json("transforms.json")["dense"]["x"]
    logs = np.log1p(np.repeat(np.arange(80), 2))
    assert (fitted["mean"], fitted["std"]) == pytest.approx((logs.mean(), logs.std()), abs=1e-5)
    assert dataset.summary["split_time"] == {"train_until": "2026-01-04 08:00:00", "test_from": "2026-01-04 08:00:00"}
    assert dataset.summary["rows_gap"] == 0


def test_rows_of_the_gap_are_in_no_split(run_ingest, tmp_path):
    path = write_log(tmp_path / "log.csv", range(0, 100 * HOUR, HOUR // 2))
    dataset = run_ingest(config_of(path, by_time(gap_hours=5.5, validation_share=0.2)))
    assert dataset.summary["split_time"] == {"train_until": "2026-01-04 02:30:00", "test_from": "2026-01-04 08:00:00"}
    rows = dataset.schema.rows
    assert rows["test"] == 40 and rows["train"] + rows["validation"] == 200 - 40 - 11
    assert dataset.summary["rows_gap"] == 11 and dataset.summary["rows"] == 200
    # The first row of hour 74 lies before the gap, the second in it.
    assert set(dataset.vocab("c")["id"]) <= {f"id{hour}" for hour in range(75)}
    assert dataset.split("train")["c"].len() == rows["train"]


def test_blocks_workers_and_order_change_no_byte(run_ingest, tmp_path, monkeypatch):
    path = write_log(tmp_path / "log.csv", range(0, 200 * HOUR, 600))
    config = config_of(path, by_time(0.3, gap_hours=3))
    whole = run_ingest(config)
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 3000)
    monkeypatch.setattr("pipeline.ingest.stage.engine_of", lambda _: LocalEngine(3))
    cut = run_ingest(dataclasses.replace(config, ingest=dataclasses.replace(config.ingest, block_mib=1)))
    assert cut.checksums == whole.checksums
    assert whole.schema.rows == {"train": 840 - 18, "test": 360}


@pytest.mark.slow
@pytest.mark.ray
def test_ray_makes_the_dataset_that_threads_make(run_ingest, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    path = write_log(tmp_path / "log.csv", range(0, 200 * HOUR, 600))
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 3000)
    config = config_of(path, by_time(0.3, gap_hours=3))
    local = run_ingest(dataclasses.replace(config, ingest=dataclasses.replace(config.ingest, block_mib=1)))
    by_ray = run_ingest(
        dataclasses.replace(config, ingest=dataclasses.replace(config.ingest, block_mib=1, engine="ray"))
    )
    assert by_ray.checksums == local.checksums


def test_a_range_is_cut_within_a_day_and_days_after_the_cut_are_test_days(run_ingest, tmp_path):
    """Five days of 24 rows: 48 test rows are the last two days, the gap of 30 hours takes a day and a quarter."""
    for day in range(5):
        lines = [line(hour * HOUR) for hour in range(24 * day, 24 * day + 24)]
        write_day(tmp_path, f"2026-01-0{day + 1}", lines)
    whole = config_of(f"{tmp_path}/{{day}}/*.csv", by_time(0.4, gap_hours=30), day="2026-01-01..2026-01-05")
    dataset = run_ingest(whole)
    assert dataset.schema.rows == {"train": 42, "test": 48}
    assert dataset.summary["rows_gap"] == 30
    assert set(dataset.vocab("c")["id"]) == {f"id{hour}" for hour in range(42)}
    assert sorted(dataset.split("test")["day"].unique()) == [20_457, 20_458]


def test_rows_that_come_a_day_early_count_among_those_of_their_own_day(run_ingest, tmp_path):
    """The last four hours are in the first day's file, too: 20 of 52 rows are those of the last 16 hours."""
    for day, first in ((1, 0), (2, 24)):
        lines = [line(hour * HOUR) for hour in range(first, first + 24)]
        write_day(tmp_path, f"2026-01-0{day}", lines + [line(hour * HOUR) for hour in range(44, 48)] * (day == 1))
    path = f"{tmp_path}/{{day}}/*.csv"
    dataset = run_ingest(config_of(path, by_time(20 / 52), day="2026-01-01..2026-01-02", late="own_day"))
    assert dataset.schema.rows == {"train": 32, "test": 20}
    assert dataset.summary["split_time"]["test_from"] == "2026-01-02 08:00:00"


def test_a_range_of_a_log_in_one_file_leaves_other_days_out_of_the_share(run_ingest, tmp_path):
    path = write_log(tmp_path / "log.csv", range(0, 10 * 24 * HOUR, HOUR))
    dataset = run_ingest(config_of(path, day="2026-01-03..2026-01-06"))
    assert dataset.schema.rows == {"train": 77, "test": 19}
    assert dataset.summary["split_time"]["test_from"] == "2026-01-06 05:00:00"


def test_days_and_hours_tell_the_time_where_nothing_else_does(run_ingest, tmp_path):
    rows = [f"{hour % 2},{hour},id{hour},{day},{hour}" for day in range(4) for hour in range(24)]
    path = tmp_path / "log.csv"
    path.write_text("\n".join(["label,x,c,d,h", *rows]) + "\n")
    by_day = run_ingest(csv_config(path, day_column="d", split=by_time(0.2)))
    assert by_day.schema.rows == {"train": 72, "test": 24}
    by_hour = run_ingest(csv_config(path, day_column="d", hour_column="h", split=by_time(0.25 / 3)))
    assert by_hour.schema.rows == {"train": 88, "test": 8}


def test_a_time_that_cannot_be_read_beside_a_day_costs_its_row(run_ingest, tmp_path):
    """Days are numbered from 0 on: as the time of a row they would be of 1970, so it would always be a train row."""
    lines = []
    for hour in range(100):
        at = START + datetime.timedelta(hours=hour)
        written = {7: "garbage", 8: "", 90: "noon", 9: str(at.date())}.get(hour, str(at))
        lines.append(f"{hour % 2},{hour},id{hour},{hour // 24},{written}")
    path = tmp_path / "log.csv"
    path.write_text("\n".join(["label,x,c,d,t", *lines]) + "\n")
    dataset = run_ingest(csv_config(path, day_column="d", timestamp="t", split=by_time(0.2)))
    assert dataset.schema.rows == {"train": 78, "test": 19}
    reasons = [entry["reason"] for entry in dataset.quarantine]
    assert len(reasons) == 3 and reasons[0] == "t is 'garbage', expected a number or YYYY-MM-DD"
    assert dataset.summary["split_time"]["test_from"] == "2026-01-04 08:00:00"


def test_days_and_hours_of_a_zone_begin_there():
    first = 20_454 * 24 * HOUR  # of 2026
    days = pl.Series([20_454, 10**9])
    assert beginning_of(days, None, "Europe/Berlin").to_list() == [first - HOUR, 10**9 * 24 * HOUR]
    assert beginning_of(days, None, None).to_list() == [first, 10**9 * 24 * HOUR]
    assert beginning_of(days.head(1), pl.Series([23]), "Europe/Berlin").to_list() == [first + 22 * HOUR]
    dated, timed = pl.Series(["2026-01-02"]), pl.Series(["2026-01-02 00:00:00"])
    assert seconds_of_rows(dated, dated, "Asia/Tokyo").to_list() == [None]
    assert (
        seconds_of_rows(timed, timed, "Asia/Tokyo").to_list()
        == beginning_of(pl.Series([20_455]), None, "Asia/Tokyo").to_list()
    )


def test_repeated_rows_do_not_count(run_ingest, tmp_path):
    """Of 120 rows the last 20 are those before them again; a fifth of the 100 that stay are test rows."""
    lines = [f"{i % 2},{i},id{i},{START + datetime.timedelta(hours=i)},e{i}" for i in range(100)]
    lines += [f"{i % 2},{i},id{i},{START + datetime.timedelta(hours=i)},e{i}" for i in range(80, 100)]
    path = tmp_path / "log.csv"
    path.write_text("\n".join(["label,x,c,t,e", *lines]) + "\n")
    dataset = run_ingest(config_of(path, dedupe=DedupeConfig(key="e")))
    assert dataset.schema.rows == {"train": 80, "test": 20}


def test_a_synthetic_log_is_split_by_the_time_of_its_rows(run_ingest):
    data = DataConfig(name="s", format="synthetic", sparse={"C1": SparseFeature()}, split=by_time(0.1))
    data.synthetic.rows, data.synthetic.days = 4000, 4
    dataset = run_ingest(Config(stages=["ingest"], data=data, hardware=HardwareConfig(name="x")))
    assert dataset.schema.rows == {"train": 3600, "test": 400}
    assert dataset.split("test")["day"].min() == dataset.split("train")["day"].max() == 3


TIMES = {
    "text": ["2026-01-01 22:10:00", "2026-01-01T05:00:00Z", "2026-01-02"],
    "seconds": ["1767305400", "1767243600.75", "20260102"],
    "nanoseconds": ["1767305400000000001", "1767243600999000000", "20260102"],
}


@pytest.mark.parametrize("kind", TIMES)
def test_a_time_is_read_to_the_second(kind):
    values = pl.Series(TIMES[kind])
    assert seconds_of_rows(values, values).to_list() == [1767305400, 1767243600, None]


def test_timestamps_of_typed_files_and_zones_are_points_in_time():
    typed = pl.Series([datetime.datetime(2026, 1, 1, 12)])
    for stored in (typed, typed.dt.replace_time_zone("UTC"), typed.dt.cast_time_unit("ns")):
        assert seconds_of_rows(stored, stored.cast(pl.String)).to_list() == [1767268800]
    assert seconds_of_rows(typed, typed.cast(pl.String), "Europe/Berlin").to_list() == [1767265200]
    text = pl.Series(["2026-01-01 12:00:00+02:00"])
    assert seconds_of_rows(text, text).to_list() == [1767268800]  # as it is written
    assert seconds_of_rows(text, text, "Europe/Berlin").to_list() == [1767261600]


@pytest.mark.parametrize("seed", range(3))
def test_the_step_of_times_depends_on_the_rows_alone(seed):
    rng = np.random.default_rng(seed)
    times = rng.integers(-5_000, 100_000, 4_000)
    counted = []
    for order in (times, times[::-1], rng.permutation(times)):
        counts = TimeCounts(most=100)
        for block in np.array_split(order, int(rng.integers(1, 40))):
            counts.add(pl.DataFrame({SPLIT_TIME: block, "rows": np.ones(len(block), np.uint32)}))
        counted.append((*(each.tolist() for each in counts.sorted()), counts.step))
    assert counted[0] == counted[1] == counted[2]
    step = counted[0][2]
    assert len(counted[0][0]) <= 100 < len(np.unique(times // (step // 2)))
    assert sum(counted[0][1]) == 4_000 and min(counted[0][0]) == times.min() // step * step


def data_of(split: SplitConfig) -> DataConfig:
    return dataclasses.replace(Config().data, path="log.csv", split=split)


@pytest.mark.parametrize(
    ("rows", "share", "first"),
    [
        ([1, 1, 1, 1, 1], 0.2, 4),
        ([1, 1, 1, 1, 1], 0.5, 3),  # 2 or 3 of 5 are as near: the later cut
        ([5, 1, 1, 1, 2], 0.4, 2),  # 4 of 10
        ([5, 1, 1, 1, 2], 0.5, 1),
        ([1, 9], 0.2, 1),  # nearest is all that can be
        ([9, 1], 0.9, 1),  # the first time is never a test row
    ],
)
def test_the_cut_is_the_one_nearest_to_the_share(rows, share, first):
    times = np.arange(len(rows)) * 100
    cut = cut_of(times, np.array(rows), data_of(by_time(share)))
    assert cut.test_from == cut.train_until == first * 100


def test_every_cut_of_small_logs_is_the_nearest():
    for rows in itertools.product((1, 2, 5), repeat=4):
        for share in (0.05, 0.2, 0.5, 0.9):
            cut = cut_of(np.arange(4), np.array(rows), data_of(by_time(share)))
            tested = [sum(rows[place:]) for place in range(1, 4)]
            wanted = round(share * sum(rows))
            assert abs(sum(rows[cut.test_from :]) - wanted) == min(abs(each - wanted) for each in tested)


def test_a_log_of_one_time_or_within_the_gap_is_refused(run_ingest, tmp_path):
    path = write_log(tmp_path / "log.csv", [0] * 20)
    with pytest.raises(DataError, match="all 20 rows .* are of one time, 2026-01-01 00:00:00") as error:
        run_ingest(config_of(path))
    assert "data.timestamp=" in error.value.hint
    path = write_log(tmp_path / "log.csv", [0])
    with pytest.raises(DataError, match="log.csv has one row with a label, which cannot be split") as error:
        run_ingest(config_of(path))
    assert error.value.hint == "more rows"
    path = write_log(tmp_path / "log.csv", range(0, 10 * HOUR, 600))
    with pytest.raises(DataError, match="gap_hours=9 leaves no train rows") as error:
        run_ingest(config_of(path, by_time(gap_hours=9)))
    assert "data.split.gap_hours=" in error.value.hint
    path.write_text("label,x,c,t\n1,1,a,noon\n")
    with pytest.raises(DataError, match="none of the 1 rows .*: t is no day") as error:
        run_ingest(config_of(path))
    assert "data.timestamp=" in error.value.hint


@pytest.mark.parametrize(
    ("split", "changes", "named"),
    [
        (by_time(0.0), {"timestamp": "t"}, "data.split.test_share"),
        (by_time(), {}, "data.timestamp"),
        (by_time(), {"day_column": "d", "day": "2026-01-01"}, "data.timestamp"),
        (SplitConfig(gap_hours=1), {"timestamp": "t"}, "data.split.gap_hours"),
        (by_time(validation_hours=2), {"timestamp": "t"}, "data.split.validation_hours"),
    ],
)
def test_settings_that_cannot_be_split_by_time_are_told_before_anything_is_read(tmp_path, split, changes, named):
    with pytest.raises(ConfigError) as error:
        check(csv_config(tmp_path / "log.csv", split=split, **changes))
    assert named in f"{error.value} {error.value.hint}"
