"""Every ranker behind towers of two hosts: as flat where towers move rows only, and resumed alike with modules."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from pipeline.config import ModelConfig
from pipeline.models.settings import FinalMlpConfig
from pipeline.records import TowerModuleSpec
from pipeline.store import Store
from pipeline.training.config_settings import select_prediction_settings, select_training_settings
from pipeline.training.predict import predict
from pipeline.training.trainer import train
from tests.embeddings.ranks import spawn
from tests.models.variants import RANKERS
from tests.tiers import Together, with_slow
from tests.towers.cases import DIM, data
from tests.towers.test_interchange import DLRM, KEY, settings

HOSTS, STEPS = 2, 4
DEFAULT = "dlrm"  # the other rankers are slow


def ranker(name: str) -> ModelConfig:
    """Settings of the ranker; gates on features by name need those, and tower modules put out other vectors."""
    config = replace(RANKERS[name], embedding_dim=DIM)
    return replace(config, first_gate=[]) if isinstance(config, FinalMlpConfig) else config


def run_all(folder: Path, names: list[str]) -> None:
    """Each ranker flat, in towers without modules, and with modules: straight through and in two parts."""
    logging.disable(logging.WARNING)
    split = data(folder / "data")
    store = Store(str(folder / "data"))
    for name in names:
        found = {}
        for kind, module, stops in (
            ("flat", None, [STEPS]),
            ("through", TowerModuleSpec(), [STEPS]),
            ("straight", DLRM, [STEPS]),
            ("parts", DLRM, [2, STEPS]),
        ):
            for stop in stops:
                made, plan, towers = settings(HOSTS, 1, module, max_steps=stop)
                made.model = ranker(name)
                done = train(
                    select_training_settings(made),
                    store,
                    split.dataset,
                    plan,
                    f"runs/{name}-{kind}/checkpoints/x",
                    KEY,
                    lambda record: None,
                    None,
                    towers=towers,
                )
            scored = predict(select_prediction_settings(made), store, split.dataset, plan, done["final"], towers)
            found[kind] = scored.logits.tolist() if scored is not None else []
        if dist.get_rank() == 0:
            (folder / f"{name}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Together:
    """By ranker the logits that two ranks, each a host, left."""

    def train_together(names: list[str]) -> dict[str, dict[str, list[float]]]:
        root = tmp_path_factory.mktemp("rankers")
        spawn(run_all, HOSTS, root, names, local=1)
        return {name: json.loads((root / f"{name}.json").read_text()) for name in names}

    return Together(train_together, [DEFAULT], [name for name in RANKERS if name != DEFAULT])


@pytest.mark.parametrize("name", with_slow(RANKERS, [DEFAULT]))
def test_a_ranker_trains_behind_towers_as_flat_and_goes_on_alike(outcomes: Together, name: str) -> None:
    logits = {kind: np.array(each) for kind, each in outcomes[name].items()}
    np.testing.assert_allclose(logits["through"], logits["flat"], atol=1e-5)
    np.testing.assert_array_equal(logits["parts"], logits["straight"])
    assert np.abs(logits["straight"] - logits["flat"]).max() > 1e-4 and logits["flat"].std() > 0
