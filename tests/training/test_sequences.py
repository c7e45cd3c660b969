"""Sequences from the log to a published version: on one rank and two, on disk, killed and gone on with, scored."""

import json

import numpy as np
import polars as pl
import pytest
import torch

from pipeline.checkpoint.reader import ChainReader
from pipeline.store import Store
from tests.commands import nightjar_in_turn

pytestmark = pytest.mark.slow
ITEMS, ROWS = 60, 3000
SCHEMA = """
defaults: [parquet]
name: clicks
path: log.parquet
label: {column: clicked}
timestamp: time
dense: {price: {}}
sparse:
  user: {rows: 64}
  item: {rows: 100}
  category: {rows: 16}
  last: {table: item}
sequences:
  history:
    max_length: 8
    target: item
    time: history.time
    age_bins: 16
    features:
      item: {table: item}
      category: {table: category}
  searches:
    max_length: 4
    features:
      word: {column: words, rows: 40}
      item: {column: found, table: item}
      other: {column: found, table: item}
"""
BASE = [
    "-cd",
    "my",
    "data=clicks",
    "model=dlrm_small",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[32]",
    "model.embedding_dim=8",
    "train.global_batch=200",
    "train.threads_per_rank=1",
    "train.precision=fp32",
    "train.log_every_steps=50",
    "train.guard.collapse=false",
    "store=store",
    "train.sparse_lr=0.3",
    "train.lr=0.005",
    "train.epochs=4",
    "train.schedule=constant",
    "train.warmup_steps=5",
    "+model.tables.category={dim: 4}",
    "+model.sequences.searches={block: sasrec, options: {layers: 2}}",
    "checkpoint.final_quantise=fp32",
    "checkpoint.state=fp32",
]
SPLIT = [
    "+plan.tables.item.sharding=row_wise",
    "+plan.tables.category.sharding=table_wise",
    "+plan.tables.history__age.sharding=table_wise",
]


