"""Checkpoints between flat and towers, and between hosts: rows by table, dense parts by name, optimizers along."""

import json
import logging

import pytest
import torch
import torch.distributed as dist

from pipeline.checkpoint.index import committed
from pipeline.config import CheckpointConfig, EvaluateConfig
from pipeline.core.errors import ArtifactError
from pipeline.records import TowerModuleSpec
from pipeline.stages.stage_inputs import towers_of_checkpoints
from pipeline.store import Store
from pipeline.training.config_settings import select_prediction_settings, select_training_settings
from pipeline.training.predict import predict
from pipeline.training.trainer import train
from tests.embeddings.ranks import plan_for, spawn
from tests.logged import listen
from tests.towers.cases import COLUMNS, DIM, config, data, tower_plan, towers_on

DLRM = TowerModuleSpec(name="dlrm", c=1, p=1, dim=DIM)
ASSIGNED = ("ace", "bd")
KEY = "k" * 32
MIXED = {"a": "row_wise", "c": "data_parallel", "e": "row_wise"}


def settings(hosts, ranks, module, assigned=ASSIGNED, **changes):
    """Configuration, plan and towers; ``module`` None: flat."""
    partition = {"name": "flat"} if module is None else {"name": "dmt", "module": module.name}
    made = config(hosts, ranks, **partition)
    made.checkpoint = CheckpointConfig()
    made.evaluate = EvaluateConfig(global_batch=30)
    made.train.dense_optimizer = "adam"
    made.train.schedule, made.train.min_lr_factor = "constant", 0.0  # max_steps stops these runs, and they go on
    for name, value in changes.items():
        setattr(made.train, name, value)
    if module is None:
        kinds = [MIXED.get(c.name, "table_wise") for c in COLUMNS]
        return made, plan_for(kinds, hosts * ranks, rows={c.name: c.rows for c in COLUMNS}, dim=DIM), None
    towers = towers_on([(f, [i % hosts]) for i, f in enumerate(assigned)], module)
    return made, tower_plan(towers, hosts, ranks, MIXED), towers


def run(folder, name, directory, hosts, module, init, steps, assigned=ASSIGNED):
    """Train ``steps`` steps in ``directory``, from checkpoint ``init`` or where that directory stands; then predict."""
    logging.disable(logging.WARNING)
    split = data(folder / "data")
    store = Store(str(folder / "data"))
    local = dist.get_world_size() // hosts
    made, plan, towers = settings(hosts, local, module, assigned, max_steps=steps)
    lines = listen()
    start = store.get(init, "train") if init else None
    outcome = train(
        select_training_settings(made),
        store,
        split.dataset,
        plan,
        f"runs/{directory}/checkpoints/x",
        KEY,
        lambda record: None,
        start,
        towers=towers,
    )
    chosen = select_prediction_settings(made)
    found = predict(chosen, store, split.dataset, plan, outcome["final"], towers)
    if dist.get_rank() == 0:
        record = {"final": outcome["final"], "lines": lines, "logits": found.logits.tolist(), **outcome["train"]}
        (folder / f"{name}.json").write_text(json.dumps(record))


def only_predict(folder, name, hosts, module, checkpoint):
    """Logits of a checkpoint in another model than the one it was written by."""
    split = data(folder / "data")
    made, plan, towers = settings(hosts, dist.get_world_size() // hosts, module)
    found = predict(
        select_prediction_settings(made), Store(str(folder / "data")), split.dataset, plan, checkpoint, towers
    )
    if dist.get_rank() == 0:
        (folder / f"{name}.json").write_text(json.dumps({"logits": found.logits.tolist()}))


def regrouped(folder):
    """Train towers, start others from them, ask which would go on, and go on with the wrong ones; one rank."""
    first, other = ASSIGNED, ("ade", "bc")
    run(folder, "first", "first", 1, DLRM, None, 2, first)
    run(folder, "other", "other", 1, DLRM, outcome(folder, "first")["final"], 1, other)
    made, _, towers = settings(1, 1, DLRM, other)
    store = Store(str(folder / "data"))
    kept = towers_of_checkpoints(made, store, committed(store, "runs/first/checkpoints/x"), towers)
    try:
        run(folder, "wrong", "first", 1, DLRM, None, 3, other)
        said = ""
    except ArtifactError as error:
        said = error.message
    kept_features = ["".join(tower.features) for tower in kept.towers]
    (folder / "regrouped.json").write_text(json.dumps({"kept": kept_features, "said": said}))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("interchange")


def outcome(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def assert_close(found, expected):
    torch.testing.assert_close(torch.tensor(found["logits"]), torch.tensor(expected["logits"]), rtol=0, atol=1e-6)


def test_a_flat_checkpoint_goes_into_towers_and_back(root):
    folder, through = root / "through", TowerModuleSpec()
    spawn(run, 1, folder, "flat", "flat", 1, None, None, 3)
    start = outcome(folder, "flat")
    spawn(only_predict, 4, folder, "towers read", 2, through, start["final"])
    assert_close(outcome(folder, "towers read"), start)
    spawn(run, 4, folder, "towers", "towers", 2, through, start["final"], 2)
    after = outcome(folder, "towers")
    assert "optimizer loaded" in after["lines"][0] and after["steps"] == 2
    spawn(run, 1, folder, "flat on", "flat-on", 1, None, start["final"], 2)
    assert_close(after, outcome(folder, "flat on"))
    spawn(only_predict, 1, folder, "flat read", 1, None, after["final"])
    assert_close(outcome(folder, "flat read"), after)


@pytest.mark.slow
def test_towers_with_modules_take_from_a_flat_checkpoint_what_both_have(root):
    folder = root / "modules"
    spawn(run, 1, folder, "flat", "flat", 1, None, None, 3)
    spawn(run, 4, folder, "towers", "towers", 2, DLRM, outcome(folder, "flat")["final"], 1)
    text = outcome(folder, "towers")["lines"][0]
    assert "5 tables loaded unchanged, 120 rows" in text
    assert "parameters loaded, the optimizer starts fresh" in text
    assert "parameter towers.tower.0.each.weight: keeps its initial values" in text
    assert "parameter head.ranking.top.0.weight: keeps its initial values" in text
    assert "head.ranking.bottom" not in text
    spawn(run, 1, folder, "back", "back", 1, None, outcome(folder, "towers")["final"], 1)
    assert "parameter towers.tower.0.each.weight of the checkpoint: not loaded" in outcome(folder, "back")["lines"][0]


@pytest.mark.slow
def test_towers_go_on_on_other_hosts_with_their_modules_and_optimizers(root):
    folder = root / "resume"
    spawn(run, 4, folder, "first", "moved", 2, DLRM, None, 2)
    spawn(run, 2, folder, "second", "moved", 1, DLRM, None, 5)
    spawn(run, 4, folder, "straight", "straight", 2, DLRM, None, 5)
    second = outcome(folder, "second")
    assert "resumed from" in second["lines"][0] and "after step 2" in second["lines"][0] and second["steps"] == 5
    assert_close(second, outcome(folder, "straight"))


def test_modules_stay_with_the_features_they_were_trained_on(root):
    folder = root / "regrouped"
    spawn(regrouped, 1, folder)
    text = outcome(folder, "other")["lines"][0]
    for number in (0, 1):
        assert f"parameter towers.tower.{number}.whole.weight: keeps its initial values" in text
    assert "parameter head.ranking" not in text
    found = outcome(folder, "regrouped")
    assert found["kept"] == list(ASSIGNED)
    assert "have other features: a, c, e; b, d; the model's: a, d, e; b, c" in found["said"]
