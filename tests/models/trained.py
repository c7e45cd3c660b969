"""What tests of trained models share: the settings, a training with and without a stop, and its published scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint.reader import ChainReader, read_dense
from pipeline.config import Config, DataConfig, EvaluateConfig, GuardConfig, HardwareConfig, ModelConfig, TrainConfig
from pipeline.publishing.dense import build_member
from pipeline.publishing.program import write_program
from pipeline.publishing.served import SERVING, Description, ServedModel
from pipeline.publishing.table_writer import write_table
from pipeline.records import SparseColumn, Tower, Towers
from pipeline.store import Store
from pipeline.training.config_settings import select_prediction_settings, select_training_settings
from pipeline.training.parquet import SplitReader
from pipeline.training.predict import Predictions, predict
from pipeline.training.trainer import train
from tests.embeddings.ranks import plan_for
from tests.models.variants import DIM
from tests.training.dataset import KEY
from tests.training.test_train import digests

ROWS = {"a": 40, "b": 23, "c": 11}
COLUMNS = tuple(SparseColumn(name=name, rows=rows) for name, rows in ROWS.items())
FLAT = Towers(partition="flat", towers=(Tower(features=tuple(ROWS), hosts=(0,)),))
SIZES = {"train": 1010, "test": 400}
STOP = 7  # 1,010 rows in batches of 250 are 5 steps, of which the last has 10 rows
WORLDS = (1, 2)


def config_of(model: ModelConfig, world: int, **changes: Any) -> Config:
    """A short training of ``model``; ``changes``: of its settings."""
    options: dict[str, Any] = {
        "global_batch": 250,
        "epochs": 2,
        "lr": 0.01,
        "sparse_lr": 0.1,
        "warmup_steps": 2,
        "schedule": "constant",
        "precision": "fp32",
        "threads_per_rank": 1,
        "log_every_steps": 4,
        "guard": GuardConfig(collapse=False),
    }
    return Config(
        run="r",
        data=DataConfig(name="t", format="synthetic"),
        model=model,
        hardware=HardwareConfig(name="t", ranks_per_host=world),
        train=TrainConfig(**{**options, **changes}),
        evaluate=EvaluateConfig(global_batch=130),
    )


def whole_and_in_parts(
    store: Store, name: str, model: ModelConfig, world: int, **settings: Any
) -> tuple[dict[str, Any], Predictions | None]:
    """Train straight through, then stop and go on, in other folders.

    By folder the bytes of the last checkpoint and the last record of progress; its predictions, on rank 0.
    """
    plan, dataset = plan_for("table_wise", world, rows=ROWS, dim=DIM), store.get(f"datasets/t/{KEY}", "ingest")
    outcome: dict[str, Any] = {}
    for folder, stops in (("whole", [None]), ("parts", [STOP, None])):
        records: list[dict[str, Any]] = []
        for stop in stops:
            config = config_of(model, world, **settings, max_steps=stop)
            where = f"runs/{name.replace(' ', '-')}/{folder}/k"
            summary = train(select_training_settings(config), store, dataset, plan, where, "key", records.append)
        outcome[folder] = digests(store, store.get(summary["final"], "train"))
        outcome["final"] = summary["final"]
        if records:
            outcome[f"{folder} progress"] = {key: records[-1].get(key) for key in ("ne_window", "tasks", "samples")}
    return outcome, predict(select_prediction_settings(config), store, dataset, plan, outcome["final"])


def published_scores(
    store: Store, model: ModelConfig, final: str, coding: str, target: Path
) -> tuple[Any, Description]:
    """Scores of the test rows by a version of checkpoint ``final`` in ``target``, and its description."""
    split = SplitReader(store, store.get(f"datasets/t/{KEY}", "ingest"), "test")
    columns = [(group, split.allocate(group.rows)) for group in split.groups]
    for group, each in columns:
        split.read(group, each, 0)
    ids = np.concatenate([each.single for _, each in columns], axis=1)
    dense = np.ascontiguousarray(np.concatenate([each.dense for _, each in columns], axis=1).T)
    served = ServedModel(target / publish(store, model, final, split, coding, Store(str(target))), 1 << 30)
    return served.score(dense, dict(zip(split.single, ids, strict=True))), served.description


def publish(store: Store, model: ModelConfig, final: str, split: SplitReader, coding: str, target: Store) -> str:
    """A version of checkpoint ``final`` in ``target``; its path."""
    config, checkpoint = config_of(model, 1), store.get(final, "train")
    module = build_member(
        split.schema,
        FLAT,
        read_dense(store, checkpoint),
        model=config.model,
        data=config.data,
        hardware=config.hardware,
        seed=config.seed,
    )
    path, reader = f"models/m/{coding}", ChainReader(store, checkpoint)
    with target.draft(path, kind="model", key="k", config={}, inputs={}) as draft:
        layouts = {table: write_table(draft, [reader], table, coding).layout for table in ROWS}
        write_program(draft, module, len(split.schema.dense), (len(ROWS), DIM))
        draft.write_json(SERVING, Description.of(split.schema, DIM, layouts).to_json())
        draft.commit({})
    return path
