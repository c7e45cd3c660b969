"""Every ranker trained on real gloo ranks: one spawn per world size does all cases, the tests look at what it left."""

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

from pipeline.config import ModelConfig
from pipeline.evaluation import evaluate
from pipeline.store import Store
from tests.embeddings.ranks import spawn
from tests.models.trained import COLUMNS, SIZES, WORLDS, published_scores, whole_and_in_parts
from tests.models.variants import RANKERS
from tests.tiers import Together, with_slow
from tests.training.dataset import write_dataset

REGULARISED: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "batch norm": (replace(RANKERS["mlp"], norm="batch"), {}),
    "layer norm": (replace(RANKERS["masknet"], norm="layer"), {}),
    # Ranks drop other values, so one order of the rows suits one number of ranks better: this one suits them alike.
    "dropout": (replace(RANKERS["dlrm"], dropout=0.3), {"lanes": 1}),
    "dropout and batch norm": (replace(RANKERS["finalmlp"], dropout=0.2, norm="batch"), {"lanes": 1}),
    "l2": (RANKERS["dlrm"], {"embedding_l2": 3.0}),
    "smoothing": (RANKERS["dlrm"], {"label_smoothing": 0.4}),
}
CASES = {**{name: (model, {}) for name, model in RANKERS.items()}, **REGULARISED}
# A ranker, and what depends on ranks (batch norm) and on random numbers (dropout); the other cases are slow.
DEFAULT = ("dlrm", "batch norm", "dropout")
NAMES = with_slow(CASES, DEFAULT)


def run_cases(folder: Path, names: list[str]) -> None:
    logging.disable(logging.WARNING)
    rank, world = dist.get_rank(), dist.get_world_size()
    store = Store(str(folder / "store"))
    if rank == 0:
        write_dataset(folder / "store", **SIZES, sparse=COLUMNS)
    dist.barrier()
    for name in names:
        outcome = run_case(store, name, world)
        if rank == 0:
            (folder / f"{name}.json").write_text(json.dumps(outcome))


def run_case(store: Store, name: str, world: int) -> dict[str, Any]:
    model, settings = CASES[name]
    outcome, made = whole_and_in_parts(store, name, model, world, **settings)
    if made is not None:
        outcome["ne"] = evaluate(made.labels, made.logits)["ne"]
        outcome["logits"] = made.logits.tolist()
    return outcome


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[int, Together]:
    """{world: {case: outcome}}, the URL of its store among it."""

    def train_together(world: int, names: list[str]) -> dict[str, dict[str, Any]]:
        folder = tmp_path_factory.mktemp(f"world{world}")
        spawn(run_cases, world, folder, names)
        store = {"store": str(folder / "store")}
        return {name: {**json.loads((folder / f"{name}.json").read_text()), **store} for name in names}

    further = [name for name in CASES if name not in DEFAULT]
    return {world: Together(partial(train_together, world), DEFAULT, further) for world in WORLDS}


# With layers that divide by a deviation of a few numbers, which makes rounding larger.
NORMALISED = ("masknet", "dhen", "layer norm")


@pytest.mark.parametrize("name", NAMES)
def test_one_and_two_ranks_reach_the_same_ne(trained, name: str) -> None:
    one, two = trained[1][name], trained[2][name]
    assert two["ne"] == pytest.approx(one["ne"], rel=0.02 if CASES[name][0].dropout else 1e-5)


@pytest.mark.parametrize(
    "name", with_slow([name for name in CASES if CASES[name][0].dropout == 0], ["dlrm", "batch norm"])
)
def test_the_two_agree_in_every_logit(trained, name: str) -> None:
    bound = 1e-4 if name in NORMALISED else 1e-6
    np.testing.assert_allclose(trained[2][name]["logits"], trained[1][name]["logits"], rtol=0, atol=bound)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_training_ends_with_the_same_bytes(trained, name: str, world: int) -> None:
    outcome = trained[world][name]
    assert outcome["whole"] == outcome["parts"]


@pytest.mark.parametrize("name", with_slow(["dropout", "l2", "smoothing"], ["dropout"]))
def test_what_regularises_changes_the_result(trained, name: str) -> None:
    plain, other = trained[1]["dlrm"], trained[1][name]
    assert np.abs(np.array(plain["logits"]) - np.array(other["logits"])).max() > 1e-3


@pytest.mark.slow
def test_smoothing_and_l2_draw_the_logits_together(trained) -> None:
    plain, smooth, small = (np.std(trained[1][name]["logits"]) for name in ("dlrm", "smoothing", "l2"))
    assert smooth < plain and small < plain


@pytest.mark.parametrize("name", NAMES)
def test_published_scores_are_the_trained_ones(trained, name: str, tmp_path: Path) -> None:
    store, outcome = Store(trained[1][name]["store"]), trained[1][name]
    for coding, tolerance in (("fp32", 1e-5), ("8", 0.05)):
        scores, _ = published_scores(store, CASES[name][0], outcome["final"], coding, tmp_path)
        np.testing.assert_allclose(scores, outcome["logits"], atol=tolerance)