def write_log(folder, name="log.parquet", items=ITEMS, seed=0):
    """A click is likely where the newest event is of the item's category, which the others do not tell."""
    rng, rows = np.random.default_rng(seed), []
    for number in range(ROWS):
        now, item = 1_767_225_600 + 10 * number, int(rng.integers(items))
        count = int(rng.integers(0, 10))
        seen = rng.integers(0, items, count)
        ages = -np.sort(-rng.integers(1, 10_000, count))
        hit = count > 0 and seen[-1] % 3 == item % 3
        searched = rng.integers(0, 30, rng.integers(0, 6)).tolist()
        rows.append(
            {
                "time": now,
                "user": f"u{rng.integers(40)}",
                "item": f"i{item}",
                "category": f"c{item % 3}",
                "last": f"i{seen[-1]}" if count else None,
                "price": float(rng.random()),
                "history": [
                    {"item": f"i{i}", "category": f"c{i % 3}", "time": now - int(age)}
                    for i, age in zip(seen, ages, strict=True)
                ],
                "words": [f"w{word}" for word in searched],
                "found": [f"i{word}" for word in searched],
                "clicked": int(rng.random() < (0.85 if hit else 0.15)),
            }
        )
    pl.DataFrame(rows, infer_schema_length=None).write_parquet(folder / name)
    (folder / "my" / "data").mkdir(parents=True, exist_ok=True)
    (folder / "my" / "data" / "clicks.yaml").write_text(SCHEMA)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The log, trained on one rank and published, on two, with a table on disk, in two parts, a day later; scored."""
    folder = tmp_path_factory.mktemp("sequences")
    write_log(folder)
    publish = "stages=[ingest,plan,partition,train,evaluate,publish]"
    commands = [
        [
            "run",
            *BASE,
            "run=one",
            publish,
            "publish.quantise=fp32",
            "gate.min_baseline_gain=null",
            "gate.min_rows=100",
            "gate.slices=[history]",
            "gate.slice_min_clicks=5",
            "gate.slice_max_calibration_error=null",
        ],
        ["run", *BASE, "run=begun", "train.max_steps=3"],
        ["run", *BASE, "run=split", "hardware.ranks_per_host=2", *SPLIT, "train.max_steps=3"],
        [
            "run",
            *BASE,
            "run=disk",
            "hardware.ssd_gib=1",
            "+plan.tables.item.tier=ssd",
            "+plan.tables.item.cache_rows=20",
        ],
        ["run", *BASE, "run=cut", "train.max_steps=20"],
        ["run", *BASE, "run=cut"],
        ["predict", "log.parquet", "--store", "store", "--out", "scores.parquet"],
    ]
    for done in nightjar_in_turn(commands, cwd=folder, timeout=900):
        assert done.returncode == 0, done.stdout + done.stderr
    write_log(folder, "log2.parquet", items=ITEMS + 10, seed=1)
    (path,) = (folder / "store" / "datasets" / "clicks").iterdir()
    still = ["train.max_steps=1", "train.sparse_lr=0", "train.lr=0", "checkpoint.allow=[train.sparse_lr,train.lr]"]
    night = [
        "run",
        *BASE,
        *still,
        "run=next",
        "data.path=log2.parquet",
        f"data.mapping_from=datasets/clicks/{path.name}",
        "checkpoint.init_from=one",
    ]
    (done,) = nightjar_in_turn([night], cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def result(folder, run):
    return json.loads((folder / "store" / "runs" / run / "result.json").read_text())


def final_rows(folder, run):
    """Every table of the last checkpoint of a run."""
    store = Store(str(folder / "store"))
    artifact = store.get(result(folder, run)["stages"]["train"]["artifact"], "train")
    reader = ChainReader(store, store.get(artifact.summary["final"], "train"))
    return {name: torch.cat([window.weight for window in reader.windows(name)]) for name in reader.tables}


def assert_same_rows(folder, expected, run, atol=1e-5, rtol=1e-4):
    """The tables of ``run`` are those of the run ``expected``, but for other orders of sums."""
    there = final_rows(folder, expected)
    for name, rows in final_rows(folder, run).items():
        torch.testing.assert_close(rows, there[name], atol=atol, rtol=rtol)


def test_the_model_learns_from_the_order_of_events(runs):
    assert result(runs, "one")["eval"]["auc"] > 0.6


def test_a_table_of_events_is_that_of_the_feature(runs):
    assert set(final_rows(runs, "one")) == {"user", "item", "category", "history__age", "searches__word"}


def test_ranks_train_the_same_model(runs):
    """Two ranks, with a table cut by rows, some whole and some on both."""
    one, two = (result(runs, name)["eval"] for name in ("begun", "split"))
    assert two["ne"] == pytest.approx(one["ne"], rel=1e-5)
    assert_same_rows(runs, "begun", "split")


def test_a_table_on_disk_ends_with_the_same_bits(runs):
    disk = final_rows(runs, "disk")
    assert all(torch.equal(rows, disk[name]) for name, rows in final_rows(runs, "one").items())


def test_a_training_that_goes_on_ends_with_the_same_bits(runs):
    """Cut after 20 steps, and made longer."""
    assert result(runs, "cut")["train"]["resumed"]["step"] == 20
    cut = final_rows(runs, "cut")
    assert all(torch.equal(rows, cut[name]) for name, rows in final_rows(runs, "one").items())


def test_the_next_day_goes_on_from_the_rows_of_the_same_ids(runs):
    """With learning rates of 0: tables of events and shared ones keep their rows, and new items get more."""
    before, after = final_rows(runs, "one"), final_rows(runs, "next")
    for name, rows in before.items():
        assert torch.equal(after[name][: len(rows)], rows), name
    assert len(after["item"]) > len(before["item"])


def test_the_report_shows_lengths_and_what_events_weigh_by_their_names(runs):
    key = result(runs, "one")["stages"]["evaluate"]["artifact"]
    attention = json.loads((runs / "store" / key / "attention.json").read_text())
    history = attention["history"]
    assert [*history["target"]] == ["item"] and len(history["events"]) == 8
    assert all(each["names"]["item"].startswith("i") and each["age"] > 0 for each in history["events"])
    ages = [each["age"] for each in history["events"]]
    assert ages == sorted(ages, reverse=True)
    assert set(attention["searches"]["events"][0]["names"]) == {"word", "item", "other"}
    page = (runs / "store" / "runs" / "one" / "report.html").read_text()
    assert "Attention weights of history" in page and "Events of searches" in page


def test_the_gate_judges_by_the_number_of_events(runs):
    key = result(runs, "one")["stages"]["publish"]["artifact"]
    record = json.loads((runs / "store" / key / "gate.json").read_text())
    values = [each["value"] for each in record["slices"] if each["slice"] == "history"]
    assert set(values) >= {"(no events)", "1 event", "2 to 3 events", "4 to 7 events"}


def test_a_published_version_scores_as_the_training_did(runs):
    key = result(runs, "one")["stages"]["publish"]["artifact"]
    record = json.loads((runs / "store" / key / "gate.json").read_text())
    assert record["verdict"] == "PASS"
    assert {"history__item", "history__age", "searches__word", "searches__other"} <= record["coverage"].keys()
    assert record["candidate"]["ne"][0] == pytest.approx(result(runs, "one")["eval"]["ne"], rel=1e-5)


def test_raw_rows_are_scored_with_their_histories(runs):
    scores = pl.read_parquet(runs / "scores.parquet")
    clicked = pl.read_parquet(runs / "log.parquet")["clicked"].to_numpy()
    assert len(scores) == ROWS
    likely = scores["probability"].to_numpy()
    assert likely[clicked == 1].mean() > likely[clicked == 0].mean() + 0.05
