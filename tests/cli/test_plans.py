"""``nightjar what-if`` and ``nightjar plan-diff``: arguments, exit codes, messages, and that nothing is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.store import Store
from tests.made_up_plans import cluster

SMALL = ("experiment=demo", "data.synthetic.rows=2000")
# Eight features in place of 26, as every plan weighs each table in many ways.
FEW = (*SMALL, "data.synthetic.pairs=4", "data.synthetic.quads=0", *(f"~data.sparse.C{n}" for n in range(9, 27)))


@pytest.fixture
def in_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "store"


def two_plans(root: Path) -> None:
    old = cluster(6, 2)
    new = replace(old, tables={**old.tables, "C2": replace(old.tables["C2"], tier="ddr", reason="HBM is full")})
    for key, plan in (("aa" * 16, old), ("bb" * 16, new)):
        with Store(str(root)).draft(f"plans/{key}", kind="plan", key=key, config={}, inputs={}) as draft:
            draft.write_json("plan.json", plan.to_json())
            draft.commit({})


def test_help_says_how_several_values_are_given_and_how_plans_are_named(nightjar) -> None:
    what_if, diff = nightjar("what-if", "--help"), nightjar("plan-diff", "--help")
    assert "hardware=h100x8,h100x16x8" in what_if.stdout and "Exit code 4" in what_if.stdout
    assert "by its key in the store" in diff.stdout and "--json" in diff.stdout


def test_what_if_needs_a_dataset_and_names_the_command_that_makes_it(nightjar, in_store) -> None:
    done = nightjar("what-if", *SMALL, "hardware=h100x8,laptop", "run=x")
    assert done.returncode == 7
    assert "no dataset of 'synthetic' with these settings in store ./store" in done.stderr
    assert "hint: nightjar ingest experiment=demo data.synthetic.rows=2000\n" in done.stderr
    assert not in_store.exists()


def test_the_command_that_makes_a_dataset_finds_the_same_files(nightjar, in_store, tmp_path) -> None:
    (tmp_path / "own" / "data").mkdir(parents=True)
    (tmp_path / "own" / "data" / "mine.yaml").write_text("defaults: [synthetic]\nname: mine\n")
    done = nightjar("widths", "-cd", f"{tmp_path}/own", "data=mine")
    assert done.returncode == 7
    assert f"hint: nightjar ingest -cd {tmp_path}/own data=mine\n" in done.stderr


def test_where_no_combination_is_valid_the_first_is_named(nightjar, in_store) -> None:
    done = nightjar("what-if", "hardware=laptop2,h100x8", "train.global_batch=1")
    assert (done.returncode, "hardware=laptop2: train.global_batch is 1" in done.stderr) == (2, True)
    assert "did you mean" in nightjar("what-if", "hardware=h100x9").stderr
    assert nightjar("what-if", "--nonsense").returncode == 2


def test_what_if_compares_every_combination_and_leaves_no_run(nightjar, in_store) -> None:
    assert nightjar("ingest", *FEW, "run=data").returncode == 0
    before = sorted(str(path) for path in in_store.rglob("*"))
    sweep = ("hardware=laptop", "hardware.ddr_gib=0.002,4", "plan.sharding_types=[table_wise],[table_wise,row_wise]")
    done = nightjar("what-if", *FEW, *sweep, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    records = json.loads(done.stdout)
    assert [record["fits"] for record in records] == [False, False, True, True]
    assert records[3]["settings"] == {"hardware.ddr_gib": "4", "plan.sharding_types": "[table_wise,row_wise]"}
    text = nightjar("what-if", *FEW, "hardware=laptop", "hardware.ddr_gib=0.002,0.003")
    assert text.returncode == 4 and "0 of 2 fit" in text.stdout and "first remedy: " in text.stdout
    mixed = nightjar("what-if", *FEW, "hardware=laptop2,laptop,h100x9", "train.global_batch=1")
    assert (mixed.returncode, mixed.stderr) == (0, "") and "1 of 3 fit" in mixed.stdout
    assert "\n1: train.global_batch is 1" in mixed.stdout and "\n3: " in mixed.stdout
    assert sorted(str(path) for path in in_store.rglob("*")) == before


def test_plan_diff_by_key_as_text_and_json(nightjar, in_store) -> None:
    two_plans(in_store)
    done = nightjar("plan-diff", "aa", "bb")
    assert done.returncode == 0
    assert "C2: hbm table_wise on rank 1 -> ddr table_wise on rank 1" in done.stdout
    assert "now      HBM is full" in done.stdout
    record = json.loads(nightjar("plan-diff", "aa", "bb", "--json", f"store={in_store}").stdout)
    assert list(record["tables"]) == ["C2"]


def test_plan_diff_of_an_unknown_plan_lists_those_there_are(nightjar, in_store) -> None:
    two_plans(in_store)
    done = nightjar("plan-diff", "aa", "yesterday")
    assert done.returncode == 7
    assert "'yesterday' names no plan in store ./store" in done.stderr and "aaaaaaaaaaaa, bbbbbbbbbbbb" in done.stderr
