"""Partitions in the path: values of features, the day and the hour of a row, the files of a night's day."""

from __future__ import annotations

import dataclasses
from datetime import date

import polars as pl
import pytest

from pipeline.config import DenseFeature, SparseFeature, SplitConfig
from pipeline.core.errors import ConfigError, DataError
from pipeline.ingest.file_source import partition_values
from pipeline.ingest.stage import raw_fingerprint
from tests.ingest.conftest import csv_config

DAYS, HOURS, REGIONS = ("2026-01-30", "2026-01-31"), ("07", "23"), ("eu", "a b", None)
FOLDER = {"eu": "eu", "a b": "a%20b", None: "__HIVE_DEFAULT_PARTITION__"}


def rows(day: str, hour: str, region: str | None) -> pl.DataFrame:
    """The rows of a partition, their partition's columns in them."""
    number = range(40)
    frame = pl.DataFrame({"label": [at % 2 for at in number], "x": [float(at) for at in number], "c": ["a"] * 40})
    where = {"date": day, "hour": hour, "region": region}
    return frame.with_columns(pl.lit(value, pl.String).alias(name) for name, value in where.items())


def write(root, kind: str) -> None:
    """The log as a writer of partitions lays it out."""
    for day in DAYS:
        for hour in HOURS:
            for region in REGIONS:
                folder = root / f"date={day}" / f"hour={hour}" / f"region={FOLDER[region]}"
                folder.mkdir(parents=True)
                frame = rows(day, hour, region).drop("date", "hour", "region")
                if kind == "parquet":
                    frame.write_parquet(folder / "part-0.parquet")
                elif kind == "jsonl":
                    (folder / "part-0.jsonl").write_text(frame.write_ndjson())
                else:
                    (folder / "part-0.csv").write_text(frame.write_csv())


def config(path, kind: str, **changes):
    """Features of the file and of the path."""
    dense = {"x": DenseFeature(), "h": DenseFeature(column="hour")}
    sparse = {"region": SparseFeature(), "c": SparseFeature()}
    return csv_config(path, format=kind, **{"dense": dense, "sparse": sparse, "day_column": "date", **changes})


def test_a_path_tells_values():
    assert partition_values("s3/b=1/x/a%2Fb=__HIVE_DEFAULT_PARTITION__/c=d=e/no=file") == {
        "b": "1",
        "a/b": None,
        "c": "d=e",
    }


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_the_rows_are_those_of_a_log_that_holds_the_columns(run_ingest, tmp_path, kind):
    write(tmp_path / "log", kind)
    parts = [rows(day, hour, region) for day in DAYS for hour in HOURS for region in sorted(REGIONS, key=FOLDER.get)]
    pl.concat(parts).write_parquet(tmp_path / "flat.parquet")
    split = SplitConfig(by="day")
    dataset = run_ingest(config(tmp_path / "log", kind, split=split))
    expected = run_ingest(config(tmp_path / "flat.parquet", "parquet", split=split))
    names = [name for name in expected.checksums if name.startswith(("train/", "test/", "vocab/"))]
    assert dataset.summary["rows"] == 480 and dataset.summary["rows_test"] == 240
    assert [dataset.checksums[name] for name in names] == [expected.checksums[name] for name in names]
    assert set(dataset.vocab("region")["id"]) == {"a b", "eu"}


def test_a_night_finds_its_folder_and_splits_it_by_its_hours(run_ingest, tmp_path):
    write(tmp_path / "log", "parquet")
    path = f"{tmp_path}/log/date={{day}}/*/*/*.parquet"
    split = SplitConfig(by="hours", test_hours=2)
    dataset = run_ingest(config(path, "parquet", day="2026-01-31", split=split, hour_column="hour"))
    assert (dataset.summary["rows_train"], dataset.summary["rows_test"]) == (120, 120)
    assert dataset.all_rows["day"].unique().to_list() == [(date(2026, 1, 31) - date(1970, 1, 1)).days]
    no_day = config(path, "parquet", day="2026-01-31", split=split, hour_column="hour", day_column=None)
    assert run_ingest(no_day).summary["rows_test"] == 120


def test_an_hour_that_is_none_is_quarantined(run_ingest, tmp_path):
    for hour in ("3", "24", "noon", "__HIVE_DEFAULT_PARTITION__", "22"):
        (tmp_path / f"hour={hour}").mkdir()
        rows("", "", "").select("label", "x", "c").write_parquet(tmp_path / f"hour={hour}" / "a.parquet")
    changes = {"day": "2026-01-31", "hour_column": "hour", "split": SplitConfig(by="hours")}
    path = f"{tmp_path}/*/{{day:a}}.parquet"
    dataset = run_ingest(csv_config(path, format="parquet", **changes))
    assert dataset.summary["rows_quarantined"] == 120 and dataset.summary["rows_test"] == 40
    assert {each["reason"] for each in dataset.quarantine} == {
        "hour is '24', expected an hour, 0 to 23",
        "hour is 'noon', expected an hour, 0 to 23",
        "hour is missing, expected an hour, 0 to 23",
    }
    with pytest.raises(ConfigError, match="names no column with the hour") as caught:
        run_ingest(csv_config(path, format="parquet", **{**changes, "hour_column": None}))
    assert "data.hour_column=<column>" in caught.value.hint


def test_a_column_that_neither_file_nor_path_has_is_told(run_ingest, tmp_path):
    write(tmp_path / "log", "parquet")
    with pytest.raises(DataError, match=r"has no column 'country' \(data.sparse.country.column\)"):
        run_ingest(config(tmp_path / "log", "parquet", sparse={"country": SparseFeature()}))


def test_a_partition_that_is_renamed_is_another_delivery(tmp_path):
    write(tmp_path / "log", "csv")
    data = config(tmp_path / "log", "csv").data
    other = dataclasses.replace(data, sparse={"c": SparseFeature()}, dense={"x": DenseFeature()})
    before, same = raw_fingerprint(data), raw_fingerprint(other)
    folder = tmp_path / "log" / "date=2026-01-30" / "hour=07"
    (folder / "region=eu").rename(folder / "region=us")
    assert raw_fingerprint(data) != before
    assert raw_fingerprint(other) == same  # which reads no region
