"""Days of logs: what is complete, which rows belong to a day, what a new delivery replaces."""

import os
from datetime import date

import polars as pl
import pytest

from pipeline.config import (
    Config,
    DataConfig,
    DedupeConfig,
    HardwareConfig,
    SparseFeature,
    SplitConfig,
    WatermarkConfig,
)
from pipeline.config.checks import check
from pipeline.core.errors import ArtifactError, ConfigError, DataError
from pipeline.ingest.days import day_dataset, day_state, previous_dataset
from pipeline.ingest.stage import ingest, raw_fingerprint
from pipeline.records import dataset_path
from pipeline.store import Store, artifact_key
from tests.keys import key_config
from tests.logged import listen

from .conftest import Dataset, csv_config

FIRST = date(2026, 1, 1)


def day_rows(day: str, rows: int, ids: int = 5) -> list[str]:
    return [f"{int(i % 3 == 0)},{i},id{i % ids},{day} 0{i % 10}:00:00" for i in range(rows)]


def write_day(folder, day: str, lines: list[str], name: str = "part-0.csv") -> None:
    (folder / day).mkdir(parents=True, exist_ok=True)
    (folder / day / name).write_text("\n".join(["label,x,c,t", *lines]) + "\n")


def config_of(folder, day: str, **changes):
    path = changes.pop("path", f"{folder}/{{day}}/*.csv")
    return csv_config(path, **{"timestamp": "t", "split": SplitConfig(test_share=0.0), "day": day, **changes})


class Nights:
    """Ingests days into one store, as the stage does."""

    def __init__(self, folder):
        self.store = Store(str(folder / "store"))
        self.said = listen()

    def ingest(self, config: Config) -> Dataset:
        check(config)
        settings = {**key_config("ingest", config), "raw": raw_fingerprint(config.data, self.store)}
        key = artifact_key("ingest", settings, {})
        path = dataset_path(config.data.name, key, config.data.day)
        with self.store.draft(path, kind="ingest", key=key, config=settings, inputs={}) as draft:
            summary = ingest(config.data, config.ingest, config.seed, draft)
            artifact = draft.commit(summary)
        return Dataset(self.store, artifact, summary, self.said)


@pytest.fixture
def nights(tmp_path):
    return Nights(tmp_path)


def test_a_day_is_a_dataset_of_its_own_and_the_one_before_is_found(nights, tmp_path):
    for number in (1, 2, 4):
        write_day(tmp_path, f"2026-01-0{number}", day_rows(f"2026-01-0{number}", 20 * number))
        nights.ingest(config_of(tmp_path, f"2026-01-0{number}"))
    assert day_dataset(nights.store, "d", "2026-01-02").summary["rows"] == 40
    assert previous_dataset(nights.store, "d", date(2026, 1, 4)).summary["day"] == "2026-01-02"
    assert previous_dataset(nights.store, "d", FIRST) is None
    assert day_dataset(nights.store, "d", "2026-01-03") is None


def test_a_day_that_is_delivered_again_replaces_its_dataset_and_says_so(nights, tmp_path):
    write_day(tmp_path, "2026-01-01", day_rows("2026-01-01", 20))
    first = nights.ingest(config_of(tmp_path, "2026-01-01"))
    write_day(tmp_path, "2026-01-01", day_rows("2026-01-01", 30))
    second = nights.ingest(config_of(tmp_path, "2026-01-01"))
    assert second.artifact.key != first.artifact.key
    assert second.summary["replaces"] == first.artifact.path
    assert f"delivered again: the new dataset will replace {first.artifact.path}" in nights.said[-1]
    assert day_dataset(nights.store, "d", "2026-01-01").key == second.artifact.key


def test_an_ingestion_that_fails_leaves_the_former_delivery_in_place(nights, tmp_path):
    write_day(tmp_path, "2026-01-01", day_rows("2026-01-01", 20))
    first = nights.ingest(config_of(tmp_path, "2026-01-01"))
    write_day(tmp_path, "2026-01-01", ["nothing,of,the,kind"])
    with pytest.raises(DataError, match="none of the 1 rows"):
        nights.ingest(config_of(tmp_path, "2026-01-01"))
    assert day_dataset(nights.store, "d", "2026-01-01").key == first.artifact.key


def test_rows_of_another_day_are_quarantined(nights, tmp_path):
    write_day(tmp_path, "2026-01-02", [*day_rows("2026-01-02", 9), "1,1,a,2026-01-01 23:59:00", "1,1,a,2026-01-03"])
    dataset = nights.ingest(config_of(tmp_path, "2026-01-02"))
    assert dataset.summary["rows_quarantined"] == 2
    assert [(entry["line"], entry["reason"]) for entry in dataset.quarantine] == [
        (11, "the row is of 2026-01-01, expected 2026-01-02"),
        (12, "the row is of 2026-01-03, expected 2026-01-02"),
    ]


