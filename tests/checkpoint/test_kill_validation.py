"""kill -9 around a look at the validation rows and behind a plateau: what resumes decides and ends the same."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from pipeline.checkpoint.fault_points import FaultPoint
from pipeline.config.train import ValidateConfig
from tests.checkpoint.killing import DIRECTORY, Kill, attempt, complete, make_dataset

# 7 steps an epoch, looks after 2, 4, 6, 7, 9, .. steps. The model learns the few rows by heart, so the looks get worse
# soon: the rates are lowered once, and then the training stops by itself. Rows come in 8 lanes.
LOOKS = ValidateConfig(patience=2, cycle_epochs=None)
CHANGES = {"epochs": 12, "lanes": 64, "sparse_lr": 1.0, "lr": 0.03, "validate": LOOKS}
CHECKPOINT = {"every_steps": 5, "keep_last": 1}
WORLD = 2


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    root = tmp_path_factory.mktemp("dataset")
    make_dataset(root, validation=60, group=5)
    return root


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, dataset):
    return complete(tmp_path_factory.mktemp("undisturbed"), dataset, WORLD, CHECKPOINT, CHANGES)


def ended(root, folder):
    """What training said of its looks, and all tensors of the final checkpoint."""
    summary = json.loads((root / folder / "summary-rank0.json").read_text())
    final, part = root / summary["final"], summary["train"]["validation"]
    del part["seconds"]
    tensors = {str(p.relative_to(final)): load_file(p) for p in sorted(final.rglob("*.safetensors"))}
    state = json.loads((final / "state.json").read_text())
    return part, state["train"], tensors


def test_the_training_stops_by_itself_with_the_best_weights(undisturbed):
    part, state, tensors = ended(undisturbed, "a")
    assert part["stopped"] and part["lr_drops"] == 1 and part["looks"] == len(state["validation"]["looks"])
    looks = {look["step"]: look["ne"] for look in state["validation"]["looks"]}
    assert part["ne"] == looks[part["best_step"]] == min(looks.values())
    assert state["step"] == max(looks) > part["best_step"]
    assert state["step"] < 12 * 7
    best = undisturbed / DIRECTORY / f"step-{part['best_step']:08d}"
    for path in best.rglob("rows/**/*.safetensors"):
        for name, value in load_file(path).items():
            assert torch.equal(tensors[str(path.relative_to(best))][name], value), (path, name)


def steps_of(undisturbed):
    """Steps by name: of the best look, of the plateau, and of the end."""
    part, state, _ = ended(undisturbed, "a")
    looks, best, since = state["validation"]["looks"], 10.0, 0
    for look in looks:
        since = 0 if look["ne"] < best else since + 1
        best = min(best, look["ne"])
        if since == 2:
            return {"best": part["best_step"], "plateau": look["step"], "end": state["step"]}
    raise AssertionError("no plateau")


FURTHER = [("best", 0), ("best", 1), ("plateau", 0), ("plateau", 4), ("end", 0)]


@pytest.mark.parametrize(
    ("moment", "behind"), [("plateau", 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in FURTHER)]
)
def test_a_resumed_training_decides_and_ends_the_same(tmp_path, dataset, undisturbed, moment, behind):
    shutil.copytree(dataset, tmp_path, dirs_exist_ok=True)
    step = steps_of(undisturbed)[moment] + behind
    kill = Kill(FaultPoint.BATCH, 1, step)  # before step ``step``, with the look after the one before
    killed = attempt(tmp_path, tmp_path / "killed", WORLD, CHECKPOINT, kill, changes=CHANGES)
    assert killed.killed, f"{kill} was never reached"
    last = attempt(tmp_path, tmp_path / "last", WORLD, CHECKPOINT, changes=CHANGES)
    assert last.codes == [0] * WORLD
    _same(ended(tmp_path, "last"), ended(undisturbed, "a"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kill",
    [Kill(FaultPoint.BEFORE_COMMIT, 0, 1), Kill(FaultPoint.AFTER_COMMIT, 0, 2), Kill(FaultPoint.RESTORE, 1, 1)],
    ids=["the best checkpoint is not committed", "it is committed", "going back to it"],
)
def test_killed_while_the_best_weights_are_written_or_read(tmp_path, dataset, undisturbed, kill):
    shutil.copytree(dataset, tmp_path, dirs_exist_ok=True)
    killed = attempt(tmp_path, tmp_path / "killed", WORLD, CHECKPOINT, kill, changes=CHANGES)
    assert killed.killed, f"{kill} was never reached"
    last = attempt(tmp_path, tmp_path / "last", WORLD, CHECKPOINT, changes=CHANGES)
    assert last.codes == [0] * WORLD
    _same(ended(tmp_path, "last"), ended(undisturbed, "a"))


@pytest.mark.slow
def test_one_rank_and_tables_on_ssd_decide_the_same(tmp_path, dataset, undisturbed):
    reference = ended(undisturbed, "a")[0]
    for name, world, tier in (("one", 1, "ddr"), ("ssd", WORLD, "ssd")):
        root = tmp_path / name
        shutil.copytree(dataset, root)
        assert attempt(root, root / "a", world, CHECKPOINT, tier=tier, changes=CHANGES).codes == [0] * world
        part = ended(root, "a")[0]
        assert {key: part[key] for key in ("looks", "best_step", "stopped", "lr_drops")} == {
            key: reference[key] for key in ("looks", "best_step", "stopped", "lr_drops")
        }
        assert part["ne"] == pytest.approx(reference["ne"], rel=1e-4 if world == 1 else 1e-12)


def _same(found, expected):
    assert found[0] == expected[0]
    assert found[1] == expected[1]
    assert found[2].keys() == expected[2].keys()
    for file, tensors in expected[2].items():
        for name, value in tensors.items():
            assert torch.equal(found[2][file][name], value), (file, name)
