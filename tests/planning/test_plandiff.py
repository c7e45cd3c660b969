"""What moved between two plans: bytes, reasons, and how plans are kept and refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pipeline.core.errors import ArtifactError
from pipeline.planning.plandiff import StoredPlan, find_plan, moved_bytes, plan_diff
from pipeline.records import Plan, plain
from pipeline.report.planning import difference
from pipeline.store import Store
from tests.made_up_plans import cached, cluster, laptop, table


def stored(plan: Plan, **settings) -> StoredPlan:
    return StoredPlan(name="x", plan=plan, settings=settings)


def diff(old: Plan, new: Plan, before=None, after=None):
    return plan_diff(stored(old, **(before or {})), stored(new, **(after or {})))


@pytest.mark.parametrize(
    ("old", "new", "rows"),
    [
        (table(800, [0]), table(800, [0]), 0),
        (table(800, [0]), table(800, [1]), 800),
        (table(800, [0]), table(800, range(4)), 600),
        (table(800, range(4)), table(800, range(2)), 600),
        (table(800, [0]), table(800, range(4), sharding="data_parallel"), 2400),
        (table(800, [0]), table(800, [0], tier="ddr"), 800),
        (table(800, [0]), table(1000, [0]), 200),
    ],
)
def test_moved_bytes_are_those_that_no_rank_and_tier_held(old, new, rows):
    assert moved_bytes(old, new) == rows * (128 + 1) * 4


def test_equal_plans_differ_in_nothing():
    record = diff(cluster(), cluster())
    assert (record.tables, record.changes, record.bytes_moved) == ({}, {}, 0)
    assert "no table moved" in difference(record) and "same" in difference(record)


def test_a_moved_table_says_how_far_at_what_cost_and_why():
    old = cluster(8, 2)
    moved = cached(old.tables["C1"].rows, range(2), reason="no room in HBM", cost_ms=1.5)
    new = replace(
        old, tables={**old.tables, "C1": moved}, figures={**old.figures, "hbm_gib": 20.0}, predicted_step_ms=9.6
    )
    record = diff(old, new, {"plan.hbm_reserve": 0.1}, {"plan.hbm_reserve": 0.2})
    change = record.tables["C1"]
    assert list(record.tables) == ["C1"]
    assert change.places == {"tier": ["hbm", "hbm_cached"], "cache_rows": [0, 4_000_000]}
    assert change.bytes_moved == change.bytes == 40_000_000 * 129 * 4
    assert record.changes == {"hardware.hbm_gib": [79.0, 20.0], "plan.hbm_reserve": [0.1, 0.2]}
    text = difference(record)
    assert "hardware.hbm_gib: 79 -> 20" in text and "plan.hbm_reserve: 0.1 -> 0.2" in text
    assert "C1: hbm row_wise on 2 ranks -> hbm_cached row_wise on 2 ranks, 4,000,000 rows" in text
    assert "1.000 -> 1.500 ms, hit rate 100.0% -> 97.1%" in " ".join(text.split())
    assert "was      40,000,000 rows are cheapest row_wise" in text and "now      no room in HBM" in text
    assert "because  the inputs above changed, not the table's own" in text
    assert "+50.0%" in text and max(map(len, text.splitlines())) <= 80


def test_a_tables_own_changes_explain_it_before_those_of_the_plan():
    old = laptop()
    new = replace(
        old, tables={**old.tables, "C1": table(2_000_000, [0], dim=16, tier="ssd", pooling=3.5)}, profile_key="b" * 64
    )
    record = diff(old, new, {"seed": 1}, {"seed": 1, "plan.tables.C1.tier": "ssd", "plan.tables.C10.tier": "ddr"})
    own = {"rows": [1_000_000, 2_000_000], "pooling": [1.0, 3.5], "plan.tables.C1.tier": [None, "ssd"]}
    assert record.own == {"C1": own}
    assert record.tables["C1"].because == [
        "rows 1,000,000 -> 2,000,000",
        "pooling 1.0 -> 3.5",
        "plan.tables.C1.tier not set -> ssd",
    ]
    assert record.changes == {"profile": ["a" * 12, "b" * 12]}
    assert "plan.tables.C1.tier not set -> ssd" in " ".join(difference(record).split())


def test_settings_are_said_as_they_are_typed_and_empty_pins_are_none():
    types = ["data_parallel", "table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise"]
    pins = {"plan.tables.C1.tier": "", "plan.tables.C1.avoid": [], "plan.tables.C1.sharding": "table_wise"}
    record = diff(laptop(), laptop(), {"plan.sharding_types": types}, {"plan.sharding_types": types[1:2], **pins})
    assert record.own == {"C1": {"plan.tables.C1.sharding": [None, "table_wise"]}}
    text = difference(record)
    assert "table_column_wise] -> [table_wise]" in " ".join(text.split()) and max(map(len, text.splitlines())) <= 80


def test_a_table_that_moved_with_nothing_changed_makes_room():
    old = laptop()
    record = diff(old, replace(old, tables={**old.tables, "C2": replace(old.tables["C2"], tier="ssd")}))
    assert "because  other tables changed, and this one moved to make or use room" in difference(record)


def test_new_and_gone_tables_are_named():
    old, new = laptop(4), laptop(3)
    new = replace(new, tables={**new.tables, "extra": table(10, [0], dim=16)})
    text = difference(diff(old, new))
    assert "1 table gone: C4" in text and "1 table new: extra" in text


def test_tables_that_moved_alike_are_said_together():
    old = cluster(26, 8)
    tables = {name: replace(kept, tier="ddr", reason=f"{name} did not fit") for name, kept in old.tables.items()}
    new = replace(old, tables=tables, figures={**old.figures, "hbm_gib": 2.0})
    text = difference(diff(old, new))
    assert text.count("because  the inputs above changed, not the table's own") == text.count("\n  copied ") < 8
    assert "C26, C20, C14, C8, C2, C21, C15, C9, C22, C16 and 9 more: hbm table_wise on one rank -> ddr" in " ".join(
        text.split()
    )
    assert "now      C26: C26 did not fit" in text and "(19 tables: " in text
    same = {name: table(900, [0], dim=16, cost_ms=0.25) for name in ("a", "b")}
    elsewhere = {
        name: replace(kept, shards=table(900, [i + 1], dim=16).shards) for i, (name, kept) in enumerate(same.items())
    }
    text = difference(diff(replace(laptop(), tables=same), replace(laptop(), tables=elsewhere)))
    assert "a, b: hbm table_wise on one rank, other ranks\n" in text and "0.500 -> 0.500 ms" in text
    assert "  why      900 rows are cheapest table_wise" in text


def test_hundreds_of_moves_are_summed_up():
    old = cluster(1000)
    tables = {name: replace(kept, tier="ddr", pooling=1.0 + i) for i, (name, kept) in enumerate(old.tables.items())}
    record = diff(old, replace(old, tables=tables))
    text = difference(record)
    assert "1,000 of 1,000 tables moved" in text and "and 980 more" in text
    assert len(record.tables) == 1000 and len(text.splitlines()) < 260
    json.dumps(plain(record))


@pytest.fixture
def store(tmp_path) -> Store:
    """Three plans, two of them of runs, two with keys that begin alike."""
    store = Store(str(tmp_path / "store"))
    for key, run, reserve in (("abc1" * 8, "monday", 0.1), ("abc2" * 8, "tuesday", 0.2), ("def3" * 8, "", 0.3)):
        config = {"plan": {"hbm_reserve": reserve, "tables": {}}}
        with store.draft(f"plans/{key}", kind="plan", key=key, config=config, inputs={}) as draft:
            draft.write_json("plan.json", cluster(6, 2).to_json())
            draft.commit({})
        if run:
            store.write_json(f"runs/{run}/steps.json", {"steps": [{"name": "plan", "path": f"plans/{key}"}]})
    return store


def test_plans_are_found_by_run_key_and_path(store, tmp_path):
    monday = find_plan(store, "monday")
    assert monday.plan == cluster(6, 2) and monday.settings == {"plan.hbm_reserve": 0.1}
    assert monday.name == "monday (abc1abc1abc1)"
    assert find_plan(store, "d").name == "def3def3def3"
    assert find_plan(store, "plans/abc2").settings == {"plan.hbm_reserve": 0.2}
    path = tmp_path / "store" / "plans" / ("def3" * 8)
    assert find_plan(store, str(path)).settings == find_plan(store, str(path / "plan.json")).settings != {}
    alone = tmp_path / "alone.json"
    alone.write_text(json.dumps(cluster(6, 2).to_json()))
    assert find_plan(store, str(alone)).settings == {}


def test_a_stored_plan_that_was_changed_by_hand_is_refused(store, tmp_path):
    path = tmp_path / "store" / "plans" / ("def3" * 8) / "plan.json"
    path.write_text(path.read_text().replace("table_wise", "row_wise"))
    with pytest.raises(ArtifactError, match=r"plan.json is corrupt"):
        find_plan(store, "def3")


def test_names_that_mean_no_plan_or_several_are_refused(store, tmp_path):
    with pytest.raises(ArtifactError, match="prefix of 2 plans' keys: abc1abc1abc1, abc2abc2abc2"):
        find_plan(store, "abc")
    with pytest.raises(ArtifactError, match=r"'friday' names no plan .* a run \(monday, tuesday\)"):
        find_plan(store, "friday")
    for text in ("{", "[]", '{"version": 2, "tables": {}, "surprise": 1}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ArtifactError, match="bad.json (cannot be read as JSON|is not a plan of version 2)"):
            find_plan(store, str(tmp_path / "bad.json"))
