"""Rows without a click that are left out: here, or before the log came."""

import dataclasses

import numpy as np
import polars as pl
import pytest

from pipeline.config import IngestConfig, SamplingConfig, SplitConfig
from pipeline.core.errors import ConfigError, DataError
from pipeline.training.parquet import SplitReader

from .conftest import csv_config

HEADER = "label,x,c,r,t"
ROWS = 6000
RATES = ("0.5", "0.25", "1")


def write_log(path, rows: int = ROWS, seed: int = 0):
    """Rows that all differ; ``r`` is a share, ``t`` an hour of one day."""
    rng = np.random.default_rng(seed)
    clicked = rng.random(rows) < 0.1
    lines = [
        f"{int(c)},{i + rng.random():.6f},id{rng.integers(40)},{RATES[i % 3]},2026-01-01 {i % 24:02}:00:00"
        for i, c in enumerate(clicked)
    ]
    path.write_text("\n".join([HEADER, *lines]) + "\n")
    return path


def sampled(path, **settings):
    fields = {name: settings.pop(name) for name in ("negatives", "column", "rate", "correct") if name in settings}
    return csv_config(path, sampling=SamplingConfig(**fields), **settings)


SPLITS = {
    "hash": {},
    "looked at": {"split": SplitConfig(validation_share=0.1)},
    "hours": {"split": SplitConfig(by="hours", test_hours=4), "timestamp": "t", "day": "2026-01-01"},
    "range": {"split": SplitConfig(by="hours"), "timestamp": "t", "day": "2025-12-31..2026-01-01"},
    "days": {"split": SplitConfig(by="day"), "timestamp": "t"},
}


@pytest.mark.parametrize("name", [name for name in SPLITS if name not in ("range", "days")])
def test_a_share_of_the_train_rows_without_a_click_stays_and_all_else_is_as_before(name, run_ingest, tmp_path):
    path = write_log(tmp_path / "a.csv")
    whole, thin = (
        run_ingest(csv_config(path, **SPLITS[name])),
        run_ingest(sampled(path, negatives=0.25, **SPLITS[name])),
    )
    for file in ("transforms.json", "vocab/c.parquet", "quarantine.jsonl", "quality.json", "unseen/part-00000.parquet"):
        assert thin.bytes(file) == whole.bytes(file), file
    for split in {"test", *whole.schema.rows} - {"train"}:
        assert thin.split(split).drop("negative_rate").equals(whole.split(split))
        assert set(thin.split(split)["negative_rate"]) == {1.0}
    before, after = whole.split("train"), thin.split("train")
    assert set(after["negative_rate"]) == {0.25}
    rows = after.drop("negative_rate")
    assert rows.filter(pl.col("label") == 1).equals(before.filter(pl.col("label") == 1))
    others = before.filter(pl.col("label") == 0)
    stayed = others.filter(pl.col("x").is_in(rows["x"].implode()))
    assert rows.filter(pl.col("label") == 0).equals(stayed)
    assert abs(stayed.height / others.height - 0.25) < 4 * (0.25 * 0.75 / others.height) ** 0.5
    assert thin.summary["rows_left_out"] == before.height - after.height
    assert thin.schema.rows == {**whole.schema.rows, "train": after.height}
    profiles = [each.json("profile.json") for each in (whole, thin)]
    assert profiles[0] == profiles[1]
    rates = [SplitReader(each.store, each.artifact, "train").base_rate() for each in (whole, thin)]
    assert rates[0] == rates[1] == pytest.approx(before["label"].mean())


def test_neither_blocks_nor_the_place_of_a_row_decide_whether_it_stays(run_ingest, tmp_path):
    path = write_log(tmp_path / "a.csv")
    config = sampled(path, negatives=0.3)
    once = run_ingest(config)
    small = run_ingest(dataclasses.replace(config, ingest=IngestConfig(block_mib=1)))
    assert small.checksums == once.checksums
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *reversed(lines[1:])]) + "\n")
    assert set(run_ingest(config).split("train")["x"]) == set(once.split("train")["x"])


def test_what_stays_has_nothing_to_do_with_the_split_and_repeats_are_told_apart(run_ingest, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("label,x,c\n" + "".join(f"{int(i % 10 == 0)},{i % 3},id{i % 4}\n" for i in range(6000)))
    thin = run_ingest(sampled(path, negatives=0.5))
    assert thin.summary["split_by_place"] == ["all"]
    left = thin.split("train").filter(pl.col("label") == 0).group_by("x", "c").len()
    assert left.height == 12 and left["len"].min() > 120  # a part of every content


def test_a_row_counts_for_those_that_its_log_left_out(run_ingest, tmp_path):
    path = write_log(tmp_path / "a.csv")
    for settings in ({"column": "r"}, {"rate": 0.5}, {"column": "r", "negatives": 0.5}):
        made = run_ingest(sampled(path, **settings))
        for split, share in (("train", settings.get("negatives", 1.0)), ("test", 1.0)):
            rows, reader = made.split(split), SplitReader(made.store, made.artifact, split)
            own = {"column": set(map(float, RATES)), "rate": {0.5}}["column" if "column" in settings else "rate"]
            assert set(rows["negative_rate"]) == {rate * share for rate in own}
            counted = np.where(rows["label"] == 1, 1, 1 / rows["negative_rate"])
            np.testing.assert_allclose(reader.row_weights(), counted)
            columns = reader.allocate(reader.groups[0].rows)
            reader.read(reader.groups[0], columns, 0)
            np.testing.assert_allclose(reader.counted_for(columns), counted[: reader.groups[0].rows])
        if "negatives" not in settings:
            train = made.split("train")
            stand_for = np.where(train["label"] == 1, 1, 1 / train["negative_rate"])
            rate = SplitReader(made.store, made.artifact, "train").base_rate()
            assert rate == pytest.approx(train["label"].sum() / stand_for.sum())


def test_what_is_no_share_goes_to_quarantine(run_ingest, tmp_path):
    path = write_log(tmp_path / "a.csv", 300)
    bad = ["0", "-0.5", "1.5", "", "nan", "much"]
    with path.open("a") as file:
        file.writelines(f"0,1,id1,{word},2026-01-01 00:00:00\n" for word in bad)
    made = run_ingest(sampled(path, column="r"))
    assert made.summary["rows_quarantined"] == len(bad)
    assert "r is 1.5, expected a number above 0 to 1" in [each["reason"] for each in made.quarantine]


def test_shares_of_the_rows_themselves_need_weights(run_ingest, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("label,x,c,r\n" + "".join(f"{i % 2},{i},id{i % 7},{(0.1, 1)[i % 2]}\n" for i in range(400)))
    with pytest.raises(DataError, match=r"r is 1 in all \d+ train rows with a click, and less in others") as error:
        run_ingest(sampled(path, column="r"))
    assert error.value.hint == "data.sampling.correct=weights"
    assert run_ingest(sampled(path, column="r", correct="weights")).schema.sampled == "weights"


def test_a_share_that_leaves_nothing_is_refused(run_ingest, tmp_path):
    path = write_log(tmp_path / "a.csv", 60)
    with pytest.raises(DataError, match="data.sampling.negatives=1e-06 leaves none of"):
        run_ingest(sampled(path, negatives=1e-6))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"negatives": 0.0}, "data.sampling.negatives is 0, expected a share above 0"),
        ({"rate": 0.1, "column": "r"}, "expected one of them"),
        ({"correct": "weights"}, "data.sampling.correct is weights, but no share of the rows is left out"),
    ],
)
def test_settings_that_cannot_act_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        SamplingConfig(**settings).check("data.sampling")
