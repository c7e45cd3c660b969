"""Mappings that are carried from day to day: who has which row, who loses it, and that ten days are ten days."""

import itertools

import numpy as np
import polars as pl
import pytest

from pipeline.config import SparseDefaults, SparseFeature, SplitConfig
from pipeline.core.errors import ArtifactError, ConfigError
from pipeline.ingest.schema_of_config import data_spec
from pipeline.ingest.vocabulary import empty, updated

from .conftest import csv_config
from .test_days import Nights, config_of, write_day


@pytest.fixture
def nights(tmp_path):
    return Nights(tmp_path)


def feature(**changes):
    return data_spec(csv_config("x", sparse={"c": SparseFeature(**changes)}).data).sparse[0]


def counted(**counts):
    hashes = [ord(name[0]) * 1000 + len(name) for name in counts]
    return pl.DataFrame(
        {"hash": hashes, "id": list(counts), "count": list(counts.values())},
        schema={"hash": pl.UInt64, "id": pl.String, "count": pl.Int64},
    )


def rows(mapping):
    return dict(mapping.known.select("id", "row").rows())


def after(*days, spec, first_day=None):
    """The mapping after ``days`` of counts, each a dataset of its own unless ``first_day`` is given."""
    mapping = empty()
    for day, counts in enumerate(days):
        mapping = updated(mapping, counted(**counts), spec, day, day if first_day is None else first_day)
    return mapping


def test_the_first_build_ranks_by_count_and_later_ids_are_appended():
    mapping = after({"a": 5, "b": 9}, {"c": 4, "d": 6, "a": 100}, spec=feature(rows=100))
    assert rows(mapping) == {"b": 2, "a": 3, "d": 4, "c": 5}
    assert mapping.known.filter(pl.col("id") == "a")["count"].to_list() == [105]
    assert mapping.rows == 6


def test_rare_ids_wait_until_they_were_seen_often_enough():
    spec = feature(rows=100, min_count=3)
    assert rows(after({"a": 2, "b": 3}, spec=spec)) == {"b": 2}
    assert rows(after({"a": 2, "b": 3}, {"a": 1}, spec=spec)) == {"b": 2, "a": 3}


def test_growth_ends_at_the_cap():
    mapping = after({"a": 3, "b": 2}, {"c": 9, "d": 8}, {"e": 99}, spec=feature(rows=5, when_full="keep"))
    assert rows(mapping) == {"a": 2, "b": 3, "c": 4}
    assert mapping.candidates["id"].to_list() == ["e", "d"]


def test_ids_that_were_not_seen_for_long_lose_their_rows_to_others():
    spec = feature(rows=5, evict_after_days=2)
    days = [{"a": 5, "b": 4, "c": 3}, {"a": 1, "d": 2}, {"a": 1}]
    assert rows(after(*days, spec=spec)) == {"a": 2, "b": 3, "c": 4}
    mapping = after(*days, {"a": 1, "e": 1}, spec=spec)
    assert mapping.freed.select("row", "id", "last_day").rows() == [(3, "b", 0), (4, "c", 0)]
    assert rows(mapping) == {"a": 2, "d": 3, "e": 4}


def test_within_one_dataset_a_row_never_belongs_to_two_ids():
    days = [{"a": 5, "b": 4, "c": 3}, {"a": 1, "d": 2}, {"a": 1}, {"a": 1, "e": 1}]
    mapping = after(*days, spec=feature(rows=5, evict_after_days=2), first_day=0)
    assert rows(mapping) == {"a": 2}
    assert after(*days, spec=feature(rows=7, evict_after_days=2), first_day=0).known["row"].to_list() == [2, 5, 6]
    # The next day's dataset may use them.
    later = updated(mapping, counted(f=7), feature(rows=5, evict_after_days=2), 4, 4)
    assert rows(later)["f"] == 3


