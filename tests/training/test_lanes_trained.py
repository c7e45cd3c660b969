"""Whole trainings with lanes on real ranks: the same rows and losses on 1, 2 and 4 of them, killed and resumed on any.

Looks at validation rows and snapshots with lanes: ``tests/checkpoint/test_kill_{validation,snapshots}.py``.
"""

import json
import shutil
from collections import Counter

import pytest
import torch

from pipeline.checkpoint.fault_points import FaultPoint
from tests.checkpoint.killing import EPOCHS, ROWS, STEPS, Kill, attempt, ledger, make_dataset
from tests.checkpoint.test_kill import final
from tests.tiers import with_slow

LANES = {"lanes": 64}  # of which 8 fit 64 row groups and batches of 48 rows


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    root = tmp_path_factory.mktemp("dataset")
    make_dataset(root, group=5)
    return root


@pytest.fixture(scope="module")
def whole(tmp_path_factory, dataset):
    """By settings, number of ranks and tier: a training that nobody kills, its ledger and the folder of its store."""
    known = {}

    def run(world, tier="ddr", **changes):
        name = str((world, tier, sorted(changes.items(), key=str)))
        if name not in known:
            root = tmp_path_factory.mktemp("whole")
            known[name] = ledger([attempted(root, dataset, "a", world, tier=tier, **changes)]), root
        return known[name]

    return run


def attempted(root, dataset, name, world, kill=None, tier="ddr", **changes):
    shutil.copytree(dataset, root, dirs_exist_ok=True)
    found = attempt(root, root / name, world, {}, kill, tier, {**LANES, **changes})
    assert found.codes == [0] * world if kill is None else found.killed
    return found


def losses(root, folder="a"):
    return json.loads((root / folder / "losses-rank0.json").read_text())


@pytest.mark.parametrize("world", with_slow((2, 4), (2,)))
def test_ranks_train_the_same_rows_to_the_same_losses(whole, world):
    rows, alone = whole(1)
    assert rows == Counter(dict.fromkeys(rows, 1))
    assert Counter(row for _, row in rows) == dict.fromkeys(range(ROWS), EPOCHS)
    assert rows != whole(1, lanes=1)[0]
    same, root = whole(world)
    assert same == rows
    assert losses(root) == pytest.approx(losses(alone), rel=1e-6)
    assert_close(final(root), final(alone))


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if key != "rng":  # one for each rank
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_killed_on_four_ranks_and_resumed_on_two_three_and_one(tmp_path, dataset, whole):
    worlds = [(4, Kill(FaultPoint.BATCH, 3, 5)), (2, Kill(FaultPoint.BEFORE_COMMIT, 0, 2)),
              (3, Kill(FaultPoint.BATCH, 2, 4)), (1, None)]  # fmt: skip
    attempts = [attempted(tmp_path, dataset, str(n), world, kill) for n, (world, kill) in enumerate(worlds)]
    for before, after in zip(attempts, attempts[1:], strict=False):
        assert after.resumed == before.committed > 0
    rows, root = whole(1)
    assert ledger(attempts) == rows
    assert_close(final(tmp_path), final(root))


def test_a_training_keeps_the_lanes_that_it_began_with(tmp_path, dataset, whole):
    """So one that began when rows came in one lane, which its checkpoints do not mention, trains each row once."""
    killed = attempted(tmp_path, dataset, "a", 2, Kill(FaultPoint.BATCH, 1, 8), lanes=1)
    again = attempted(tmp_path, dataset, "b", 1, Kill(FaultPoint.BATCH, 0, 8))
    last = attempted(tmp_path, dataset, "c", 2)
    assert 0 < killed.committed == again.resumed < again.committed == last.resumed < STEPS
    assert ledger([killed, again, last]) == whole(1, lanes=1)[0] != whole(1)[0]


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["ddr", "ssd"])
@pytest.mark.parametrize("world", [2, 4])
def test_killed_and_resumed_on_as_many_ranks_it_ends_with_the_same_bits(tmp_path, dataset, whole, world, tier):
    """Those of tables in memory, wherever the killed training had them."""
    killed = attempted(tmp_path, dataset, "a", world, Kill(FaultPoint.BATCH, 1, 8), tier)
    last = attempted(tmp_path, dataset, "b", world, tier=tier)
    rows, root = whole(world)
    assert 0 < killed.committed == last.resumed < STEPS
    assert ledger([killed, last]) == rows
    found, expected = final(tmp_path), final(root)
    assert found.keys() == expected.keys()
    # TorchRec draws numbers for tables in memory that nobody uses: torch's generator stands elsewhere.
    assert all(torch.equal(found[key], value) for key, value in expected.items() if key != "rng" or tier == "ddr")
