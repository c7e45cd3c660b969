"""Vocabularies that are full: their coldest rows go to ids that are looked up more, and to no others."""

import itertools

import numpy as np
import polars as pl
import pytest

from pipeline.config import SparseDefaults, SparseFeature, SplitConfig
from pipeline.config.checks import check
from pipeline.core.errors import ConfigError
from pipeline.ingest import engines
from pipeline.ingest.vocabulary import COOLING, empty, updated

from .conftest import csv_config
from .test_days import Nights, config_of, write_day
from .test_vocabulary import after, counted, feature, rows


@pytest.fixture
def nights(tmp_path):
    return Nights(tmp_path)


def test_the_coldest_rows_of_a_full_table_go_to_the_hottest_new_ids():
    mapping = after({"a": 30, "b": 20, "c": 10}, {"d": 25, "e": 12, "f": 1, "a": 1}, spec=feature(rows=5))
    # c is down to 9 lookups and b to 18: d takes the colder row of the two, e (12) does not beat b.
    assert rows(mapping) == {"a": 2, "b": 3, "d": 4}
    assert mapping.freed.select("row", "id", "last_day").rows() == [(4, "c", 0)]
    assert mapping.replaced == 1
    assert mapping.candidates["id"].to_list() == ["e", "c", "f"]


def test_ids_that_are_gone_give_way_and_those_that_stay_keep_their_rows():
    days = [{"stays": 10} | {f"{letter}": 10} for letter in "abcdefg"]
    mapping = after(*days, spec=feature(rows=4))
    assert rows(mapping) == {"stays": 3, "g": 2}
    assert after(*days, spec=feature(rows=4, when_full="keep")).known["id"].to_list() == ["a", "stays"]


def test_equal_ids_do_not_take_each_others_rows_and_rare_ones_none():
    assert rows(after({"a": 10}, {"b": 9}, spec=feature(rows=3))) == {"a": 2}
    assert rows(after({"a": 10}, {"b": 10}, spec=feature(rows=3))) == {"b": 2}
    long_ago = [{"a": 3}, *[{}] * 9]
    assert rows(after(*long_ago, {"b": 2}, spec=feature(rows=3))) == {"b": 2}
    assert rows(after(*long_ago, {"b": 2}, spec=feature(rows=3, min_count=3))) == {"a": 2}


def test_a_dataset_without_days_replaces_by_its_counts():
    spec = feature(rows=3)
    mapping = updated(updated(empty(), counted(a=5), spec, None, 0), counted(b=4), spec, None, 0)
    assert rows(mapping) == {"a": 2}
    assert rows(updated(mapping, counted(b=2), spec, None, 0)) == {"b": 2}


def test_ids_of_a_log_without_days_age_once_days_are_named():
    for changes, kept in (({}, {"b": 2}), ({"when_full": "keep", "evict_after_days": 5}, {"b": 2})):
        spec = feature(rows=3, **changes)
        mapping = updated(empty(), counted(a=100), spec, None, 0)
        for day in range(100, 150):
            mapping = updated(mapping, counted(b=2), spec, day, day)
        assert rows(mapping) == kept, changes


def test_a_dataset_without_days_replaces_rows_of_one_with_days():
    spec = feature(rows=3)
    mapping = updated(empty(), counted(a=5), spec, 20_000, 20_000)
    assert rows(updated(mapping, counted(b=9), spec, None, 0)) == {"b": 2}


def test_within_one_dataset_a_row_that_was_used_keeps_its_id():
    spec = feature(rows=4)
    before = after({"a": 5, "b": 4}, spec=spec)
    mapping = updated(before, counted(a=1, c=20), spec, 1, 1)  # the first day of a range: both rows may change hands
    assert rows(mapping) == {"a": 2, "c": 3}
    mapping = updated(mapping, counted(d=90), spec, 2, 1)
    assert rows(mapping) == {"a": 2, "c": 3}
    assert rows(updated(mapping, counted(d=1), spec, 3, 3)) == {"d": 2, "c": 3}