def test_every_id_keeps_its_row_whatever_comes():
    """Against a plain model of the rules, over random days."""
    rng, spec = np.random.default_rng(3), feature(rows=20, min_count=2, evict_after_days=3)
    mapping, last, owner = empty(), {}, {}
    for day in range(40):
        low = day // 2
        seen = {f"id{i:03}": int(rng.integers(1, 4)) for i in rng.integers(low, low + 12, 8)}
        columns = {"hash": [int(name[2:]) for name in seen], "id": list(seen), "count": list(seen.values())}
        hashes = pl.DataFrame(columns, schema={"hash": pl.UInt64, "id": pl.String, "count": pl.Int64})
        before, mapping = rows(mapping), updated(mapping, hashes, spec, day, day)
        last.update(dict.fromkeys(seen, day))
        now = rows(mapping)
        assert len(set(now.values())) == len(now) and all(2 <= row < 20 for row in now.values())
        for name, row in before.items():
            assert now.get(name) == row or day - last[name] > 3
        freed = dict(mapping.freed.filter(pl.col("last_day") == day - 4).select("id", "row").rows())
        assert {name: before[name] for name in before if day - last[name] == 4} == freed
        owner.update({row: name for name, row in now.items()})
    assert mapping.freed.height > 10


def write_days(tmp_path, count, ids=12):
    rng = np.random.default_rng(0)
    for number in range(1, count + 1):
        day = f"2026-01-{number:02}"
        names = rng.zipf(1.3, 120).clip(0, ids + 4 * number) + number // 3
        lines = [f"{int(rng.random() < 0.3)},{i},id{name},{day} 01:00:00" for i, name in enumerate(names)]
        write_day(tmp_path, day, lines)


def test_ten_days_one_by_one_are_the_same_ten_days_at_once(nights, tmp_path):
    write_days(tmp_path, 10)
    settings = {
        "sparse_defaults": SparseDefaults(min_count=2, rows=60, evict_after_days=11),
        "sparse": {
            "c": SparseFeature(),
            "h": SparseFeature(column="c", mapping="hash", rows=30),
            "two": SparseFeature(column="c", mapping="double_hash", rows=30),
        },
        "split": SplitConfig(test_share=0.2),
    }
    nightly, source = [], None
    for number in range(1, 11):
        nightly.append(nights.ingest(config_of(tmp_path, f"2026-01-{number:02}", mapping_from=source, **settings)))
        source = nightly[-1].artifact.path
    whole = nights.ingest(config_of(tmp_path, "2026-01-01..2026-01-10", **settings))
    for split in ("train", "test"):
        days = pl.concat([dataset.split(split) for dataset in nightly])
        assert days.equals(whole.split(split))
    for file in ("vocab/c.parquet", "candidates/c.parquet"):
        assert pl.read_parquet(whole.bytes(file)).equals(pl.read_parquet(nightly[-1].bytes(file)))
    assert whole.schema.sparse == nightly[-1].schema.sparse
    assert whole.summary["rows"] == 1200
    sizes = [dataset.schema.sparse[0].rows for dataset in nightly]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]  # it grew
    # Nobody's row changed on the way.
    for before, now in itertools.pairwise(nightly):
        then, rows_now = (dict(d.vocab("c").select("id", "row").rows()) for d in (before, now))
        assert then.items() <= rows_now.items()


def test_the_last_days_of_a_range_can_be_the_test_days(nights, tmp_path):
    write_days(tmp_path, 4)
    whole = nights.ingest(config_of(tmp_path, "2026-01-01..2026-01-04", split=SplitConfig(by="day", test_days=1)))
    assert whole.schema.rows == {"train": 360, "test": 120}
    assert whole.split("test")["day"].unique().to_list() == [20_457]
    assert whole.vocab("c")["last_day"].max() == 20_456


def test_freed_rows_are_listed(nights, tmp_path):
    for number, name in ((1, "old"), (2, "new"), (4, "newest")):
        day = f"2026-01-0{number}"
        write_day(tmp_path, day, [f"{i % 2},{i},{'always' if i % 3 else name},{day}" for i in range(30)])
    source = None
    for number in (1, 2, 4):
        sparse = {"c": SparseFeature(evict_after_days=2)}
        dataset = nights.ingest(config_of(tmp_path, f"2026-01-0{number}", mapping_from=source, sparse=sparse))
        source = dataset.artifact.path
    assert dataset.summary["rows_freed"] == {"c": 1}
    assert pl.read_parquet(dataset.bytes("freed/c.parquet")).rows() == [(3, "old", 20_454)]
    assert dict(dataset.vocab("c").select("id", "row").rows()) == {"always": 2, "newest": 3, "new": 4}


