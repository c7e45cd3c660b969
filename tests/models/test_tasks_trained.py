"""Models of several tasks, and rows with weights, on real gloo ranks: one spawn per world size does all cases."""

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
from pipeline.config import (
    Config,
    DataConfig,
    EvaluateConfig,
    GuardConfig,
    HardwareConfig,
    TaskOptions,
    TaskTraining,
    TrainConfig,
)
from pipeline.evaluation import evaluate
from pipeline.evaluation.tasks import evaluate_tasks
from pipeline.publishing.program import write_program
from pipeline.publishing.served import SERVING, Description, ServedModel
from pipeline.publishing.writing import write_table
from pipeline.records import SparseColumn, TaskColumn, Tower, Towers
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
TASKS = (
    TaskColumn(name="buy", kind="binary", given="click"), TaskColumn(name="items", kind="count"),
    TaskColumn(name="spend", kind="value"),
)  # fmt: skip
# By case: the ranker, what its tasks share, settings of training, and which dataset.
CASES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "shared_bottom": ("dlrm", "shared_bottom", {}, "tasks"),
    "mmoe": ("dcnv2", "mmoe", {}, "tasks"),
    "ple": ("finalmlp", "ple", {}, "tasks"),
    "esmm": ("deepfm", "esmm", {}, "tasks"),
    "less": ("dlrm", "shared_bottom", {"tasks": {"buy": TaskTraining(weight=0.0)}}, "tasks"),
    "row weights": ("dlrm", "shared_bottom", {}, "weighted"),
    "sampled": ("dlrm", "esmm", {}, "sampled"),
    "weighted tasks": ("wide_deep", "mmoe", {"label_smoothing": 0.1}, "both"),
}
DATASETS: dict[str, dict[str, Any]] = {
    "tasks": {"tasks": TASKS}, "weighted": {"row_weights": True}, "both": {"tasks": TASKS, "row_weights": True},
    "sampled": {"tasks": TASKS, "row_weights": True, "sampled": "logit"},
}  # fmt: skip
WORLDS = (1, 2)


def config_of(name: str, world: int, **changes: Any) -> Config:
    ranker, architecture, settings, _ = CASES[name]
    experts = architecture in ("mmoe", "ple")
    options = TaskOptions(task_mlp=[4], expert_mlp=[5] if experts else None, experts=2 if experts else None)
    own: dict[str, Any] = {
        "global_batch": 250, "epochs": 2, "lr": 0.01, "sparse_lr": 0.1, "warmup_steps": 2, "schedule": "constant",
        "precision": "fp32", "threads_per_rank": 1, "log_every_steps": 4, "guard": GuardConfig(collapse=False),
    }  # fmt: skip
    return Config(
        run="r", data=DataConfig(name="t", format="synthetic"),
        model=replace(RANKERS[ranker], tasks=architecture, task_options=options),
        hardware=HardwareConfig(name="t", ranks_per_host=world),
        train=TrainConfig(**{**own, **settings, **changes}), evaluate=EvaluateConfig(global_batch=130),
    )  # fmt: skip


def run_cases(folder: Path) -> None:
    logging.disable(logging.WARNING)
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        for name, options in DATASETS.items():
            write_dataset(folder / name, train=1010, test=400, sparse=COLUMNS, **options)
    dist.barrier()
    for name, case in CASES.items():
        outcome = run_case(Store(str(folder / case[3])), name, world)
        if rank == 0:
            (folder / f"{name}.json").write_text(json.dumps(outcome))