def test_a_day_of_which_every_row_is_another_days_says_which_setting_is_wrong(nights, tmp_path):
    write_day(tmp_path, "2026-01-02", day_rows("2026-01-01", 9))
    with pytest.raises(DataError, match="none of the 9 rows .* row of another day; .* is of 2026-01-01") as error:
        nights.ingest(config_of(tmp_path, "2026-01-02"))
    assert "data.timestamp=" in error.value.hint


def test_days_that_are_all_test_days_are_refused_whatever_they_carry_on(nights, tmp_path):
    for day in ("2026-01-01", "2026-01-02", "2026-01-03"):
        write_day(tmp_path, day, day_rows(day, 20))
    first = nights.ingest(config_of(tmp_path, "2026-01-01"))
    split = SplitConfig(by="day", test_days=2)
    config = config_of(tmp_path, "2026-01-02..2026-01-03", split=split, mapping_from=first.artifact.path)
    with pytest.raises(DataError, match="all 2 days of .* are test days") as caught:
        nights.ingest(config)
    assert "data.split.test_days=1" in caught.value.hint


def test_a_mapping_from_nowhere_names_the_dataset_of_the_day_before(nights, tmp_path):
    for day in ("2026-01-01", "2026-01-02"):
        write_day(tmp_path, day, day_rows(day, 20))
    first = nights.ingest(config_of(tmp_path, "2026-01-01"))
    with pytest.raises(ArtifactError, match="data.mapping_from=datasets/d/nope is not a dataset") as caught:
        nights.ingest(config_of(tmp_path, "2026-01-02", mapping_from="datasets/d/nope"))
    assert caught.value.hint == f"data.mapping_from={first.artifact.path}"


def test_late_rows_go_to_their_own_day(nights, tmp_path):
    write_day(tmp_path, "2026-01-01", day_rows("2026-01-01", 20))
    write_day(
        tmp_path, "2026-01-02", [*day_rows("2026-01-02", 9), *["1,7,late,2026-01-01 23:59:00"] * 3, "1,1,a,2025-11-01"]
    )
    first = nights.ingest(config_of(tmp_path, "2026-01-01", late="own_day"))
    second = nights.ingest(config_of(tmp_path, "2026-01-02", late="own_day"))
    assert second.summary["rows_late"] == {"2026-01-01": 3}
    assert second.summary["rows_quarantined"] == 1  # too far away to belong anywhere
    assert second.summary["rows"] == 9 + 3 + 1
    assert "3 rows of 2026-01-01 kept for that day" in nights.said[-1]
    again = nights.ingest(config_of(tmp_path, "2026-01-01", late="own_day"))
    assert again.artifact.key != first.artifact.key
    assert again.summary["rows"] == 23
    assert again.vocab("c").filter(pl.col("id") == "late")["count"].to_list() == [3]
    # The second day knows of no change: its key is the same.
    assert nights.ingest(config_of(tmp_path, "2026-01-02", late="own_day")).artifact.key == second.artifact.key


def test_another_model_that_keeps_no_late_rows_loses_none(nights, tmp_path):
    write_day(tmp_path, "2026-01-01", day_rows("2026-01-01", 20))
    write_day(tmp_path, "2026-01-02", [*day_rows("2026-01-02", 9), *["1,7,late,2026-01-01 23:59:00"] * 3])
    nights.ingest(config_of(tmp_path, "2026-01-02", late="own_day"))
    nights.ingest(config_of(tmp_path, "2026-01-02"))
    assert nights.ingest(config_of(tmp_path, "2026-01-01", late="own_day")).summary["rows"] == 23


def test_a_day_is_taken_out_of_logs_that_hold_them_all(nights, tmp_path):
    lines = [*day_rows("2026-01-01", 20), *day_rows("2026-01-02", 30)]
    (tmp_path / "all.csv").write_text("\n".join(["label,x,c,t", *lines]))
    config = csv_config(tmp_path / "all.csv", timestamp="t", day="2026-01-02", split=SplitConfig(test_share=0.0))
    dataset = nights.ingest(config)
    assert (dataset.summary["rows"], dataset.summary["rows_other_days"]) == (30, 20)
    assert dataset.split("train")["day"].unique().to_list() == [20_455]
    config.data.watermark.min_rows = 31
    with pytest.raises(DataError, match="2026-01-02 is not complete: .* holds 30 rows of it, expected at least 31"):
        nights.ingest(config)


