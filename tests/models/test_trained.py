"""Every ranker trained on real gloo ranks: one spawn per world size does all cases, the tests look at what it left."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from pipeline.checkpoint.reader import read_dense
from pipeline.checkpoint.rows import ChainReader
from pipeline.config import Config, DataConfig, EvaluateConfig, GuardConfig, HardwareConfig, ModelConfig, TrainConfig
from pipeline.publishing.program import write_program
from pipeline.publishing.served import SERVING, Description, ServedModel
from pipeline.publishing.writing import write_table
from pipeline.records import SparseColumn, Tower, Towers
from pipeline.serving.scores import dense_part
from pipeline.store import Store
from pipeline.training.loop import train
from pipeline.training.parquet import SplitReader
from pipeline.training.predict import predict
from pipeline.training.settings import PredictionSettings, TrainingSettings
from tests.embeddings.ranks import plan_for, spawn
from tests.models.variants import DIM, RANKERS
from tests.training.dataset import KEY, write_dataset
from tests.training.test_train import digests

ROWS = {"a": 40, "b": 23, "c": 11}
COLUMNS = tuple(SparseColumn(name=name, rows=rows) for name, rows in ROWS.items())
FLAT = Towers(partition="flat", towers=(Tower(features=tuple(ROWS), hosts=(0,)),))
STOP = 7  # 1,010 rows in batches of 250 are 5 steps, of which the last has 10 rows

REGULARISED: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "batch norm": (replace(RANKERS["mlp"], norm="batch"), {}),
    "layer norm": (replace(RANKERS["masknet"], norm="layer"), {}),
    "dropout": (replace(RANKERS["dlrm"], dropout=0.3), {}),
    "dropout and batch norm": (replace(RANKERS["finalmlp"], dropout=0.2, norm="batch"), {}),
    "l2": (RANKERS["dlrm"], {"embedding_l2": 3.0}),
    "smoothing": (RANKERS["dlrm"], {"label_smoothing": 0.4}),
}
CASES = {**{name: (model, {}) for name, model in RANKERS.items()}, **REGULARISED}
WORLDS = (1, 2)


def config_of(name: str, world: int, **changes: Any) -> Config:
    model, settings = CASES[name]
    options: dict[str, Any] = {
        "global_batch": 250, "epochs": 2, "lr": 0.01, "sparse_lr": 0.1, "warmup_steps": 2, "schedule": "constant",
        "precision": "fp32", "threads_per_rank": 1, "log_every_steps": 4, "guard": GuardConfig(collapse=False),
    }  # fmt: skip
    return Config(
        run="r", data=DataConfig(name="t", format="synthetic"), model=model,
        hardware=HardwareConfig(name="t", ranks_per_host=world),
        train=TrainConfig(**{**options, **settings, **changes}), evaluate=EvaluateConfig(global_batch=130),
    )  # fmt: skip


def run_cases(folder: Path) -> None:
    logging.disable(logging.WARNING)
    rank, world = dist.get_rank(), dist.get_world_size()
    store = Store(str(folder / "store"))
    if rank == 0:
        write_dataset(folder / "store", train=1010, test=400, sparse=COLUMNS)
    dist.barrier()
    for name in CASES:
        outcome = run_case(store, name, world)
        if rank == 0:
            (folder / f"{name}.json").write_text(json.dumps(outcome))


def run_case(store: Store, name: str, world: int) -> dict[str, Any]:
    """Train straight through, then stop and go on, in other folders."""
    plan = plan_for("table_wise", world, rows=ROWS, dim=DIM)
    dataset = store.get(f"datasets/t/{KEY}", "ingest")
    outcome: dict[str, Any] = {}
    for folder, stops in (("whole", [None]), ("parts", [STOP, None])):
        for stop in stops:
            config = config_of(name, world, max_steps=stop)
            where = f"runs/{name.replace(' ', '-')}/{folder}/k"
            summary = train(TrainingSettings.of(config), store, dataset, plan, where, "key", lambda record: None)
        outcome[folder] = digests(store, store.get(summary["final"], "train"))
        outcome["final"] = summary["final"]
    predictions = predict(PredictionSettings.of(config), store, dataset, plan, outcome["final"])
    if predictions is not None:
        logits, labels = predictions.logits.astype(np.float64), predictions.labels
        rate = labels.mean()
        entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
        outcome["ne"] = float(np.mean(np.logaddexp(0, logits) - labels * logits) / entropy)
        outcome["logits"] = predictions.logits.tolist()
    return outcome


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[int, dict[str, dict[str, Any]]]:
    """{world: {case: outcome}}; the stores lie beside."""
    outcomes: dict[int, dict[str, dict[str, Any]]] = {}
    for world in WORLDS:
        folder = tmp_path_factory.mktemp(f"world{world}")
        spawn(run_cases, world, folder)
        outcomes[world] = {name: json.loads((folder / f"{name}.json").read_text()) for name in CASES}
        outcomes[world]["store"] = {"url": str(folder / "store")}
    return outcomes


@pytest.mark.parametrize("name", CASES)
def test_one_and_two_ranks_reach_the_same_ne(trained, name: str) -> None:
    one, two = trained[1][name], trained[2][name]
    assert two["ne"] == pytest.approx(one["ne"], rel=0.02 if CASES[name][0].dropout else 1e-3)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][0].dropout == 0])
def test_the_two_agree_in_every_logit(trained, name: str) -> None:
    np.testing.assert_allclose(trained[2][name]["logits"], trained[1][name]["logits"], atol=2e-3)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_a_resumed_training_ends_with_the_same_bytes(trained, name: str, world: int) -> None:
    outcome = trained[world][name]
    assert outcome["whole"] == outcome["parts"]


@pytest.mark.parametrize("name", ["dropout", "l2", "smoothing"])
def test_what_regularises_changes_the_result(trained, name: str) -> None:
    plain, other = trained[1]["dlrm"], trained[1][name]
    assert np.abs(np.array(plain["logits"]) - np.array(other["logits"])).max() > 1e-3


def test_smoothing_and_l2_draw_the_logits_together(trained) -> None:
    plain, smooth, small = (np.std(trained[1][name]["logits"]) for name in ("dlrm", "smoothing", "l2"))
    assert smooth < plain and small < plain


@pytest.mark.parametrize("name", CASES)
def test_published_scores_are_the_trained_ones(trained, name: str, tmp_path: Path) -> None:
    store = Store(trained[1]["store"]["url"])
    outcome, split = trained[1][name], SplitReader(store, store.get(f"datasets/t/{KEY}", "ingest"), "test")
    columns = [(group, split.allocate(group.rows)) for group in split.groups]
    for group, each in columns:
        split.read(group, each, 0)
    ids = np.concatenate([each.single for _, each in columns], axis=1)
    dense = np.ascontiguousarray(np.concatenate([each.dense for _, each in columns], axis=1).T)
    for coding, tolerance in (("fp32", 1e-5), ("8", 0.05)):
        path = publish(store, name, outcome["final"], split, coding, Store(str(tmp_path)))
        scores = ServedModel(tmp_path / path, 1 << 30).score(dense, dict(zip(split.single, ids, strict=True)))
        np.testing.assert_allclose(scores, outcome["logits"], atol=tolerance)


def publish(store: Store, name: str, final: str, split: SplitReader, coding: str, target: Store) -> str:
    """A version of checkpoint ``final`` in ``target``; its path."""
    config, checkpoint = config_of(name, 1), store.get(final, "train")
    module = dense_part(
        split.schema, FLAT, read_dense(store, checkpoint),
        model=config.model, data=config.data, hardware=config.hardware, seed=config.seed,
    )  # fmt: skip
    path, reader = f"models/m/{coding}", ChainReader(store, checkpoint)
    with target.draft(path, kind="model", key="k", config={}, inputs={}) as draft:
        layouts = {table: write_table(draft, reader, table, coding).layout for table in ROWS}
        write_program(draft, module, len(split.schema.dense), (len(ROWS), DIM))
        draft.write_json(SERVING, Description.of(split.schema, DIM, layouts).to_json())
        draft.commit({})
    return path
