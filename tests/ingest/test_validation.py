"""Validation rows: a part of the train rows that nothing is fitted on, the same however the log is cut."""

import dataclasses

import polars as pl
import pytest

from pipeline.config import SplitConfig
from pipeline.core.errors import ConfigError, DataError
from pipeline.ingest.engines import LocalEngine

from .conftest import csv_config
from .test_days import Nights, write_day
from .test_hours import DAY, config_of, rows_of

ROWS = [f"{i % 2},{i},id{i % 97},{DAY} {i % 24:02}:30:00" for i in range(2000)]


@pytest.fixture
def nights(tmp_path):
    return Nights(tmp_path)


def config(tmp_path, **split):
    write_day(tmp_path, DAY, ROWS)
    return csv_config(f"{tmp_path}/{{day}}/*.csv", timestamp="t", day=DAY, split=SplitConfig(**split))


def contents(dataset, split):
    return set(dataset.split(split).select("x", "label").iter_rows())


def test_a_share_of_the_train_rows_leaves_the_test_rows_as_they_are(nights, tmp_path):
    plain = nights.ingest(config(tmp_path))
    dataset = nights.ingest(config(tmp_path, validation_share=0.25))
    rows = dataset.schema.rows
    assert list(rows) == ["train", "validation", "test"]
    assert rows["test"] == plain.schema.rows["test"]
    assert rows["train"] + rows["validation"] == plain.schema.rows["train"]
    assert rows["validation"] / plain.schema.rows["train"] == pytest.approx(0.25, abs=0.03)
    assert "validation" not in plain.schema.rows and plain.artifact.key != dataset.artifact.key
    profile = dataset.json("profile.json")
    assert profile["rows"] == rows
    assert profile["label_rate"]["validation"] == pytest.approx(dataset.split("validation")["label"].mean())


def test_nothing_is_fitted_on_validation_rows(nights, tmp_path):
    write_day(tmp_path, DAY, rows_of(DAY))
    split = SplitConfig(by="hours", test_hours=2, validation_hours=3)
    dataset = nights.ingest(config_of(tmp_path, split=split))
    assert dataset.schema.rows == {"train": 38, "validation": 6, "test": 4}
    assert set(dataset.vocab("c")["id"]) == {f"id{hour}" for hour in range(19)}
    assert dataset.split("validation")["c"].to_list() == [1] * 6


def test_blocks_and_workers_change_no_byte(run_ingest, tmp_path, monkeypatch):
    settings = config(tmp_path, validation_share=0.2)
    whole = run_ingest(settings)
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 3000)
    monkeypatch.setattr("pipeline.ingest.stage.engine_of", lambda _: LocalEngine(3))
    cut = run_ingest(dataclasses.replace(settings, ingest=dataclasses.replace(settings.ingest, block_mib=1)))
    assert cut.checksums == whole.checksums


@pytest.mark.parametrize("by", ["hours", "day"])
def test_a_share_goes_with_every_split(nights, tmp_path, by):
    days = ["2026-01-01", "2026-01-02"]
    for day in days:
        write_day(tmp_path, day, [row.replace(DAY, day) for row in ROWS])
    dataset = nights.ingest(
        csv_config(
            f"{tmp_path}/{{day}}/*.csv",
            timestamp="t",
            day="..".join(days),
            split=SplitConfig(by=by, validation_share=0.2),
        )
    )
    rows = dataset.schema.rows
    test = {"hours": 2 * 2000 // 24, "day": 2000}[by]
    assert rows["test"] == pytest.approx(test, abs=4)
    assert rows["validation"] / (rows["validation"] + rows["train"]) == pytest.approx(0.2, abs=0.03)


def test_days_of_a_column_count_validation_rows_only_of_train_days(run_ingest, tmp_path):
    frame = pl.DataFrame(
        {"label": [0, 1] * 500, "x": range(1000), "c": ["a"] * 1000, "d": [i // 100 for i in range(1000)]}
    )
    frame.write_csv(tmp_path / "log.csv")
    split = SplitConfig(by="day", test_days=2, validation_share=0.3)
    dataset = run_ingest(csv_config(tmp_path / "log.csv", day_column="d", split=split))
    rows = dataset.schema.rows
    assert rows["test"] == 200 and sum(rows.values()) == 1000
    assert rows["validation"] == pytest.approx(240, abs=40)
    assert contents(dataset, "validation").isdisjoint(contents(dataset, "train"))


@pytest.mark.parametrize(
    ("split", "parts"),
    [
        ({"validation_hours": 2}, ["validation_hours is 2", "by=hash does not split by hours", "validation_share=0.1"]),
        (
            {"by": "hours", "validation_hours": 2, "validation_share": 0.1},
            ["validation_share is 0.1", "validation_hours is 2", "expected one of them"],
        ),
        ({"by": "hours", "validation_hours": 22}, ["validation_hours=22 and", "test_hours=2 leave no hour"]),
    ],
)
def test_settings_that_do_not_go_together_are_refused(split, parts):
    with pytest.raises(ConfigError) as error:
        SplitConfig(**split).check("data.split")
    for part in parts:
        assert part in f"{error.value.message} {error.value.hint}"


def test_a_log_without_validation_rows_is_refused(nights, tmp_path):
    write_day(tmp_path, DAY, rows_of(DAY, hours=range(20)))
    write_day(tmp_path, DAY, rows_of(DAY, hours=(*range(19), 23)))
    with pytest.raises(DataError, match="falls into the validation split"):
        nights.ingest(config_of(tmp_path, split=SplitConfig(by="hours", test_hours=2, validation_hours=2)))
