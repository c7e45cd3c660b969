"""Towers with sequences from the log to a published version: two ranks train, go on, are evaluated, publish, score."""

import json

import polars as pl
import pytest

from tests.commands import nightjar_in_turn
from tests.training.test_sequences import BASE, ROWS, assert_same_rows, result, write_log

pytestmark = pytest.mark.slow
TWO = ["partition=dmt", "hardware.hosts=2", "hardware.ranks_per_host=1"]
STRIDED = [*TWO, "partition.strategy=strided"]
# Small rates: rounding grows with every step, by the order of the rows (2e-6 at rates five times as high).
FEW = ["train.epochs=1", "train.max_steps=6", "train.sparse_lr=0.01", "train.lr=0.0004"]
PUBLISH = [
    "stages=[ingest,plan,partition,train,evaluate,publish]",
    "publish.quantise=fp32",
    "gate.min_baseline_gain=null",
    "gate.min_rows=100",
    "gate.max_ne=1.5",
    "gate.min_auc=0",
    "gate.max_calibration_error=null",
]
COMPRESS = ["partition.module=dcn", "partition.dim=4"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sequences")
    write_log(folder)
    commands = [
        ["run", *BASE, *FEW, "run=flat"],
        ["run", *BASE, *FEW, *STRIDED, "run=whole"],
        ["run", *BASE, *FEW, *STRIDED, "run=cut", "train.max_steps=2", "train.max_events=100"],
        ["run", *BASE, *FEW, *STRIDED, "run=cut", *PUBLISH],
        [
            "run",
            *BASE,
            *STRIDED,
            *COMPRESS,
            *PUBLISH,
            "run=small",
            "checkpoint.init_from=flat",
            "publish.model=small",
            "checkpoint.allow=[train.sparse_lr,train.lr]",
        ],
        ["predict", "log.parquet", "--model", "clicks", "--store", "store", "--out", "scores.parquet"],
        ["partition", *BASE, *TWO, "run=compared", "partition.probe_steps=4", "+partition.pins.searches=1"],
    ]
    for done in nightjar_in_turn(commands, cwd=folder, timeout=900):
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def towers(folder, run):
    part = result(folder, run)["stages"]["partition"]["artifact"]
    return json.loads((folder / "store" / part / "towers.json").read_text())


def gate(folder, run):
    return json.loads(
        (folder / "store" / result(folder, run)["stages"]["publish"]["artifact"] / "gate.json").read_text()
    )


def test_a_history_is_in_the_tower_of_its_tables(runs):
    assert [sorted(tower["features"]) for tower in towers(runs, "whole")["towers"]] == [
        ["user"],
        ["category", "history", "item", "last", "searches"],
    ]
    plan = result(runs, "whole")["plan"]["tables"]
    assert {name: table["ranks"] for name, table in plan.items()} == {
        "user": [0],
        "item": [1],
        "category": [1],
        "history__age": [1],
        "searches__word": [1],
    }


def test_towers_train_the_flat_model(runs):
    flat, whole = (result(runs, name)["eval"] for name in ("flat", "whole"))
    assert whole["ne"] == pytest.approx(flat["ne"], rel=1e-5)
    assert_same_rows(runs, "whole", "flat")


def test_a_training_goes_on_with_all_events_at_once(runs):
    """It began with 100 at a time: other sums, so nearly the same bits."""
    assert result(runs, "cut")["train"]["resumed"]["step"] == 2
    assert_same_rows(runs, "cut", "whole", atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("run", ["cut", "small"])
def test_a_published_version_scores_as_the_training_did(runs, run):
    record = gate(runs, run)
    assert record["verdict"] == "PASS"
    assert record["candidate"]["ne"][0] == pytest.approx(result(runs, run)["eval"]["ne"], rel=1e-5)


def test_raw_rows_are_scored(runs):
    scores = pl.read_parquet(runs / "scores.parquet")
    assert len(scores) == ROWS and scores["probability"].std() > 0


def test_sequences_are_compared_with_features(runs):
    """By the vectors that the probe makes of them."""
    evidence = towers(runs, "compared")["evidence"]
    assert evidence["features"] == ["user", "item", "category", "last", "history", "searches"]
    assert all(len(row) == 6 for row in evidence["similarity"])
    assert evidence["similarity"][0][4] > 0 and min(evidence["loads"]["bytes"]) > 0