def test_rows_count_as_they_were_delivered_whatever_becomes_of_them(nights, tmp_path):
    quoted = '1,7,"a\nb",2026-01-02 05:00:00'
    rows = [*day_rows("2026-01-02", 9), *[quoted] * 3, "what,is,this,2026-01-02"]
    write_day(tmp_path, "2026-01-02", rows)
    (tmp_path / "all.csv").write_text("\n".join(["label,x,c,t", *rows]) + "\n")
    of_files = config_of(tmp_path, "2026-01-02", dedupe=DedupeConfig(key="c"), split=SplitConfig(test_share=0.0))
    of_rows = csv_config(
        tmp_path / "all.csv", timestamp="t", day="2026-01-02", dedupe=of_files.data.dedupe, split=of_files.data.split
    )
    for config in (of_files, of_rows):
        config.data.watermark.min_rows = 13
        dataset = nights.ingest(config)
        assert (dataset.summary["rows"], dataset.summary["rows_quarantined"]) == (13, 1)
        assert dataset.summary["rows_repeated"] > 2 and dataset.summary["rows_train"] < 11
        config.data.watermark.min_rows = 14
        with pytest.raises(DataError, match=r"2026-01-02 is not complete: .* 13 rows.*expected at least 14"):
            nights.ingest(config)


def test_a_day_without_files_asks_to_check_the_path(nights, tmp_path):
    with pytest.raises(DataError, match="there are no files at") as caught:
        nights.ingest(config_of(tmp_path, "2026-01-02"))
    assert caught.value.hint.startswith("check data.path; ") and "watermark" not in caught.value.hint


def test_the_watermark_names_all_that_is_missing(nights, tmp_path):
    day, end = date(2026, 1, 2), 1_767_398_400.0  # midnight after it
    wanted = WatermarkConfig(success="_SUCCESS", min_rows=50, max_age_hours=6)
    config = config_of(tmp_path, str(day), watermark=wanted)
    assert day_state(config.data, day).missing == [f"there are no files at {tmp_path}/2026-01-02/*.csv"]
    write_day(tmp_path, str(day), day_rows(str(day), 30))
    state = day_state(config.data, day, now=end + 3600)
    assert not state.complete
    assert state.missing == [
        f"{tmp_path}/2026-01-02/_SUCCESS does not exist yet",
        "its files hold 30 rows, expected at least 50",
    ]
    with pytest.raises(DataError, match="2026-01-02 is not complete: its files hold 30 rows") as caught:
        nights.ingest(config)  # by now nothing more will come, and the success file is not waited for
    assert caught.value.exit_code == 3
    write_day(tmp_path, str(day), day_rows(str(day), 20), name="part-1.csv")
    assert day_state(config.data, day, now=end + 3600).missing == [f"{tmp_path}/2026-01-02/_SUCCESS does not exist yet"]
    assert day_state(config.data, day, now=end + 6.1 * 3600).complete
    (tmp_path / str(day) / "_SUCCESS").write_text("")
    assert day_state(config.data, day, now=end + 3600).complete
    assert nights.ingest(config).summary["rows"] == 50


def deliver_hours(folder, hours, day="2026-01-02", name="hour={:02}") -> None:
    for hour in hours:
        place = folder / day / name.format(hour)
        place.mkdir(parents=True)
        (place / "part-0.csv").write_text("label,x,c,t\n")
        (place / "_SUCCESS").write_text("")


@pytest.mark.parametrize("end", ["", "/", "/*/*.csv", "/**/*.csv"])
@pytest.mark.parametrize("hours", [range(23), [0, *range(2, 24)]])
def test_a_day_without_one_of_its_hours_is_not_complete(tmp_path, hours, end):
    day = date(2026, 1, 2)
    deliver_hours(tmp_path, hours)
    gone = "hour=23" if 1 in hours else "hour=01"
    for changes, message in [
        ({"partitions": ["hour={00..23}"]}, f"{gone} below {{}} does not exist yet"),
        ({"partitions": [f"hour={hour:02}" for hour in range(24)]}, f"{gone} below {{}} does not exist yet"),
        ({"min_partitions": 24}, f"expected at least 24; missing: {gone}"),
    ]:
        wanted = WatermarkConfig(success="_SUCCESS", **changes)
        config = config_of(tmp_path, str(day), path=f"{tmp_path}/{{day}}{end}", watermark=wanted)
        check(config)
        (reason,) = day_state(config.data, day).missing
        assert reason.endswith(message.format(f"{tmp_path}/{day}{end}"))
    (tmp_path / str(day) / gone).mkdir()
    (tmp_path / str(day) / gone / "_SUCCESS").write_text("")
    config.data.watermark = WatermarkConfig(success="_SUCCESS", partitions=["hour={00..23}"])
    assert day_state(config.data, day).complete  # an hour without rows
    config.data.watermark.partitions, config.data.watermark.success = ["hour={00..25}"], None
    assert day_state(config.data, day).missing[0].startswith(f"{gone}, hour=24, hour=25 below ")


