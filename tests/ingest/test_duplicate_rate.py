"""Logs whose rows repeat are split by row, others by content; either way the same rows whoever reads them."""

import gzip
from datetime import date

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import IngestConfig, SparseFeature, SplitConfig
from pipeline.ingest.duplicate_rate import OFTEN, SAMPLE, Contents, place_hashes

from .conftest import csv_config
from .test_days import Nights, config_of, write_day


def contents_of(*parts):
    made = Contents()
    for part in parts:
        made.add(np.asarray(part, np.uint64))
    return made


def one_feature(path, rows=3000, ids=60, garbage=True):
    """Rows of one feature alone, every 50th no row."""
    rng = np.random.default_rng(5)
    lines = [f"{rng.integers(2)},id{int(ids * rng.random() ** 2)}" for _ in range(rows)]
    if garbage:
        lines[::50] = ["1,id1,more"] * len(lines[::50])
    path.write_text("\n".join(["label,c", *lines]) + "\n")
    return path


def config_for(path, **changes):
    return csv_config(path, dense={}, sparse={"c": SparseFeature()}, split=SplitConfig(test_share=0.2), **changes)


def test_of_one_feature_test_rows_have_ids_that_train_rows_have(run_ingest, tmp_path):
    dataset = run_ingest(config_for(one_feature(tmp_path / "a.csv")))
    train, test = dataset.split("train"), dataset.split("test")
    assert (test["c"] >= 2).mean() > 0.99  # before: every one of them was unseen
    assert test.height / (train.height + test.height) == pytest.approx(0.2, abs=0.03)
    assert dataset.summary["split_by_place"] == ["all"]
    (said,) = [line for line in dataset.messages if "distinct contents" in line]
    assert said.startswith("pass 1 of 2: 2,940 rows have 60 distinct contents") and "by file and row number" in said
    assert (dataset.summary["rows"], dataset.summary["rows_quarantined"], len(dataset.quarantine)) == (3000, 60, 60)
    assert dataset.json("profile.json")["rows"] == {"train": train.height, "test": test.height}