def test_random_days_follow_the_rules():
    """Against a plain model of them, whole numbers of thousandths left out: heat is compared as it is computed."""
    rng, spec, size = np.random.default_rng(7), feature(rows=10, min_count=2), 8
    mapping, owner, seen_last, count, heat = empty(), {}, {}, {}, {}
    for day in range(30):
        today = {f"id{i:03}": int(rng.integers(1, 6)) for i in rng.integers(day // 3, day // 3 + 14, 9)}
        columns = {"hash": [int(name[2:]) for name in today], "id": list(today), "count": list(today.values())}
        lookups = pl.DataFrame(columns, schema={"hash": pl.UInt64, "id": pl.String, "count": pl.Int64})
        mapping = updated(mapping, lookups, spec, day, day)
        for name, times in today.items():
            cooled = heat.get(name, 0.0)
            for _ in range(day - seen_last.get(name, day)):
                cooled *= COOLING
            heat[name], seen_last[name] = cooled + times, day
            count[name] = count.get(name, 0) + times
        now = {name: heat[name] * COOLING ** (day - seen_last[name]) for name in heat}
        wanting = [name for name in count if name not in owner and count[name] >= 2]
        for name in sorted(wanting, key=lambda n: (-count[n], int(n[2:])))[: max(size - len(owner), 0)]:
            owner[name] = min(set(range(2, 2 + size)) - set(owner.values()))
            wanting.remove(name)
        hot = sorted(wanting, key=lambda n: (-now[n], int(n[2:])))
        cold = sorted(owner, key=lambda n: (now[n], int(n[2:])))
        for new, old in zip(hot, cold, strict=False):
            if new not in owner and now[new] > now[old] * (1 + 1e-12):
                owner[new] = owner.pop(old)
        assert rows(mapping) == owner, day
    assert mapping.replaced > 20


def write_moving_days(tmp_path, days=10, size=40):
    """A world whose ids are others every few days, and more of them than there are rows."""
    rng = np.random.default_rng(2)
    for number in range(1, days + 1):
        ids = rng.integers(0, size, 400) + size // 4 * number
        lines = [f"{i % 2},{i},id{name},2026-01-{number:02}" for i, name in enumerate(ids)]
        write_day(tmp_path, f"2026-01-{number:02}", lines)


def ten_days(nights, tmp_path, **settings):
    made, source = [], None
    for number in range(1, 11):
        made.append(nights.ingest(config_of(tmp_path, f"2026-01-{number:02}", mapping_from=source, **settings)))
        source = made[-1].artifact.path
    return made


def settings_of(when_full):
    defaults = SparseDefaults(rows=42, when_full=when_full)
    return {"sparse_defaults": defaults, "sparse": {"c": SparseFeature()}, "split": SplitConfig(test_share=0.2)}


def test_ten_days_one_by_one_see_their_ids_and_list_every_row_that_changed_hands(nights, tmp_path):
    write_moving_days(tmp_path)
    kept = ten_days(nights, tmp_path, **settings_of("keep"))
    assert (kept[5].split("train")["c"] == 1).all()  # nobody who has a row is there any more
    assert kept[5].summary["rows_replaced"] == {}
    made = ten_days(nights, tmp_path, **settings_of("replace"))
    for before, now in itertools.pairwise(made):
        then, owners = (dict(d.vocab("c").select("row", "id").rows()) for d in (before, now))
        changed = {row for row in then if owners[row] != then[row]}
        assert set(pl.read_parquet(now.bytes("freed/c.parquet"))["row"].to_list()) == changed
        assert now.summary["rows_replaced"] == ({"c": len(changed)} if changed else {})
        assert now.summary["rows_freed"] == now.summary["rows_replaced"]
        assert (now.split("train")["c"] == 1).mean() < 0.7  # a quarter of the ids is new, every day
    last = made[-1].summary["rows_replaced"]["c"]
    assert f"feature 'c': all 42 rows of its table are in use; the {last} coldest went to ids" in nights.said[-1]
    again = ten_days(Nights(tmp_path / "again"), tmp_path, **settings_of("replace"))
    for one, two in zip(made, again, strict=True):
        for name in ("train/part-00000.parquet", "vocab/c.parquet", "candidates/c.parquet", "freed/c.parquet"):
            assert one.checksums[name] == two.checksums[name]


def test_a_store_of_before_goes_on(nights, tmp_path, monkeypatch):
    """Its vocabularies know no heat: their counts are taken for it."""
    write_moving_days(tmp_path, days=2)
    encoded = engines.encoded_frame
    with monkeypatch.context() as before:
        old = lambda frame, compression: encoded(frame.drop("heat", strict=False), compression)  # noqa: E731
        before.setattr(engines, "encoded_frame", old)
        first = nights.ingest(config_of(tmp_path, "2026-01-01", **settings_of("replace")))
    assert "heat" not in first.vocab("c").columns
    second = nights.ingest(
        config_of(tmp_path, "2026-01-02", mapping_from=first.artifact.path, **settings_of("replace"))
    )
    assert second.summary["rows_replaced"]["c"] > 5
    gone = second.vocab("c").filter(pl.col("last_day") == 20_454)
    assert gone.height > 3 and gone["heat"].to_list() == gone["count"].to_list()
    then, now = (dict(d.vocab("c").select("row", "id").rows()) for d in (first, second))
    assert sum(then[row] == now[row] for row in then) > 5


def test_a_policy_that_does_not_exist_is_refused():
    for changes, name in (
        ({"sparse_defaults": SparseDefaults(when_full="grow")}, "data.sparse_defaults.when_full"),
        ({"sparse": {"c": SparseFeature(when_full="grow")}}, "data.sparse.c.when_full"),
    ):
        with pytest.raises(ConfigError, match=f"{name} is 'grow', expected one of: replace, keep"):
            check(csv_config("x", **changes))