@pytest.mark.parametrize("region", ["", "region=eu/"])
def test_an_hour_without_rows_is_there_at_any_depth_and_counts(tmp_path, region):
    day = date(2026, 1, 2)
    deliver_hours(tmp_path, range(23), name=region + "hour={:02}")
    wanted = WatermarkConfig(success="_SUCCESS", partitions=["hour={00..23}"])
    config = config_of(tmp_path, str(day), path=f"{tmp_path}/{{day}}", watermark=wanted)
    count = config_of(
        tmp_path, str(day), path=f"{tmp_path}/{{day}}", watermark=WatermarkConfig(success="_SUCCESS", min_partitions=24)
    )
    place = tmp_path / str(day)
    (place / "_SUCCESS").write_text("")
    (place / region / "_SUCCESS").write_text("")
    (place / "_temporary" / "hour=23").mkdir(parents=True)
    (place / "_temporary" / "hour=23" / "_SUCCESS").write_text("")
    assert not day_state(config.data, day).complete and not day_state(count.data, day).complete
    (place / region / "hour=23").mkdir()
    (place / region / "hour=23" / "_SUCCESS").write_text("")
    assert day_state(config.data, day).complete
    assert day_state(count.data, day).complete


def test_nothing_is_said_of_folders_whose_numbers_tell_nothing(tmp_path):
    day = date(2026, 1, 2)
    deliver_hours(tmp_path, range(1, 24))
    wanted = WatermarkConfig(min_partitions=24)
    config = config_of(tmp_path, str(day), path=f"{tmp_path}/{{day}}", watermark=wanted)
    place = f"{tmp_path}/{day}"
    assert day_state(config.data, day).missing == [
        f"its files are in 23 folders (hour=01 to hour=23) below {place}, expected at least 24"
    ]
    wanted.min_partitions, wanted.partitions = None, ["region=eu", "{day}/x", "hour=05"]
    assert day_state(config.data, day).missing == [f"region=eu, {day}/x below {place} do not exist yet"]
    # Nothing more will come: neither is waited for.
    wanted.max_age_hours = 1.0
    assert day_state(config.data, day, now=1_767_398_400.0 + 3601).complete


def test_partitions_are_found_at_any_depth_and_name_no_wildcards(tmp_path):
    day = date(2026, 1, 2)
    deliver_hours(tmp_path, range(2), name="region=eu/hour={:02}")
    deliver_hours(tmp_path, range(1), name="region=us/hour={:02}")
    wanted = WatermarkConfig(partitions=["hour={00..01}", "region=eu/hour=01", "region=us/hour=01"])
    config = config_of(tmp_path, str(day), path=f"{tmp_path}/{{day}}/*/*/*.csv", watermark=wanted)
    (reason,) = day_state(config.data, day).missing
    assert reason.startswith("region=us/hour=01 below ")
    for name in ("hour=*", "../x", "/"):
        config.data.watermark.partitions = [name]
        with pytest.raises(ConfigError, match="expected names of folders below data.path") as caught:
            check(config)
        assert "hour={00..23}" in caught.value.hint


def test_a_success_file_that_comes_later_makes_no_new_delivery(tmp_path):
    write_day(tmp_path, "2026-01-01", day_rows("2026-01-01", 20))
    config = csv_config(f"{tmp_path}/{{day}}", day="2026-01-01", timestamp="t")
    before = raw_fingerprint(config.data)
    (tmp_path / "2026-01-01/_SUCCESS").write_text("")
    assert raw_fingerprint(config.data) == before


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"day": "yesterday"}, "data.day is 'yesterday', expected YYYY-MM-DD", "data.day=2026-01-31"),
        ({"day": "2026-01-05..2026-01-01"}, "expected YYYY-MM-DD, or FIRST..LAST", "data.day=2026-01-01..2026-01-31"),
        ({"day": "2026-02-30"}, "data.day is '2026-02-30'", "data.day=2026-01-31"),
        ({"day": None}, "has a file for each day, but data.day names none", "data.day=2026-01-31"),
        ({"path": "logs.csv", "timestamp": None}, "data.path has no {day}", "data.day_column=<column>"),
        ({"split": SplitConfig(by="day")}, "is one day, which cannot be split by day", "a range"),
        ({"late": "sometimes"}, "data.late is 'sometimes'", "data.late=quarantine"),
    ],
)
def test_settings_of_days_that_cannot_be(nights, tmp_path, changes, message, hint):
    with pytest.raises(ConfigError) as caught:
        nights.ingest(config_of(tmp_path, **{"day": "2026-01-01", **changes}))
    assert message in caught.value.message
    assert hint in caught.value.hint