def test_the_split_by_row_is_the_same_for_any_block_size_and_place(run_ingest, tmp_path, monkeypatch):
    path = one_feature(tmp_path / "a.csv")
    whole = run_ingest(config_for(path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/a.csv").write_bytes(path.read_bytes())
    for size in (300, 4001):
        monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", size)
        cut = config_for(tmp_path / "elsewhere")
        cut.ingest.block_mib = 1
        assert run_ingest(cut).checksums == whole.checksums


@pytest.mark.parametrize("end", ["", "/*/*"])
def test_a_row_stays_on_its_side_whatever_lies_beside_its_file_and_however_it_is_packed(run_ingest, tmp_path, end):
    """A log is delivered again, with another hour or compressed: who serves has trained on none of its test rows."""

    def sides(folder):
        dataset = run_ingest(config_for(f"{folder}{end}"))
        assert dataset.summary["split_by_place"] == ["all"]
        ids = dict(dataset.vocab("c").select("row", "id").rows())
        return [[ids.get(row) for row in dataset.split(split)["c"]] for split in ("train", "test")]

    first, second = tmp_path / "logs/hour=00/a.csv", tmp_path / "logs/hour=01/a.csv"
    first.parent.mkdir(parents=True)
    one_feature(first, garbage=False)
    alone = sides(tmp_path / "logs")
    packed = first.with_suffix(".csv.gz")
    packed.write_bytes(gzip.compress(first.read_bytes()))
    first.unlink()
    assert sides(tmp_path / "logs") == alone
    second.parent.mkdir()
    second.write_text("label,c\n1,id1\n0,id1\n")
    train, test = sides(tmp_path / "logs")
    assert len(train) + len(test) == 3002
    assert [train[: len(alone[0])], test[: len(alone[1])]] == alone


@pytest.mark.slow
@pytest.mark.ray
def test_ray_splits_by_row_as_threads_do(run_ingest, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    (tmp_path / "logs").mkdir()
    one_feature(tmp_path / "logs/a.csv")
    one_feature(tmp_path / "logs/b.csv", rows=700)
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 700)
    datasets = []
    for engine in ("local", "ray"):
        config = config_for(tmp_path / "logs")
        config.ingest = IngestConfig(block_mib=1, engine=engine)
        datasets.append(run_ingest(config))
    assert datasets[0].summary["split_by_place"] == ["all"]
    assert datasets[0].checksums == datasets[1].checksums


def test_a_log_that_was_delivered_twice_is_split_by_content(run_ingest, tmp_path):
    """A split by row would train on the twins of its test rows."""
    lines = [f"{i % 2},{i},id{i % 9}" for i in range(500)] * (OFTEN - 1)
    (tmp_path / "a.csv").write_text("\n".join(["label,x,c", *lines]) + "\n")
    dataset = run_ingest(csv_config(tmp_path / "a.csv"))
    assert dataset.summary["split_by_place"] == []
    assert not set(dataset.split("train")["x"]) & set(dataset.split("test")["x"])


def test_no_row_is_looked_at_twice_where_there_are_no_test_rows(run_ingest, tmp_path):
    config = config_for(one_feature(tmp_path / "a.csv"))
    config.data.split.test_share = 0.0
    dataset = run_ingest(config)
    assert dataset.summary["split_by_place"] == [] and dataset.summary["rows_test"] == 0


@pytest.mark.parametrize("late", ["quarantine", "own_day"])
def test_days_of_one_feature_one_by_one_are_those_of_the_range(tmp_path, late):
    names = [f"2026-01-0{day}" for day in (1, 2, 3)]
    for number, name in enumerate(names):
        rng = np.random.default_rng(number)
        lines = [f"{rng.integers(2)},1,id{rng.integers(20)},{name}" for _ in range(600)]
        lines += [f"1,1,id{i % 20},{names[-1]}" for i in range(100 + number)]  # early rows of the last day
        write_day(tmp_path, name, lines)
    changes = {"dense": {}, "split": SplitConfig(test_share=0.2), "late": late, "timestamp": "t"}
    one, all_at_once = Nights(tmp_path / "one"), Nights(tmp_path / "all")
    single, before = [], None
    for name in names:
        made = one.ingest(config_of(tmp_path, name, mapping_from=before, **changes))
        before = made.artifact.path
        single.append(made)
    whole = all_at_once.ingest(config_of(tmp_path, f"{names[0]}..{names[-1]}", **changes))
    assert whole.summary["split_by_place"] == names
    for split in ("train", "test"):
        assert whole.split(split).equals(pl.concat([made.split(split) for made in single]))
    last = (date(2026, 1, 3) - date(1970, 1, 1)).days
    assert (whole.all_rows["day"] == last).sum() == (600 + 102 + (201 if late == "own_day" else 0))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=60), st.data())
def test_a_sample_does_not_depend_on_how_rows_are_cut(values, data):
    hashes = np.array(values, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    cut = data.draw(st.integers(0, len(values)))
    merged = contents_of(hashes[cut:])
    merged.merge(contents_of(hashes[:cut]))
    whole = contents_of(hashes)
    assert (merged.hashes == whole.hashes).all() and (merged.counts == whole.counts).all()
    assert merged.repeats == whole.repeats
    distinct, counts = np.unique(hashes, return_counts=True)
    assert (whole.hashes == distinct).all() and (whole.counts == counts).all()
    assert whole.repeats == (counts[counts >= OFTEN].sum() > len(values) / 2)


@pytest.mark.parametrize(("distinct", "rows"), [(100_000, 100_000), (50, 100_000), (5_000, 100_000), (60_000, 17_000)])
def test_the_sample_of_many_rows_is_that_of_sorting_them_all(distinct, rows):
    rng = np.random.default_rng(1)
    pool = rng.integers(0, 2**64, distinct, dtype=np.uint64)
    hashes = pool[rng.integers(0, distinct, rows)]
    made, merged = contents_of(hashes), contents_of(*np.array_split(hashes, 7))
    exact, counts = np.unique(hashes, return_counts=True)
    for sample in (made, merged):
        assert (sample.hashes == exact[:SAMPLE]).all()
        assert (sample.counts == counts[:SAMPLE]).all()
        assert sample.distinct == pytest.approx(len(exact), rel=0.08)
        assert sample.repeats == (counts[counts >= OFTEN].sum() > rows / 2)


def test_a_place_is_its_file_and_its_number():
    lines = np.arange(1, 1001)
    first, second = place_hashes("a", lines), place_hashes("b", lines)
    assert len(np.unique(np.concatenate([first, second]))) == 2000
    assert (place_hashes("a", lines[500:]) == first[500:]).all()
    assert ((first >> np.uint64(32)) < np.uint64(2**32 // 5)).mean() == pytest.approx(0.2, abs=0.04)
