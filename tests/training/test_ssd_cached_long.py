"""Cached tables on SSD (the path of a GPU, forced on a CPU) over 500 steps: the bytes of memory, kills, any batch."""

import dataclasses
import functools
import json
import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException

from pipeline.checkpoint.fault_points import FaultPoint
from pipeline.config import CheckpointConfig
from pipeline.embeddings.ssd import SsdStore
from pipeline.store import Store
from pipeline.training import memory
from pipeline.training.config_settings import select_prediction_settings, select_training_settings
from pipeline.training.predict import predict
from pipeline.training.trainer import train
from tests.embeddings.ranks import on_tier, plan_for, spawn
from tests.training.dataset import KEY, write_dataset
from tests.training.test_ssd import COLUMNS, ROWS
from tests.training.test_train import config, digests, trained

STEPS, TRAIN, TEST = 500, 9_973, 601  # rows: neither windows nor epochs end with a global batch
# By world: samples of a global batch, and of one in evaluation; more than the slots of a cache take at once.
BATCHES = {1: (119, 601), 2: (118, 350), 4: (116, 2_404)}
HOSTED = 300  # rows of a table in host memory, which all that leave a cache pass through on their way to the log
KILLS = (137, 211)  # batches of a session at which a rank is killed; checkpoints are every 60 steps


def setting(root: Path, tier: str):
    """The settings, store, dataset and plan of a training on as many ranks as there are."""
    world = dist.get_world_size()
    batch, evaluated = BATCHES[world]
    plan = on_tier(plan_for("row_wise", world, rows=ROWS, dim=8), tier, 2 * batch, HOSTED)
    epochs = -(-STEPS * batch // TRAIN) + 1
    made = config(
        world,
        global_batch=batch,
        epochs=epochs,
        max_steps=STEPS,
        sparse_lr=0.05,
        checkpoint=CheckpointConfig(every_steps=60, keep_last=2, quantise="fp32"),
    )
    made.evaluate.global_batch = evaluated
    store = Store(str(root))
    return made, store, store.get(f"datasets/t/{KEY}", "ingest"), dataclasses.replace(plan, global_batch=batch)


def run(folder: Path, tier: str, kill: int = 0) -> None:
    """Train to the end and keep what came of it, or until the last rank is killed at batch ``kill`` of this session."""
    seen = []

    def on_point(point: str) -> None:
        seen.append(point)
        if kill and seen.count(FaultPoint.BATCH) == kill and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    if tier == "ssd":
        memory.SsdStore = functools.partial(SsdStore, cached=True)
    made, store, dataset, plan = setting(folder, tier)
    place = f"runs/r/{tier}"
    summary = train(
        select_training_settings(made), store, dataset, plan, place, tier, lambda record: None, on_point=on_point
    )
    predictions = predict(select_prediction_settings(made), store, dataset, plan, summary["final"])
    if predictions is not None:
        found = {
            "state": trained(digests(store, store.get(summary["final"], "train"))),
            "logits": predictions.logits.tolist(),
            "steps": summary["train"]["steps"],
            "resumed": bool(summary["train"].get("resumed")),
        }
        (folder / f"{tier}.json").write_text(json.dumps(found))


@pytest.mark.slow
@pytest.mark.parametrize("world", BATCHES)
def test_500_steps_behind_a_cache_are_those_in_memory_whoever_is_killed(tmp_path: Path, world: int) -> None:
    write_dataset(tmp_path, train=TRAIN, test=TEST, sparse=COLUMNS)
    spawn(run, world, tmp_path, "ddr")
    for kill in KILLS:
        with pytest.raises(ProcessExitedException, match="SIGKILL|exit code"):
            spawn(run, world, tmp_path, "ssd", kill)
    spawn(run, world, tmp_path, "ssd")
    expected, found = (json.loads((tmp_path / f"{tier}.json").read_text()) for tier in ("ddr", "ssd"))
    assert found["resumed"] and not expected["resumed"]
    assert expected["steps"] == found["steps"] == STEPS
    assert found["state"] == expected["state"]
    assert found["logits"] == pytest.approx(expected["logits"], rel=1e-6, abs=1e-6)  # other batches, other sums' order
