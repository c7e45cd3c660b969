"""Whole runs with tables on SSD behind a cache of rows (the path of a GPU, forced on a CPU): train, then evaluate."""

import dataclasses
import functools
import json

import pytest
import torch.distributed as dist

from pipeline.embeddings.ssd import SsdStore
from pipeline.embeddings.ssd.shard import ShardRequest
from pipeline.store import Store
from pipeline.training import memory
from pipeline.training.config_settings import select_prediction_settings, select_training_settings
from pipeline.training.predict import predict
from pipeline.training.trainer import train
from tests.embeddings.ranks import on_tier, plan_for, spawn
from tests.tiers import with_slow
from tests.training.dataset import KEY, write_dataset
from tests.training.test_ssd import COLUMNS, ROWS
from tests.training.test_train import config, digests, trained

BATCH = 250  # windows of 512 rows end inside global batches
CACHE = 2 * BATCH  # what the planner gives a cache at least: the distinct rows of two batches
HOSTED = 300  # rows that leave the device stay in host memory a while, then go to the log


def run(root, tier):
    if dist.get_rank() == 0:
        write_dataset(root, train=2110, test=1200, sparse=COLUMNS)
    dist.barrier()
    store, world = Store(str(root)), dist.get_world_size()
    plan = on_tier(plan_for("row_wise", world, rows=ROWS, dim=8), tier, CACHE, HOSTED)
    plan = dataclasses.replace(plan, global_batch=BATCH)
    current = config(world, global_batch=BATCH)
    current.evaluate.global_batch = 4 * BATCH
    dataset = store.get(f"datasets/t/{KEY}", "ingest")
    settings = select_training_settings(current)
    summary = train(settings, store, dataset, plan, "runs/r/checkpoints/k", "key", lambda record: None)
    logits = predict(select_prediction_settings(current), store, dataset, plan, summary["final"])
    if dist.get_rank() == 0:
        found = {**trained(digests(store, store.get(summary["final"], "train"))), "logits": logits.logits.tolist()}
        (root / "found.json").write_text(json.dumps(found))


search = ShardRequest.find


def lookups_come_as_announced(part, rows):
    """Only a batch that is filled up, an epoch's last one, has more lookups than were announced."""
    if len(rows) == len(part.asked):
        raise AssertionError("training searches for slots that a batch was to find ready")
    return search(part, rows)


def run_both(folder):
    run(folder / "ddr", "ddr")
    memory.SsdStore = functools.partial(SsdStore, cached=True)
    ShardRequest.find = lookups_come_as_announced
    run(folder / "ssd", "ssd")


@pytest.mark.parametrize("world", with_slow((1, 2), (2,)))
def test_a_cached_model_trains_and_is_evaluated_like_one_in_memory(tmp_path, world):
    """Slots for two training batches, batches read ahead, evaluation's batches four times as large."""
    for tier in ("ddr", "ssd"):
        (tmp_path / tier).mkdir()
    spawn(run_both, world, tmp_path)
    expected, found = (json.loads((tmp_path / tier / "found.json").read_text()) for tier in ("ddr", "ssd"))
    assert len(found["logits"]) == 1200
    assert found.pop("logits") == pytest.approx(expected.pop("logits"), abs=1e-6)  # other batches, other sums' order
    assert found == expected
