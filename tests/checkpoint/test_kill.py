"""The kill matrix: kill -9 at any named point, resumed on as many, fewer or more ranks, loses and doubles no row."""

import shutil
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

from pipeline.checkpoint.fault_points import FaultPoint
from pipeline.checkpoint.verify import verify
from pipeline.store import Store
from tests.checkpoint.killing import DIRECTORY, EPOCHS, ROWS, STEPS, Kill, attempt, ledger, make_dataset

# Checkpoints lie at steps 2, 4, .. 14; the first is a baseline, the next ones deltas. A baseline has several
# chunks on every rank, so the counts below fall into the second checkpoint or later.
# In make test: half-written data, ranks that disagree, around the commit and the swap, a step and then a restore.
SOONER = {
    "mid shard": [Kill(FaultPoint.CHUNK, 1, 9)],
    "one rank has written, the other not": [Kill(FaultPoint.ENCODE, 1, 9, after="written-2-rank0")],
    "before commit": [Kill(FaultPoint.BEFORE_COMMIT, 0, 2)],
    "after commit": [Kill(FaultPoint.AFTER_COMMIT, 0, 2)],
    "after the compacted one is named": [Kill(FaultPoint.AFTER_SWAP, 0, 1)],
    "restore": [Kill(FaultPoint.BATCH, 1, 8), Kill(FaultPoint.RESTORE, 0, 3)],
}
FURTHER = {
    "batch": [Kill(FaultPoint.BATCH, 1, 8)],
    "dense": [Kill(FaultPoint.DENSE, 0, 2)],
    "first batch, before any checkpoint": [Kill(FaultPoint.BATCH, 0, 1)],
    "staging": [Kill(FaultPoint.STAGE, 1, 5)],
    "quantising": [Kill(FaultPoint.ENCODE, 0, 9)],
    "mid shard of the first checkpoint": [Kill(FaultPoint.CHUNK, 0, 2)],
    "prune": [Kill(FaultPoint.PRUNE, 0, 1)],
    "compaction": [Kill(FaultPoint.COMPACT, 0, 3)],
    "before the compacted one is named": [Kill(FaultPoint.BEFORE_SWAP, 0, 1)],
    "the final checkpoint": [Kill(FaultPoint.BEFORE_COMMIT, 0, STEPS // 2)],
    "three times": [Kill(FaultPoint.BEFORE_COMMIT, 0, 2), Kill(FaultPoint.RESTORE, 0, 2), Kill(FaultPoint.CHUNK, 0, 4)],
}
KILLS = SOONER | FURTHER
COMPACTING = {"compact_after": 2, "policy": "consecutive"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """By checkpoint settings: the ledger of a run that nobody kills, and its final checkpoint; run once each."""
    known = {}

    def run(checkpoint):
        name = str(checkpoint)
        if name not in known:
            root = tmp_path_factory.mktemp("undisturbed")
            make_dataset(root)
            known[name] = ledger([attempt(root, root / "a", 2, checkpoint)]), final(root)
        return known[name]

    return run


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    root = tmp_path_factory.mktemp("dataset")
    make_dataset(root)
    return root


@pytest.fixture(scope="module")
def first(tmp_path_factory, dataset):
    """By name of KILLS: where two ranks were killed the first time, and that attempt; once for all that go on."""
    known = {}

    def run(name):
        if name not in known:
            root = tmp_path_factory.mktemp("first")
            shutil.copytree(dataset, root, dirs_exist_ok=True)
            kill = KILLS[name][0]
            known[name] = root, attempt(root, root / "attempt0", 2, settings_of(name), kill)
        return known[name]

    return run


def settings_of(name):
    return COMPACTING if "compact" in name else {}


def final(root):
    """All tensors of the final checkpoint, tables put together; it is a baseline, so no other is needed."""
    folder = root / DIRECTORY / f"step-{STEPS:08d}"
    found = dict(load_file(folder / "dense.safetensors"))
    for file in sorted((folder / "rows").rglob("*.safetensors")):
        for name, value in load_file(file).items():
            found.setdefault(f"{file.parent.name}/{name}", []).append((file.name, value))
    # Ranks hold rising rows, and number their files in that order.
    return {k: torch.cat([t for _, t in v]) if isinstance(v, list) else v for k, v in found.items()}


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
@pytest.mark.parametrize("name", [*SOONER, *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER)])
def test_no_row_is_lost_or_trained_twice(tmp_path, first, undisturbed, name, world):
    (root, killed), checkpoint = first(name), settings_of(name)
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    attempts = []
    for number, kill in enumerate(KILLS[name]):
        attempts.append(
            killed if not number else attempt(tmp_path, tmp_path / f"attempt{number}", world, checkpoint, kill)
        )
        assert attempts[-1].killed, f"{kill} was never reached: {attempts[-1]}"
    attempts.append(attempt(tmp_path, tmp_path / "last", world, checkpoint))
    assert attempts[-1].codes == [0] * world
    for before, after in zip(attempts, attempts[1:], strict=False):
        if after.resumed is not None:
            assert after.resumed == before.committed, "a committed checkpoint was lost"
    reference, tables = undisturbed(checkpoint)
    counts = ledger(attempts)
    assert counts == reference
    assert Counter(row for _, row in counts.elements()) == dict.fromkeys(range(ROWS), EPOCHS)
    found = final(tmp_path)
    assert found.keys() == tables.keys()
    for key, value in tables.items():
        if world == 2:
            assert torch.equal(found[key], value), key
        elif key != "rng":  # one for each rank
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6)


MIXED = {"quantise": "mixed", "state": "bf16", "final_quantise": "mixed"}


@pytest.mark.slow
@pytest.mark.parametrize("kill", [Kill(FaultPoint.CHUNK, 1, 20), Kill(FaultPoint.BEFORE_COMMIT, 0, 3)], ids=str)
def test_no_row_is_lost_or_trained_twice_with_mixed_bits(tmp_path, dataset, kill):
    shutil.copytree(dataset, tmp_path, dirs_exist_ok=True)
    killed = attempt(tmp_path, tmp_path / "first", 2, MIXED, kill)
    assert killed.killed, f"{kill} was never reached: {killed}"
    last = attempt(tmp_path, tmp_path / "last", 2, MIXED)
    assert last.codes == [0, 0]
    assert last.resumed == killed.committed > 0
    assert Counter(row for _, row in ledger([killed, last]).elements()) == dict.fromkeys(range(ROWS), EPOCHS)
    store = Store(str(tmp_path))
    artifact = store.get(f"{DIRECTORY}/step-{STEPS:08d}", "train")
    assert {"q2", "q3", "q4"} <= set(artifact.summary["codings"])
    assert verify(store, artifact)[0] == []