def test_double_hash_sums_two_rows(nights, tmp_path):
    write_day(tmp_path, "2026-01-01", [f"{i % 2},{i},id{i % 400},2026-01-01" for i in range(800)] + ["1,1,,2026-01-01"])
    sparse = {
        "two": SparseFeature(column="c", mapping="double_hash", rows=100),
        "many": SparseFeature(column="c", mapping="double_hash", rows=100, separator="d", weight_separator=":"),
    }
    dataset = nights.ingest(config_of(tmp_path, "2026-01-01", sparse=sparse))
    train = dataset.split("train")
    assert [(c.rows, c.multi) for c in dataset.schema.sparse] == [(100, True)] * 2
    pairs = train["two"].to_list()
    assert all(len(pair) == 2 for pair in pairs[:-1]) and pairs[-1] == [0]
    assert pairs[0] == pairs[400] and all(2 <= row < 100 for pair in pairs[:-1] for row in pair)
    assert len(set(map(tuple, pairs[:400]))) > 380  # one hash has 98 values
    lists = train["many"].to_list()
    assert [len(bag) for bag in lists[:2]] == [4, 4] and lists[-1] == [0]  # "id7" is "i" and "7": two ids
    assert [len(bag) for bag in train["many__weight"]] == [len(bag) for bag in lists]
    profile = dataset.json("profile.json")["sparse"]["two"]
    assert profile["pooling"] == pytest.approx(2, abs=0.01)


def test_what_cannot_be_carried_on(nights, tmp_path):
    write_days(tmp_path, 2)
    hashed = {"c": SparseFeature(mapping="hash", rows=30)}
    first = nights.ingest(config_of(tmp_path, "2026-01-01", sparse=hashed)).artifact.path
    with pytest.raises(ConfigError, match=r"data.sparse.c.rows is 31, but .* has 30: every id would get another row"):
        changed = {"c": SparseFeature(mapping="hash", rows=31)}
        nights.ingest(config_of(tmp_path, "2026-01-02", sparse=changed, mapping_from=first))
    with pytest.raises(ConfigError, match="data.sparse.c.mapping is 'vocab'"):
        nights.ingest(config_of(tmp_path, "2026-01-02", mapping_from=first))
    with pytest.raises(ArtifactError, match="data.mapping_from=datasets.d.nowhere is not a dataset"):
        nights.ingest(config_of(tmp_path, "2026-01-02", mapping_from="datasets/d/nowhere"))
    second = nights.ingest(config_of(tmp_path, "2026-01-01")).artifact.path
    with pytest.raises(ConfigError, match=r"data.sparse.c.rows is 3, but its mapping has \d+ rows already"):
        few = {"c": SparseFeature(rows=3)}
        nights.ingest(config_of(tmp_path, "2026-01-02", sparse=few, mapping_from=second))


def test_a_new_feature_joins_a_carried_mapping(nights, tmp_path):
    write_days(tmp_path, 2)
    first = nights.ingest(config_of(tmp_path, "2026-01-01"))
    sparse = {"c": SparseFeature(), "again": SparseFeature(column="c")}
    second = nights.ingest(config_of(tmp_path, "2026-01-02", sparse=sparse, mapping_from=first.artifact.path))
    then, now = (dict(d.vocab("c").select("id", "row").rows()) for d in (first, second))
    assert then.items() <= now.items()
    assert second.vocab("again")["row"].to_list()[:2] == [2, 3]


def test_dense_transforms_stay_as_they_were_fitted(nights, tmp_path):
    write_days(tmp_path, 1)
    write_day(tmp_path, "2026-01-02", [f"{i % 2},{1000 + i},a,2026-01-02" for i in range(30)])
    first = nights.ingest(config_of(tmp_path, "2026-01-01"))
    carried = nights.ingest(config_of(tmp_path, "2026-01-02", mapping_from=first.artifact.path))
    alone = nights.ingest(config_of(tmp_path, "2026-01-02"))
    fitted = [dataset.json("transforms.json")["dense"]["x"]["mean"] for dataset in (first, carried, alone)]
    assert fitted[0] == fitted[1] < fitted[2]
    assert carried.split("train")["x"].min() > 1.5
