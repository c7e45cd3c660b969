"""What the cycles of an ensemble's training begin with, where nothing else moves the weights."""

import json

import pytest
import torch
from safetensors.torch import load_file

from pipeline.config import CheckpointConfig
from pipeline.config.train import SnapshotConfig
from pipeline.plugins.ensembles.snapshots import perturb
from pipeline.store import Store
from tests.embeddings.ranks import spawn
from tests.training.dataset import write_dataset
from tests.training.test_looks import COLUMNS, trained

STILL = {
    "lr": 0.0,
    "sparse_lr": 0.0,
    "checkpoint": CheckpointConfig(allow=["train.lr", "train.sparse_lr", "train.schedule"]),
}
KINDS = {
    "cyclic": (SnapshotConfig(count=2, kind="cyclic"), False),
    "perturb": (SnapshotConfig(count=2, kind="perturb", perturbation=0.25), False),
    "reset": (SnapshotConfig(count=2), False),
    "warm": (SnapshotConfig(count=2), True),
}


def parameter(*values):
    return torch.nn.Parameter(torch.tensor(values))


def test_weights_are_perturbed_in_the_direction_of_their_last_steps():
    weight, frozen = parameter(3.0, 4.0), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = torch.optim.Adam([weight], lr=0.1)
    weight.grad = torch.tensor([0.0, 2.0])
    optimizer.step()
    before = weight.detach().clone()
    perturb({"w": weight, "f": frozen}, optimizer, 0.5, seed=1)
    moved = weight.detach() - before
    assert moved.norm() == pytest.approx(0.5 * float(before.norm()), rel=1e-6)
    assert moved[0] == 0 and moved[1] < 0 and torch.equal(frozen, torch.ones(2))


def test_without_a_moving_average_of_gradients_the_direction_is_random_by_the_seed():
    moved = []
    for seed in (1, 1, 2):
        weight = parameter(3.0, 4.0)
        perturb({"w": weight}, torch.optim.SGD([weight], lr=0.1), 0.5, seed)
        moved.append(weight.detach() - torch.tensor([3.0, 4.0]))
    assert torch.equal(moved[0], moved[1]) and not torch.equal(moved[0], moved[2])
    assert moved[0].norm() == pytest.approx(2.5, rel=1e-6)


def still(folder):
    """A training of each of KINDS whose learning rates are 0, and the one that the last one starts from."""
    write_dataset(folder, train=320, test=20, validation=60, sparse=COLUMNS)
    first, _ = trained(folder, "first")
    init, paths = Store(str(folder)).get(first["final"], "train"), {"init": [first["final"]]}
    for name, (snapshots, warm) in KINDS.items():
        changes = {"schedule": "linear", "snapshots": snapshots, "init": init if warm else None, **STILL}
        done, _ = trained(folder, name, **changes)
        paths[name] = sorted(each["checkpoint"] for each in done["train"]["ensemble"]["members"])
    (folder / "paths.json").write_text(json.dumps(paths))


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory):
    """The tensors of both snapshots, by kind; dense parameters and rows apart."""
    folder = tmp_path_factory.mktemp("still")
    spawn(still, 1, folder)

    def tensors(path):
        dense = load_file(folder / path / "dense.safetensors")
        files = sorted((folder / path).glob("rows/*/*.safetensors"))
        return (
            {name: value for name, value in dense.items() if name.startswith("param/")},
            {f"{file.parent.name}/{file.name}": load_file(file)["weight"] for file in files},
        )

    paths = json.loads((folder / "paths.json").read_text())
    return {name: [tensors(path) for path in own] for name, own in paths.items()}


def alike(one, other):
    assert one.keys() == other.keys()
    return [torch.equal(one[name], other[name]) for name in one]


def test_cyclic_begins_with_the_weights_as_they_are(snapshots):
    (dense, rows), (later, later_rows) = snapshots["cyclic"]
    assert all(alike(dense, later)) and all(alike(rows, later_rows))


def test_perturb_moves_dense_weights_by_a_share_of_their_norm_and_no_rows(snapshots):
    (dense, rows), (later, later_rows) = snapshots["perturb"]
    assert all(alike(rows, later_rows))
    for name, value in dense.items():
        assert (later[name] - value).norm() == pytest.approx(0.25 * float(value.norm()), rel=1e-4), name


def test_reset_begins_anew_with_other_weights_and_other_rows(snapshots):
    (dense, rows), (later, later_rows) = snapshots["reset"]
    weights = [same for name, same in zip(dense, alike(dense, later), strict=True) if name.endswith("weight")]
    assert weights and not any(weights)
    assert rows and not any(alike(rows, later_rows))


def test_reset_begins_with_the_checkpoint_that_a_warm_training_started_from(snapshots):
    (init, _), (dense, rows), (later, later_rows) = *snapshots["init"], *snapshots["warm"]
    assert all(alike(dense, later)) and all(alike(init, dense))
    assert all(alike(rows, later_rows))
