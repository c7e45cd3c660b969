"""Models of several tasks, and rows with weights, on real gloo ranks: one spawn per world size does all cases."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from pipeline.config import ModelConfig, TaskOptions, TaskTraining
from pipeline.evaluation import evaluate
from pipeline.evaluation.metrics import evaluate_tasks
from pipeline.records import TaskColumn
from pipeline.store import Store
from tests.embeddings.ranks import spawn
from tests.models.trained import COLUMNS, SIZES, WORLDS, published_scores, whole_and_in_parts
from tests.models.variants import RANKERS
from tests.tiers import Together, with_slow
from tests.training.dataset import write_dataset

TASKS = (
    TaskColumn(name="buy", kind="binary", given="click"),
    TaskColumn(name="items", kind="count"),
    TaskColumn(name="spend", kind="value"),
)
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
# One whose experts are shared by weighted rows of several tasks, and one without tasks; the other cases are slow.
DEFAULT = ("row weights", "weighted tasks")
NAMES = with_slow(CASES, DEFAULT)
DATASETS: dict[str, dict[str, Any]] = {
    "tasks": {"tasks": TASKS},
    "weighted": {"row_weights": True},
    "both": {"tasks": TASKS, "row_weights": True},
    "sampled": {"tasks": TASKS, "row_weights": True, "sampled": "logit"},
}


def model_of(name: str) -> ModelConfig:
    ranker, architecture, _, _ = CASES[name]
    experts = architecture in ("mmoe", "ple")
    options = TaskOptions(task_mlp=[4], expert_mlp=[5] if experts else None, experts=2 if experts else None)
    return replace(RANKERS[ranker], tasks=architecture, task_options=options)


def run_cases(folder: Path, names: list[str]) -> None:
    logging.disable(logging.WARNING)
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        for data in sorted({CASES[name][3] for name in names}):
            write_dataset(folder / data, **SIZES, sparse=COLUMNS, **DATASETS[data])
    dist.barrier()
    for name in names:
        outcome = run_case(Store(str(folder / CASES[name][3])), name, world)
        if rank == 0:
            (folder / f"{name}.json").write_text(json.dumps(outcome))


def run_case(store: Store, name: str, world: int) -> dict[str, Any]:
    outcome, made = whole_and_in_parts(store, name, model_of(name), world, **CASES[name][2])
    if made is not None:
        main = made.logits if made.logits.ndim == 1 else made.logits[:, 0]
        tasks = TASKS if made.tasks else ()
        figures = evaluate_tasks(tasks, made.tasks, made.logits, made.weights)
        outcome["ne"] = evaluate(made.labels, main, weights=made.weights)["ne"]
        outcome["figures"] = {task: figure.to_json() for task, figure in figures.items()}
        outcome["logits"] = made.logits.tolist()
    return outcome


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[int, Together]:
    """{world: {case: outcome}}, the URL of its store among it."""

    def train_together(world: int, names: list[str]) -> dict[str, dict[str, Any]]:
        folder = tmp_path_factory.mktemp(f"world{world}")
        spawn(run_cases, world, folder, names)
        return {
            name: {**json.loads((folder / f"{name}.json").read_text()), "store": str(folder / CASES[name][3])}
            for name in names
        }

    further = [name for name in CASES if name not in DEFAULT]
    return {world: Together(partial(train_together, world), DEFAULT, further) for world in WORLDS}


@pytest.mark.parametrize("name", NAMES)
def test_one_and_two_ranks_reach_the_same_figures(trained, name: str) -> None:
    one, two = trained[1][name], trained[2][name]
    assert two["ne"] == pytest.approx(one["ne"], rel=1e-6)
    for task, figures in one["figures"].items():
        for figure in {"ne", "rmse"} & figures.keys():
            assert two["figures"][task][figure] == pytest.approx(figures[figure], rel=1e-6)
    np.testing.assert_allclose(two["logits"], one["logits"], atol=1e-5)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", NAMES)
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
        progress = trained[world]["weighted tasks"]["whole progress"]
        assert [list(figures) for figures in progress["tasks"].values()] == [["ne", "loss"], *[["rmse", "loss"]] * 2]
        assert all(value > 0 for figures in progress["tasks"].values() for value in figures.values())
        assert trained[world]["row weights"]["whole progress"]["tasks"] is None
    one, two = (trained[world]["weighted tasks"]["whole progress"] for world in WORLDS)
    assert two["ne_window"] == pytest.approx(one["ne_window"], rel=1e-6)
    assert two["tasks"]["buy"]["ne"] == pytest.approx(one["tasks"]["buy"]["ne"], rel=1e-6)


@pytest.mark.slow
def test_a_task_without_weight_is_not_learnt(trained) -> None:
    learnt, left = (trained[1][name]["figures"]["buy"]["ne"] for name in ("shared_bottom", "less"))
    assert left > learnt + 0.02


@pytest.mark.parametrize("name", NAMES)
def test_published_scores_are_the_trained_ones(trained, name: str, tmp_path: Path) -> None:
    outcome, tasks = trained[1][name], DATASETS[CASES[name][3]].get("tasks", ())
    store = Store(outcome["store"])
    for coding, tolerance in (("fp32", 1e-5), ("8", 0.05)):
        scores, description = published_scores(store, model_of(name), outcome["final"], coding, tmp_path)
        np.testing.assert_allclose(scores, outcome["logits"], atol=tolerance)
        assert description.tasks == ({task.name: task.kind for task in tasks} or None)
