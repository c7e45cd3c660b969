"""A new model begins at the base rate of its train rows; a resumed or warm-started one where it stood."""

import json

import numpy as np
import pytest
import torch.distributed as dist
from safetensors.torch import load

from pipeline.config import CheckpointConfig
from pipeline.models.layers import log_odds
from pipeline.records import SparseColumn
from pipeline.store import Store
from pipeline.training.config_settings import select_prediction_settings, select_training_settings
from pipeline.training.predict import predict
from pipeline.training.trainer import train
from tests.embeddings.ranks import plan_for, spawn
from tests.tiers import with_slow
from tests.towers.cases import tower_plan, towers_on
from tests.training.dataset import KEY, write_dataset
from tests.training.test_train import config

ROWS, TRAIN, CLICKS = {"a": 40, "b": 23}, 40_000, 80
COLUMNS = tuple(SparseColumn(name=name, rows=rows) for name, rows in ROWS.items())
STILL = {"max_steps": 1, "lr": 0.0, "sparse_lr": 0.0}
ALLOWED = ["train.global_batch", "train.lr", "train.sparse_lr", "train.warmup_steps"]
SHORT = {"global_batch": 1000, "epochs": 1, "lr": 0.002, "sparse_lr": 0.05, "warmup_steps": 10}


def labels(count):
    """Sets the label of ``count`` train rows, spread evenly."""

    def spoil(split, columns):
        values = np.zeros(len(columns["label"]), np.float32)
        values[np.linspace(0, len(values) - 1, count if split == "train" else 40).astype(int)] = 1.0
        columns["label"] = values

    return spoil


class Trained:
    """Trains in ``root`` and tells the last bias of what came out."""

    def __init__(self, root, clicks, towers=None):
        if dist.get_rank() == 0:
            write_dataset(
                root, train=TRAIN, test=20_000, sparse=COLUMNS, spoil=labels(clicks), profile=True, group=4096
            )
        dist.barrier()
        self.store, self.towers = Store(str(root)), towers
        self.dataset = self.store.get(f"datasets/t/{KEY}", "ingest")
        world = dist.get_world_size()
        self.plan = tower_plan(towers, 1, world, {}, COLUMNS) if towers else plan_for("table_wise", world, rows=ROWS)

    def bias(self, run, init=None, **changes):
        current = config(dist.get_world_size(), **changes)
        current.partition.name = "dmt" if self.towers else "flat"
        artifact = None if init is None else self.store.get(self.final[init], "train")
        summary = train(
            select_training_settings(current),
            self.store,
            self.dataset,
            self.plan,
            f"runs/{run}/checkpoints/k",
            "key",
            lambda record: None,
            init=artifact,
            towers=self.towers,
        )
        self.current, self.final = current, {**getattr(self, "final", {}), run: summary["final"]}
        with self.store.open(f"{summary['final']}/dense.safetensors") as source:
            return float(load(source.read())["param/head.ranking.head.bias"])

    def rate(self, run):
        found = predict(
            select_prediction_settings(self.current), self.store, self.dataset, self.plan, self.final[run], self.towers
        )
        return None if found is None else float((1 / (1 + np.exp(-found.logits.astype(np.float64)))).mean())


def run(folder):
    few = Trained(folder / "few", CLICKS)
    found = {"new": few.bias("new", **STILL), "trained": few.bias("trained", **SHORT), "rate": few.rate("trained")}
    found["warm"] = few.bias("warm", init="trained", checkpoint=CheckpointConfig(allow=ALLOWED), **STILL)
    tables = CheckpointConfig(allow=ALLOWED, init_tables_only=True)
    found["tables only"] = few.bias("tables", init="trained", checkpoint=tables, **STILL)
    found["resumed"] = few.bias("trained", **{**SHORT, **STILL, "max_steps": 41, "epochs": 2})
    found["none"] = Trained(folder / "none", 0).bias("new", **STILL)
    found["all"] = Trained(folder / "all", TRAIN).bias("new", **STILL)
    found["towers"] = Trained(folder / "towers", CLICKS, towers_on([("a", [0]), ("b", [0])])).bias("new", **STILL)
    (folder / f"found-{dist.get_rank()}.json").write_text(json.dumps(found))


@pytest.mark.parametrize("world", with_slow((1, 2), (2,)))
def test_the_last_bias_begins_at_the_log_odds_of_the_train_rows(tmp_path, world):
    spawn(run, world, tmp_path)
    found = json.loads((tmp_path / "found-0.json").read_text())
    begin = pytest.approx(log_odds(CLICKS / TRAIN, TRAIN), abs=1e-5)
    assert (found["new"], found["tables only"], found["towers"]) == (begin, begin, begin)
    assert found["none"] == pytest.approx(log_odds(0, TRAIN), abs=1e-5) == -found["all"]
    # Forty steps of 1,000 rows: a model that begins at its drawn bias predicts some 20 times the clicks.
    assert found["rate"] == pytest.approx(CLICKS / TRAIN, rel=0.25)
    assert abs(found["trained"] - found["new"]) > 1e-3
    assert found["warm"] == pytest.approx(found["trained"], abs=1e-6)
    assert found["resumed"] == pytest.approx(found["trained"], abs=1e-6)
