"""kill -9 in a later cycle of an ensemble's training: snapshots, members and bits are those of the undisturbed one."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from pipeline.checkpoint.fault_points import FaultPoint
from pipeline.checkpoint.retention import collect
from pipeline.config.train import SnapshotConfig
from pipeline.core.errors import ConfigError
from pipeline.plugins.ensembles.snapshots import cycle_steps
from pipeline.store import Store
from tests.checkpoint.killing import DIRECTORY, STEPS, Kill, attempt, complete, make_dataset

# 7 steps an epoch, so cycles end after 7, 14 and 21 steps; checkpoints in between, of which one is kept.
# Rows come in 8 lanes.
CHANGES = {"epochs": 3, "lanes": 64, "snapshots": SnapshotConfig(count=3, keep=2)}
CYCLE, WORLD = STEPS // 2, 2
CHECKPOINT = {"every_steps": 4, "keep_last": 1}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    root = tmp_path_factory.mktemp("dataset")
    make_dataset(root, validation=60, group=5)
    return root


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, dataset):
    return complete(tmp_path_factory.mktemp("undisturbed"), dataset, WORLD, CHECKPOINT, CHANGES)


def ended(root, folder):
    """What training said of its ensemble, and the tensors of all snapshots."""
    ensemble = json.loads((root / folder / "summary-rank0.json").read_text())["train"]["ensemble"]
    del ensemble["seconds"]
    tensors = {
        str(path.relative_to(root)): load_file(path)
        for step in (CYCLE, 2 * CYCLE, 3 * CYCLE)
        for path in sorted((root / DIRECTORY / f"step-{step:08d}").rglob("*.safetensors"))
    }
    return ensemble, tensors


def dense_weights(tensors, step):
    (name,) = (each for each in tensors if f"step-{step:08d}/dense" in each)
    return {key: value for key, value in tensors[name].items() if key.startswith("param/")}


def test_every_cycle_makes_a_model_of_its_own_and_the_best_pair_is_kept(undisturbed):
    ensemble, tensors = ended(undisturbed, "a")
    assert ensemble["made"] == 3 and len(ensemble["members"]) == 2
    assert ensemble["best_ne"] == min(each["ne"] for each in ensemble["members"])
    first, second = dense_weights(tensors, CYCLE), dense_weights(tensors, 2 * CYCLE)
    weights = [name for name in first if name.endswith("weight")]
    assert weights and not any(torch.equal(first[name], second[name]) for name in weights)


def test_cycles_are_equal_but_the_last_one_and_none_is_empty():
    assert [cycle_steps(*each) for each in ((4, 100), (3, 7), (2, 3))] == [25, 3, 2]
    with pytest.raises(ConfigError, match="4, but 6 planned steps cannot be cut into as many"):
        cycle_steps(4, 6)


def test_snapshots_stay_until_the_training_has_ended_and_then_its_members_do(undisturbed):
    store, snapshots = Store(str(undisturbed)), [f"{DIRECTORY}/step-{n * CYCLE:08d}" for n in (1, 2, 3)]

    def staying():
        return {each.path for each in collect(store, "r", min_age_seconds=0)[1]} & set(snapshots)

    assert staying() == set(snapshots)
    summary = json.loads((undisturbed / "a" / "summary-rank0.json").read_text())
    members = {each["checkpoint"] for each in summary["train"]["ensemble"]["members"]}
    with store.draft("runs/r/train/" + "k" * 32, kind="train", key="k" * 32, config={}, inputs={}) as draft:
        draft.commit(summary)
    assert staying() == members | {snapshots[-1]}


@pytest.mark.parametrize(
    "kill",
    [
        pytest.param(Kill(FaultPoint.BATCH, 1, CYCLE + 4), id="within the second cycle"),
        pytest.param(Kill(FaultPoint.BATCH, 0, 2 * CYCLE + 1), marks=pytest.mark.slow, id="as the third cycle begins"),
    ],
)
def test_a_resumed_training_has_the_same_snapshots_to_the_bit(tmp_path, dataset, undisturbed, kill):
    shutil.copytree(dataset, tmp_path, dirs_exist_ok=True)
    killed = attempt(tmp_path, tmp_path / "killed", WORLD, CHECKPOINT, kill, changes=CHANGES)
    assert killed.killed, f"{kill} was never reached"
    assert attempt(tmp_path, tmp_path / "last", WORLD, CHECKPOINT, changes=CHANGES).codes == [0] * WORLD
    ensemble, tensors = ended(tmp_path, "last")
    expected, theirs = ended(undisturbed, "a")
    assert ensemble == expected and tensors.keys() == theirs.keys()
    for name, values in theirs.items():
        for key, value in values.items():
            assert key == "rng" or torch.equal(tensors[name][key], value), (name, key)
