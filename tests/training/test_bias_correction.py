"""A training on a share of the rows without a click ends at the level of the clicks it saw."""

import numpy as np
import pytest
import torch.distributed as dist

from pipeline.config import CheckpointConfig
from pipeline.config.train import AverageConfig, SnapshotConfig
from pipeline.records import DatasetSchema, SparseColumn, TaskColumn
from pipeline.store import Store
from pipeline.training.config_settings import select_prediction_settings, select_training_settings
from pipeline.training.predict import ends_with_level, level_of, predict
from pipeline.training.trainer import train
from tests.embeddings.ranks import plan_for, spawn
from tests.training.dataset import KEY, write_dataset
from tests.training.test_train import config

ROWS, TRAIN = {"a": 40, "b": 23}, 1500
COLUMNS = tuple(SparseColumn(name=name, rows=rows) for name, rows in ROWS.items())
SHORT = {"global_batch": 100, "epochs": 1, "lr": 0.02, "sparse_lr": 0.1, "warmup_steps": 1}
EXACT = CheckpointConfig(quantise="fp32", final_quantise="fp32")


def level_left(folder, *, row_weights=False, **changes):
    """Clicks of the train rows, and those that the checkpoint expects of them, at the rate of the kept rows."""
    seen = {}

    def tested_on_train_rows(split, columns):
        if split != "validation":
            columns.update(seen) if split == "test" else seen.update(columns)

    if dist.get_rank() == 0:
        write_dataset(
            folder,
            train=TRAIN,
            test=TRAIN,
            sparse=COLUMNS,
            sampled="logit",
            row_weights=row_weights,
            validation=60 if "snapshots" in changes else 0,
            spoil=tested_on_train_rows,
        )
    dist.barrier()
    store, world = Store(str(folder)), dist.get_world_size()
    dataset, plan = store.get(f"datasets/t/{KEY}", "ingest"), plan_for("table_wise", world, rows=ROWS)
    current = config(world, checkpoint=EXACT, guard={"collapse": False}, **SHORT, **changes)
    given = store, dataset, plan
    done = train(select_training_settings(current), *given, "runs/r/checkpoints/k", "key", lambda record: None)
    members = done["train"].get("ensemble", {"members": []})["members"]
    published = min((member["checkpoint"] for member in members), default=done["final"])
    found = predict(select_prediction_settings(current), *given, published)
    if found is not None:
        counts = seen.get("row_weight", np.ones(TRAIN)).astype(np.float64)
        kept = found.logits - np.log(seen["negative_rate"].astype(np.float64))
        np.save(folder / "sums.npy", [(counts / (1 + np.exp(-kept))).sum(), (counts * seen["label"]).sum()])


CASES = {
    "one rank": (1, {}),
    "two ranks": (2, {}),
    "row weights": (1, {"row_weights": True}),
    "average": (1, {"average": AverageConfig(kind="ema", start=0.0)}),
    "first snapshot": (1, {"snapshots": SnapshotConfig(count=2, keep=2, choose="last", kind="cyclic")}),
}


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    """By case what ``level_left`` saved."""
    found = {}
    for world in (1, 2):
        folder = tmp_path_factory.mktemp(f"world{world}")
        cases = {name: changes for name, (ranks, changes) in CASES.items() if ranks == world}
        spawn(run_with, world, folder, cases)
        found |= {name: np.load(folder / name / "sums.npy") for name in cases}
    return found


@pytest.mark.parametrize("name", CASES)
def test_predictions_add_up_to_the_clicks_of_the_train_rows(sums, name):
    expected, clicks = sums[name]
    assert expected == pytest.approx(clicks, rel=1e-4)


def run_with(folder, cases):
    for name, changes in cases.items():
        level_left(folder / name, **changes)


def test_the_level_adds_up():
    rng = np.random.default_rng(3)
    logits, weights = rng.normal(-3, 2, 5000), rng.integers(0, 4, 5000).astype(np.float32)
    labels = (rng.random(5000) < 0.2).astype(np.float32)
    for counts in (None, weights):
        shift = level_of(labels, logits, counts)
        total = np.ones(5000) if counts is None else counts.astype(np.float64)
        assert total @ (1 / (1 + np.exp(-logits - shift))) == pytest.approx(total @ labels, rel=1e-9)
    assert level_of(np.array([1, 0], np.float32), np.array([5.0, 7.0])) == pytest.approx(-6.0)


@pytest.mark.parametrize(("label", "expected"), [(0.0, 0.5), (1.0, 99.5)])
def test_the_level_of_rows_that_are_all_alike_is_that_of_half_a_row_of_the_other_kind(label, expected):
    logits = np.linspace(-2.0, 2.0, 100)
    shift = level_of(np.full(100, label, np.float32), logits)
    assert (1 / (1 + np.exp(-logits - shift))).sum() == pytest.approx(expected, rel=1e-9)


def test_only_a_loss_of_the_kept_rows_asks_for_it():
    empty = {"dense": (), "sparse": (), "rows": {}, "files": {}, "groups": {}}
    task = TaskColumn(name="buy", kind="binary")
    assert ends_with_level(DatasetSchema(**empty, sampled="logit"))
    for schema in ({}, {"sampled": "weights"}, {"sampled": "logit", "tasks": (task,)}):
        assert not ends_with_level(DatasetSchema(**empty, **schema))


def test_many_rows_are_looked_at_in_spread_row_groups(tmp_path):
    from pipeline.training.parquet import SplitReader

    store, dataset = write_dataset(tmp_path, train=640, test=10, group=64, sparse=COLUMNS)
    split = SplitReader(store, dataset, "train")
    split.spread(200)
    assert [group.first for group in split.groups] == [0, 192, 384] and split.rows == 192
    split.spread(200)
    assert split.rows == 192
