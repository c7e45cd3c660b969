"""``data.time_format``: the dataset of a log whose days are written in another way is that of the log as it is read."""

import dataclasses
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from pipeline import cli
from pipeline.config import DataConfig, SparseFeature, SplitConfig
from pipeline.config.compose import compose
from pipeline.core.errors import ConfigError, DataError
from pipeline.ingest.record_transform import RecordTransform
from pipeline.ingest.times import day_of, hour_of
from pipeline.ingest.values import RejectedRows
from pipeline.plugins.connectors.table_files import days_between
from tests.keys import key_config

from .conftest import csv_config
from .test_sequences import config_of as sequences_config
from .test_sequences import rows_of as rows_with_events

TIMES = pl.datetime_range(pl.datetime(2026, 1, 28), pl.datetime(2026, 2, 3), "17m", eager=True)
FORMS = ["%d.%m.%Y %H:%M:%S", "%m/%d/%Y %I:%M:%S %p", "%d/%b/%Y:%H:%M:%S", "%-d-%-m-%y %T", "%Y%j %H:%M:%S%.3f"]


def log_of(folder: Path, form: str) -> Path:
    """A log with the times of TIMES in the column ``t``."""
    folder.mkdir()
    number = pl.int_range(len(TIMES), eager=True)
    frame = pl.DataFrame({"label": number % 3 // 2, "x": number, "c": number % 7, "t": TIMES.dt.strftime(form)})
    frame.write_csv(folder / "log.csv")
    return folder / "log.csv"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("split", [{"by": "day", "test_days": 2}, {"by": "hours", "test_hours": 3}])
def test_a_log_in_another_form_makes_the_dataset_of_the_usual_one(tmp_path, run_ingest, form, split):
    day = {"day": "2026-01-29..2026-02-01"} if split["by"] == "hours" else {}
    made = []
    for folder, written, given in (("a", "%Y-%m-%d %H:%M:%S", None), ("b", form, form)):
        path = log_of(tmp_path / folder, written)
        config = csv_config(path, timestamp="t", time_format=given, split=SplitConfig(**split), **day)
        made.append(run_ingest(config))
    assert made[0].checksums == made[1].checksums
    assert min(made[0].schema.rows.values()) > 0 and not made[1].quarantine


def test_what_is_not_written_so_goes_to_quarantine_with_the_form(tmp_path, run_ingest):
    path = tmp_path / "log.csv"
    rows = [f"{i % 2},{i},c{i % 3},{i % 28 + 1}.01.2026" for i in range(60)]
    path.write_text("\n".join(["label,x,c,t", *rows, "1,1,c,2026-01-05", "1,1,c,31.02.2026", "1,1,c,"]) + "\n")
    config = csv_config(path, timestamp="t", time_format="%d.%m.%Y", split=SplitConfig(by="day", test_days=1))
    reasons = [each["reason"] for each in run_ingest(config).quarantine]
    assert reasons[:2] == [f"t is '{text}', expected %d.%m.%Y" for text in ("2026-01-05", "31.02.2026")]
    with pytest.raises(DataError, match="expected a number or YYYY-MM-DD") as error:
        data = dataclasses.replace(config.data, time_format=None, max_quarantine_share=0.1)
        run_ingest(dataclasses.replace(config, data=data))
    assert "data.time_format=" in error.value.hint


def test_an_offset_brings_times_to_utc_or_to_the_zone_and_a_date_tells_no_hour():
    values, rejected = pl.Series("t", ["31/Jan/2026:23:30:00 -0500"]), RejectedRows(np.arange(1))
    form = "%d/%b/%Y:%H:%M:%S %z"
    for zone, day, hour in ((None, "2026-02-01", 4), ("America/New_York", "2026-01-31", 23)):
        found = day_of(values, values, timestamp=True, rejected=rejected, zone=zone, form=form)
        assert str(found.cast(pl.Date)[0]) == day
        assert hour_of(values, values, rejected, zone, form)[0] == hour
    assert not rejected.bad.any()
    hour_of(pl.Series("t", ["31.01.2026"]), pl.Series("t", ["31.01.2026"]), rejected, None, "%d.%m.%Y")
    assert rejected.rejects[0].reason == "t is '31.01.2026', expected %d.%m.%Y"


def test_numbers_and_timestamps_are_read_as_ever(tmp_path, run_ingest):
    config = csv_config(log_of(tmp_path / "a", "%F %T"), split=SplitConfig(by="day", test_days=2), timestamp="t")
    frame = pl.read_csv(config.data.path).with_columns(t=TIMES)
    made = []
    for form in (None, "%d.%m.%Y"):
        frame.write_parquet(tmp_path / "log.parquet")
        data = dataclasses.replace(config.data, format="parquet", path=str(tmp_path / "log.parquet"), time_format=form)
        made.append(run_ingest(dataclasses.replace(config, data=data)).checksums)
    assert made[0] == made[1]


def test_events_and_single_records_are_read_by_it_too(tmp_path, run_ingest):
    rows, form = rows_with_events(), "%d.%m.%Y %H:%M:%S"
    kept = []
    for name, written in (("usual", "%Y-%m-%d %H:%M:%S"), ("other", form)):
        frame = pl.DataFrame(rows, infer_schema_length=None).with_columns(
            time=pl.from_epoch("time").dt.strftime(written),
            history=pl.col("history").list.eval(
                pl.struct(
                    pl.element().struct.field("item", "category"),
                    at=pl.from_epoch(pl.element().struct.field("at")).dt.strftime(written),
                )
            ),
        )
        frame.write_parquet(tmp_path / f"{name}.parquet")
        config = sequences_config(tmp_path / f"{name}.parquet")
        data = dataclasses.replace(config.data, time_format=form if name == "other" else None)
        dataset = run_ingest(dataclasses.replace(config, data=data))
        assert dataset.schema.rows["train"] > 20 and not dataset.quarantine
        transform = RecordTransform.read(dataset.store, dataset.artifact.path)
        kept.append((dataset.all_rows, transform(frame.tail(9).to_dicts())))
    assert all(one.equals(other) for one, other in zip(*kept, strict=True))


def test_statistics_of_such_text_tell_no_days():
    told = {"timestamp": True, "zone": None}
    assert days_between("01.02.2026", "31.01.2026", form="%d.%m.%Y", **told) is None
    assert days_between("2026-01-01", "2026-01-03", **told) == (20454, 20456)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ("%d.%m", "does not tell the day"),
        ("%H:%M", "does not tell the day"),
        ("%d.%m.%Y %H", "hour and minute"),
        ("%d.%m.%Y %I:%M", "%I needs %p"),
        ("%d.%m.%Q", "%Q is none of %Y %y"),
        ("%d.%m.%Y %", "is none of"),
    ],
)
def test_forms_that_tell_no_day_are_refused(form, why):
    with pytest.raises(ConfigError) as error:
        DataConfig(
            name="n", format="csv", path="a", sparse={"c": SparseFeature()}, timestamp="t", time_format=form
        ).check("data")
    assert why in str(error.value) and error.value.hint.startswith("data.time_format='%d.%m.%Y")