def run_case(store: Store, name: str, world: int) -> dict[str, Any]:
    """Train straight through, then stop and go on, in other folders."""
    plan = plan_for("table_wise", world, rows=ROWS, dim=DIM)
    dataset = store.get(f"datasets/t/{KEY}", "ingest")
    outcome: dict[str, Any] = {}
    for folder, stops in (("whole", [None]), ("parts", [STOP, None])):
        records: list[dict[str, Any]] = []
        for stop in stops:
            config = config_of(name, world, max_steps=stop)
            where = f"runs/{name.replace(' ', '-')}/{folder}/k"
            summary = train(TrainingSettings.of(config), store, dataset, plan, where, "key", records.append)
        outcome[folder] = digests(store, store.get(summary["final"], "train"))
        outcome["final"] = summary["final"]
        if records:
            outcome[f"{folder} progress"] = {key: records[-1].get(key) for key in ("ne_window", "tasks", "samples")}
    made = predict(PredictionSettings.of(config), store, dataset, plan, outcome["final"])
    if made is not None:
        main = made.logits if made.logits.ndim == 1 else made.logits[:, 0]
        tasks = TASKS if made.tasks else ()
        figures = evaluate_tasks(tasks, made.tasks, made.logits, made.weights)
        outcome["ne"] = evaluate(made.labels, main, weights=made.weights)["ne"]
        outcome["figures"] = {task: figure.to_json() for task, figure in figures.items()}
        outcome["logits"] = made.logits.tolist()
    return outcome


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[int, dict[str, dict[str, Any]]]:
    """{world: {case: outcome}}; the stores lie beside."""
    outcomes: dict[int, dict[str, dict[str, Any]]] = {}
    for world in WORLDS:
        folder = tmp_path_factory.mktemp(f"world{world}")
        spawn(run_cases, world, folder)
        outcomes[world] = {name: json.loads((folder / f"{name}.json").read_text()) for name in CASES}
        outcomes[world]["store"] = {"url": str(folder)}
    return outcomes


@pytest.mark.parametrize("name", CASES)
def test_one_and_two_ranks_reach_the_same_figures(trained, name: str) -> None:
    one, two = trained[1][name], trained[2][name]
    assert two["ne"] == pytest.approx(one["ne"], rel=1e-3)
    for task, figures in one["figures"].items():
        for figure in {"ne", "rmse"} & figures.keys():
            assert two["figures"][task][figure] == pytest.approx(figures[figure], rel=1e-3)
    np.testing.assert_allclose(two["logits"], one["logits"], atol=2e-3)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_a_resumed_training_ends_with_the_same_bytes_and_figures(trained, name: str, world: int) -> None:
    outcome = trained[world][name]
    assert outcome["whole"] == outcome["parts"]
    whole, parts = (outcome[f"{folder} progress"] for folder in ("whole", "parts"))
    assert parts["samples"] == whole["samples"] == 2020
    assert parts["ne_window"] == pytest.approx(whole["ne_window"])
    for task, figures in (whole["tasks"] or {}).items():
        assert parts["tasks"][task] == pytest.approx(figures)


def test_progress_has_the_figures_of_every_task(trained) -> None:
    for world in WORLDS:
        progress = trained[world]["mmoe"]["whole progress"]
        assert [list(figures) for figures in progress["tasks"].values()] == [["ne", "loss"], *[["rmse", "loss"]] * 2]
        assert all(value > 0 for figures in progress["tasks"].values() for value in figures.values())
        assert trained[world]["row weights"]["whole progress"]["tasks"] is None
    one, two = (trained[world]["weighted tasks"]["whole progress"] for world in WORLDS)
    assert two["ne_window"] == pytest.approx(one["ne_window"], rel=1e-3)
    assert two["tasks"]["buy"]["ne"] == pytest.approx(one["tasks"]["buy"]["ne"], rel=1e-3)


def test_a_task_without_weight_is_not_learnt(trained) -> None:
    learnt, left = (trained[1][name]["figures"]["buy"]["ne"] for name in ("shared_bottom", "less"))
    assert left > learnt + 0.02


@pytest.mark.parametrize("name", CASES)
def test_published_scores_are_the_trained_ones(trained, name: str, tmp_path: Path) -> None:
    store = Store(f"{trained[1]['store']['url']}/{CASES[name][3]}")
    outcome, split = trained[1][name], SplitReader(store, store.get(f"datasets/t/{KEY}", "ingest"), "test")
    columns = [(group, split.allocate(group.rows)) for group in split.groups]
    for group, each in columns:
        split.read(group, each, 0)
    ids = np.concatenate([each.single for _, each in columns], axis=1)
    dense = np.ascontiguousarray(np.concatenate([each.dense for _, each in columns], axis=1).T)
    for coding, tolerance in (("fp32", 1e-5), ("8", 0.05)):
        path = publish(store, name, outcome["final"], split, coding, Store(str(tmp_path)))
        served = ServedModel(tmp_path / path, 1 << 30)
        scores = served.score(dense, dict(zip(split.single, ids, strict=True)))
        np.testing.assert_allclose(scores, outcome["logits"], atol=tolerance)
        tasks = split.schema.tasks
        assert served.description.tasks == ({task.name: task.kind for task in tasks} or None)


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
