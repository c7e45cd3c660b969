"""kill -9 at a random step of a real training, and the same command again: the same bits, for every choice."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pipeline.checkpoint.fault_points import FaultPoint
from pipeline.config import CheckpointConfig, Config, DataConfig, GuardConfig, HardwareConfig, TrainConfig
from pipeline.config.train import AverageConfig, DenseOptions
from pipeline.records import SparseColumn
from pipeline.specs import DENSE_OPTIMIZERS, MODELS, TABLE_OPTIMIZERS
from pipeline.store import Store
from pipeline.training.config_settings import select_training_settings
from pipeline.training.settings import TrainingSettings
from pipeline.training.trainer import train
from tests.embeddings.ranks import join_ranks, plan_for
from tests.models.variants import DIM, RANKERS
from tests.training.dataset import KEY, write_dataset
from tests.training.test_train import digests

ROWS = {"a": 40, "b": 23, "c": 11}
SHARDING = ["table_wise", "row_wise", "data_parallel"]
TRAIN_ROWS, BATCH, EPOCHS = 500, 48, 2
STEPS = EPOCHS * -(-TRAIN_ROWS // BATCH)
EVERY = 3  # steps between two checkpoints
FINAL = f"runs/r/checkpoints/k/step-{STEPS:08d}"
SHAMPOO = {"dense_options": DenseOptions(block_size=5, root_every=4, start_step=3)}
MORE: dict[str, dict[str, Any]] = {
    "shampoo": SHAMPOO,
    "lamb": {"average": AverageConfig(kind="ema", decay=0.8)},
    "sgd": {"average": AverageConfig(kind="swa", start=0.2)},
}


def cases() -> dict[str, tuple[str, str, str]]:
    """Rankers with table optimizers and dense optimizers, each of all of them at least once."""
    choices = [list(registry.names()) for registry in (MODELS, TABLE_OPTIMIZERS, DENSE_OPTIMIZERS)]
    longest = max(len(names) for names in choices)
    rows = [tuple(names[i % len(names)] for names in choices) for i in range(longest)]
    return {" ".join(row): row for row in rows}  # type: ignore[misc]


CASES = cases()


def settings_of(name: str) -> TrainingSettings:
    """A small training with the choices of case ``name``, in which dropout draws too."""
    ranker, tables, dense = CASES[name]
    options: dict[str, Any] = {
        "global_batch": BATCH,
        "epochs": EPOCHS,
        "lr": 0.01,
        "sparse_lr": 0.05,
        "warmup_steps": 3,
        "schedule": "cosine",
        "decay_ratio": 1.0,
        "precision": "fp32",
        "threads_per_rank": 1,
        "log_every_steps": 5,
        "guard": GuardConfig(collapse=False),
        "sparse_optimizer": tables,
        "dense_optimizer": dense,
    }
    return select_training_settings(
        Config(
            run="r",
            data=DataConfig(name="t", format="synthetic"),
            model=RANKERS[ranker],
            hardware=HardwareConfig(name="t", ranks_per_host=1),
            train=TrainConfig(**{**options, **MORE.get(dense, {})}),
            checkpoint=CheckpointConfig(every_steps=EVERY, quantise="fp32"),
        )
    )


def rank_main(root: Path, folder: Path, name: str, killed_at: int | None) -> None:
    """The training's one rank; it kills itself before step ``killed_at`` of this process, from 1."""
    join_ranks(0, 1, 1, folder)
    seen: Counter[FaultPoint] = Counter()

    def pass_point(point: FaultPoint) -> None:
        seen[point] += 1
        if point == FaultPoint.BATCH and seen[point] == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    store = Store(str(root))
    dataset, plan = store.get(f"datasets/t/{KEY}", "ingest"), plan_for(SHARDING, 1, rows=ROWS, dim=DIM)
    directory = FINAL.rpartition("/")[0]
    train(settings_of(name), store, dataset, plan, directory, "key", lambda record: None, on_point=pass_point)
    dist.destroy_process_group()


def run(root: Path, folder: Path, name: str, killed_at: int | None = None) -> int | None:
    """The exit code of an attempt."""
    folder.mkdir()
    process = multiprocessing.get_context("forkserver").Process(target=rank_main, args=(root, folder, name, killed_at))
    process.start()
    process.join(600)
    return process.exitcode


def test_every_choice_is_killed() -> None:
    for i, registry in enumerate((MODELS, TABLE_OPTIMIZERS, DENSE_OPTIMIZERS)):
        assert {row[i] for row in CASES.values()} == set(registry.names())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_killed_training_goes_on_to_the_same_bits(tmp_path: Path, name: str) -> None:
    columns = tuple(SparseColumn(name=table, rows=rows) for table, rows in ROWS.items())
    outcomes = []
    drawn = random.Random(name).sample(range(EVERY + 1, STEPS), 1)[0]
    for root, kills in ((tmp_path / "undisturbed", []), (tmp_path / "killed", [drawn, 2])):
        write_dataset(root, train=TRAIN_ROWS, test=20, sparse=columns)
        for number, killed_at in enumerate(kills):
            assert run(root, root / f"attempt{number}", name, killed_at) == -signal.SIGKILL
            assert not (root / FINAL / "manifest.json").exists()
        assert run(root, root / "last", name) == 0
        store = Store(str(root))
        outcomes.append(digests(store, store.get(FINAL, "train")))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0]) > 10