def test_a_form_without_a_column_is_refused_and_the_default_changes_no_key(tmp_path):
    with pytest.raises(ConfigError, match="neither data.timestamp nor data.day_column"):
        DataConfig(name="n", format="csv", path="a", sparse={"c": SparseFeature()}, time_format="%F").check("data")
    plain = csv_config("a", timestamp="t")
    form = dataclasses.replace(plain, data=dataclasses.replace(plain.data, time_format="%d.%m.%Y"))
    assert "time_format" not in str(key_config("ingest", plain))
    assert key_config("ingest", form) != key_config("ingest", plain)


@pytest.mark.parametrize(
    ("form", "guess", "other"),
    [
        ("%d.%m.%Y", "%d.%m.%Y", ""),
        ("%d/%m/%Y %H:%M", "%d/%m/%Y %H:%M", ""),
        ("%m/%d/%Y %H:%M:%S%.3f", "%m/%d/%Y %H:%M:%S%.f", ""),
        ("%Y/%m/%d", "%Y/%m/%d", ""),
        ("%m/%d/%Y %I:%M %p", "%m/%d/%Y %I:%M %p", ""),
        ("%d.%m.%Y ambiguous", "%d.%m.%Y", "%m.%d.%Y"),
    ],
)
def test_init_writes_the_form_and_says_where_day_and_month_could_be_either(
    tmp_path, monkeypatch, capsys, run_ingest, form, guess, other
):
    monkeypatch.chdir(tmp_path)
    days = pl.datetime_range(pl.datetime(2026, 3, 3), pl.datetime(2026, 3, 9 if other else 25), "37m", eager=True)
    frame = pl.DataFrame(
        {
            "click": np.arange(len(days)) % 3 // 2,
            "ad": [f"a{at % 11}" for at in range(len(days))],
            "seen": days.dt.strftime(form.removesuffix(" ambiguous")),
        }
    )
    frame.write_csv("ads.csv")
    assert cli.main(["init", "ads.csv"]) == 0
    said, text = capsys.readouterr().out, Path("my/data/ads.yaml").read_text()
    data = compose(["data=ads", "stages=[ingest]", "data.split.by=day", "data.split.test_days=2"])
    assert data.data.time_format == guess and data.data.timestamp == "seen"
    assert ("DAY OR MONTH FIRST" in text and other in text) == bool(other)
    assert ("read both ways" in said and other in said) == bool(other)
    if not other:
        assert f"date={days[-1]:%Y-%m-%d}" in said
    assert len(run_ingest(data).all_rows) == len(frame)