def synthetic_config(day: str | None, **changes) -> Config:
    data = DataConfig(name="s", format="synthetic", day=day, sparse={"C1": SparseFeature(), "C2": SparseFeature()})
    config = Config(data=data, hardware=HardwareConfig(name="x"), stages=["ingest"])
    for name, value in {"rows": 4000, "ids_per_feature": 50, **changes}.items():
        setattr(config.data.synthetic, name, value)
    return config


def ids(dataset, feature="C2"):
    return set(dataset.vocab(feature)["id"])


def test_synthetic_days_drift(nights, tmp_path):
    days = [nights.ingest(synthetic_config(f"2026-01-0{d}", new_ids=0.1, popularity_drift=0.2)) for d in (1, 2, 9)]
    assert [dataset.summary["rows"] for dataset in days] == [4000] * 3
    assert [set(dataset.split("train")["day"]) for dataset in days] == [{20_454}, {20_455}, {20_462}]
    first, second, ninth = (ids(dataset) for dataset in days)
    assert 0 < len(second - first) <= 6
    assert len(ninth - first) > 3 * len(second - first)
    hottest = [dataset.vocab("C2")["id"][0] for dataset in days]
    assert len(set(hottest)) > 1
    still = [nights.ingest(synthetic_config(f"2026-01-0{d}")) for d in (1, 9)]
    assert len(ids(still[1]) - ids(still[0])) <= 2  # the rarest alone
    again = Nights(tmp_path / "other").ingest(synthetic_config("2026-01-09", new_ids=0.1, popularity_drift=0.2))
    differing = {name for name, checksum in again.checksums.items() if checksum != days[2].checksums[name]}
    assert differing == {"quality.json"}  # there is no day before to compare with
    with pytest.raises(ConfigError, match=r"data.day is 2025-12-31, before data.synthetic.first_day"):
        nights.ingest(synthetic_config("2025-12-31"))


def test_fingerprints_of_days_differ(tmp_path):
    for day in ("2026-01-01", "2026-01-02"):
        write_day(tmp_path, day, day_rows(day, 20))
        os.utime(tmp_path / day / "part-0.csv", (1, 1))
    marks = {raw_fingerprint(config_of(tmp_path, day).data) for day in ("2026-01-01", "2026-01-01", "2026-01-02")}
    keys = {artifact_key("i", key_config("ingest", config_of(tmp_path, f"2026-01-0{n}")), {}) for n in (1, 2)}
    assert len(keys) == 2 and len(marks) == 1  # equal bytes and times: the day itself tells them apart


def test_rows_beyond_their_day_are_taken_into_a_range(nights, tmp_path):
    early, late = "1,1,early,2026-01-02 00:00:01", "1,1,late,2026-01-01 23:59:59"
    write_day(tmp_path, "2026-01-01", [*day_rows("2026-01-01", 20), early, "1,1,soon,2026-01-03"])
    write_day(tmp_path, "2026-01-02", [*day_rows("2026-01-02", 30), "1,many,c,2026-01-02", late])
    write_day(tmp_path, "2026-01-02", ["1,1,soon,2026-01-03", "1,few,c,2026-01-02"], name="part-1.csv")
    dataset = nights.ingest(config_of(tmp_path, "2026-01-01..2026-01-02", late="own_day"))
    rows = dataset.all_rows
    assert rows.filter(pl.col("day") == 20_454).height == 21
    assert rows.filter(pl.col("day") == 20_455).height == 31
    assert {"early", "late"} < set(dataset.vocab("c")["id"])
    # Of a day outside the range they wait, whatever the types their blocks were read as.
    assert dataset.summary["rows_late"] == {"2026-01-03": 2}
    kept = pl.read_parquet(dataset.bytes("late/2026-01-03.parquet"))
    assert kept["c"].to_list() == ["soon", "soon"] and kept["x"].cast(float).to_list() == [1, 1]
    assert dataset.summary["rows"] == 20 + 30 + 2 + 2 + 2
    assert "2 rows of 2026-01-03 kept for that day in late/2026-01-03.parquet" in nights.said[-1]
