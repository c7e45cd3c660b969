"""Whole training runs with tables on SSD: the same bytes as in memory, figures, kills, and disks that fail."""

import contextlib
import json
import re
import subprocess
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pipeline.checkpoint.fault_points import FaultPoint
from pipeline.config import CheckpointConfig
from pipeline.core.errors import NightjarError
from pipeline.records import SparseColumn
from pipeline.report.progress import plain_line
from pipeline.store import Store
from pipeline.training.config_settings import select_prediction_settings, select_training_settings
from pipeline.training.predict import predict
from pipeline.training.trainer import train
from tests.checkpoint.killing import STEPS, Kill, attempt, make_dataset
from tests.checkpoint.test_kill import final
from tests.embeddings.ranks import on_tier, plan_for, spawn, with_state
from tests.tiers import Together, with_slow
from tests.training.dataset import KEY, write_dataset
from tests.training.test_train import config, digests, trained

ROWS = {"a": 3000, "b": 2300, "c": 1100}
COLUMNS = tuple(SparseColumn(name=name, rows=rows) for name, rows in ROWS.items())
RAGGED = (*COLUMNS[:2], SparseColumn(name="c", rows=1100, multi=True))
SMALLEST = 1 << 19  # bytes of a file of rows; a checkpoint's copy of all of them is smaller
LONG = 500  # steps
EVERY = CheckpointConfig(every_steps=3, keep_last=9)
CASES = {
    "ddr": {"tier": "ddr"},
    "ssd": {},
    "default path": {"paths": None},
    "pinned": {"cache_rows": 700},
    "stopped": {"then": True, "max_steps": 7},
    "quick checkpoints": {"checkpoint": EVERY},
    "table-wise": {"sharding": "table_wise"},
    "ragged ddr": {"tier": "ddr", "sparse": RAGGED, "lanes": 1},
    "ragged": {"sparse": RAGGED, "lanes": 1},
    "sgd ddr": {"tier": "ddr", "sparse_optimizer": "sgd"},
    "sgd": {"sparse_optimizer": "sgd"},
    "lanes ddr": {"tier": "ddr", "sparse": RAGGED, "lanes": 64},
    "lanes": {"sparse": RAGGED, "lanes": 64, "then": True, "max_steps": 7},
    "l2 ddr": {"tier": "ddr", "embedding_l2": 2.0},
    "l2": {"embedding_l2": 2.0},
    "short of memory": {"ddr_gib": 0.1, "checkpoint": EVERY, "log_every_steps": 100, "then": True, "max_steps": 5},
    "missing": {"paths": ["nowhere"]},
    "cut": {"cut": 8, "checkpoint": EVERY},  # the last: one rank leaves the others behind
}
# On two ranks; the other cases, and all of them on one rank, are slow.
DEFAULT = (
    "ddr",
    "ssd",
    "stopped",
    "ragged ddr",
    "lanes ddr",
    "lanes",
    "l2 ddr",
    "l2",
    "short of memory",
    "missing",
    "cut",
)
SAME = ("ssd", "default path", "pinned", "stopped", "quick checkpoints", "table-wise", "ragged", "sgd", "lanes", "l2")
MESSAGES = {
    "missing": ("ConfigError", "hardware.ssd_paths names .*nowhere.* not a directory"),
    "cut": ("GuardError", "scratch file of .* was cut from .* the last checkpoint, .*step-0000000[36], is intact"),
    "short of memory": (
        "GuardError",
        "training takes .* of 0.[12] GiB of memory.* on a host .* the last checkpoint, .*step-00000005,",
    ),
}


def cut_files(folder):
    """Truncate the nameless files of this rank's tables."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread has closed it meanwhile
            if str(link.readlink()).startswith(str(folder)) and link.stat().st_size >= SMALLEST:
                with link.open("r+b") as file:
                    file.truncate(0)


def run_case(
    root,
    *,
    tier="ssd",
    paths=("disk0", "disk1"),
    cache_rows=0,
    sharding="row_wise",
    sparse=COLUMNS,
    then=False,
    cut=None,
    ddr_gib=8.0,
    **changes,
):
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        write_dataset(root, train=2110, test=700, sparse=sparse)
        for name in ("disk0", "disk1"):
            (root / name).mkdir()
    dist.barrier()
    store = Store(str(root))
    plan = on_tier(plan_for(sharding, world, rows=ROWS, dim=8), tier, cache_rows)
    plan = with_state(plan, changes.get("sparse_optimizer", "rowwise_adagrad"))
    records, passed = [], []
    # Pages of its own: most others it shares with whatever was forked beside it, and counts in part.
    _weight = np.ones(150 << 17) if ddr_gib < 1 else None

    def look(phase):
        passed.append(phase)
        if phase == FaultPoint.BATCH and passed.count(phase) == cut and rank == world - 1:
            cut_files(root)

    try:
        for steps in [changes.pop("max_steps", None), *([None] if then else [])]:
            current = config(world, max_steps=steps, **changes)
            current.hardware.ddr_gib = ddr_gib if steps is None or not then else 8.0
            current.hardware.ssd_paths = [str(root / path) for path in paths or ()]
            dataset = store.get(f"datasets/t/{KEY}", "ingest")
            directory = "runs/r/checkpoints/k"
            settings = select_training_settings(current)
            summary = train(settings, store, dataset, plan, directory, "key", records.append, on_point=look)
        predictions = predict(select_prediction_settings(current), store, dataset, plan, summary["final"])
    except NightjarError as error:
        return {"error": type(error).__name__, "message": str(error)}
    left = [path.name for name in ("disk0", "disk1", "scratch") for path in (root / name).glob("*")]
    return {
        "summary": summary,
        "records": records,
        "digests": digests(store, store.get(summary["final"], "train")),
        "logits": predictions.logits.tolist() if predictions else None,
        "left": left,
    }


def run_cases(folder, names):
    for name in names:
        (folder / f"{name}-{dist.get_rank()}.json").write_text(json.dumps(run_case(folder / name, **CASES[name])))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """By number of ranks and case the outcome on each rank."""

    def train_together(cases):
        world = cases[0][0]
        folder = tmp_path_factory.mktemp(f"world{world}")
        spawn(run_cases, world, folder, [name for _, name in cases])
        return {
            (world, name): [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(world)]
            for _, name in cases
        }

    default = [(2, name) for name in CASES if name in DEFAULT]
    further = [(2, name) for name in CASES if name not in DEFAULT]
    return Together(train_together, default, further, [(1, name) for name in CASES])


def on_ranks(names):
    """Number of ranks and case, for each of ``names``; all but ``DEFAULT`` on two ranks are slow."""
    return with_slow(product((1, 2), names), [(2, name) for name in names if name in DEFAULT])


@pytest.mark.parametrize(("world", "name"), on_ranks(SAME))
def test_the_bytes_are_those_of_a_run_in_memory(outcomes, world, name):
    found = outcomes[world, name][0]
    expected = outcomes[world, f"{name} ddr" if f"{name} ddr" in CASES else "ddr"][0]
    assert found["logits"] == expected["logits"]
    if name != "table-wise":  # its checkpoint's files are cut otherwise
        # TorchRec draws numbers for tables in memory that nobody uses: torch's generator stands elsewhere.
        assert trained(found["digests"]) == trained(expected["digests"])
    assert found["left"] == []
    if name in ("lanes", "l2"):
        assert found["logits"] != outcomes[world, "ragged ddr" if name == "lanes" else "ddr"][0]["logits"]


@pytest.mark.measures
@pytest.mark.parametrize("world", with_slow((1, 2), (2,)))
def test_figures_reach_the_records_and_the_log_line(outcomes, world):
    outcome = outcomes[world, "ssd"][0]
    record, figures = outcome["records"][-1], outcome["summary"]["train"]
    assert 0 < record["ssd_hit_rate"] <= 1 and 0 <= outcome["records"][0]["ssd_prefetch_coverage"] <= 1
    assert record["pss_bytes"] > 0 and figures["peak_pss_bytes"] >= record["pss_bytes"]
    # So few rows never fill a segment of the log; tests/embeddings/test_ssd.py has logs that do.
    assert {"ssd_faults", "ssd_read_bytes", "ssd_written_bytes"} <= set(figures["ssd"])
    assert " ssd hit " in plain_line(record)
    plain = outcomes[world, "ddr"][0]
    assert not any("ssd" in key for key in [*plain["records"][-1], *plain["summary"]["train"]])
    assert "ssd" not in plain_line(plain["records"][-1])


@pytest.mark.measures
@pytest.mark.parametrize(("world", "name"), on_ranks(MESSAGES))
def test_a_disk_that_fails_is_one_message_on_every_rank(outcomes, world, name):
    kind, message = MESSAGES[name]
    found = outcomes[world, name]
    assert {outcome["error"] for outcome in found} == {kind}
    assert len({outcome["message"] for outcome in found}) == 1
    assert re.search(message, found[0]["message"])


def test_a_killed_run_leaves_no_file(tmp_path):
    make_dataset(tmp_path)
    assert attempt(tmp_path, tmp_path / "a", 2, {}, Kill(FaultPoint.BATCH, 0, 3), tier="ssd").killed
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.slow
def test_a_killed_run_leaves_no_file_and_resumes_to_the_same_bytes(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for root in (whole, killed):
        make_dataset(root)
    assert attempt(whole, whole / "a", 2, {}).codes == [0, 0]
    for number, kill in enumerate([Kill(FaultPoint.STAGE, 1, 5), Kill(FaultPoint.BATCH, 0, 3)]):
        assert attempt(killed, killed / f"a{number}", 2, {}, kill, tier="ssd").killed
        assert list((killed / "scratch").iterdir()) == []
    assert attempt(killed, killed / "last", 2, {}, tier="ssd").codes == [0, 0]
    expected, found = final(whole), final(killed)
    assert STEPS > 10 and sorted(expected) == sorted(found)
    assert {name for name in expected if not torch.equal(expected[name], found[name])} <= {"rng"}


@pytest.fixture
def small_disk(tmp_path):
    """A directory on a disk of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a small disk (it takes root and the right to mount)")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill_disk(folder, root, small):
    outcome = run_case(root, max_steps=4, checkpoint=EVERY)
    assert "summary" in outcome
    full = run_again(root, small)
    (folder / "full.json").write_text(json.dumps(full))


def run_again(root, small):
    """The same run with its SSD path on the ``small`` disk."""
    store, current = Store(str(root)), config(1, checkpoint=EVERY)
    current.hardware.ssd_paths = [str(small)]
    plan = on_tier(plan_for("row_wise", 1, rows=ROWS, dim=8), "ssd")
    dataset = store.get(f"datasets/t/{KEY}", "ingest")
    with pytest.raises(NightjarError) as caught:
        train(
            select_training_settings(current), store, dataset, plan, "runs/r/checkpoints/k", "key", lambda record: None
        )
    names = store.names("runs/r/checkpoints/k")
    return {"exit": caught.value.exit_code, "message": str(caught.value), "names": names}


def test_a_full_disk_stops_before_the_first_step_and_names_the_checkpoint(tmp_path, small_disk):
    spawn(fill_disk, 1, tmp_path, tmp_path / "store", small_disk)
    full = json.loads((tmp_path / "full.json").read_text())
    assert full["exit"] == 5
    assert re.search(
        "the disk of .*small is full: the rows of table 'a' needs .* free; the last checkpoint, "
        "runs/r/checkpoints/k/step-00000004, is intact",
        full["message"],
    )
    assert "hint: free space there, or hardware.ssd_paths=" in full["message"]
    assert full["names"] == ["step-00000003", "step-00000004"]
    assert list(small_disk.iterdir()) == []


def train_long(folder):
    """500 steps from either tier over the same data; what the last checkpoint holds."""
    if dist.get_rank() == 0:
        write_dataset(folder, train=2110, test=700, sparse=COLUMNS)
    dist.barrier()
    world, store, found = dist.get_world_size(), Store(str(folder)), {}
    dataset = store.get(f"datasets/t/{KEY}", "ingest")
    for optimizer, tier in product(("rowwise_adagrad", "sgd"), ("ddr", "ssd")):
        current = config(world, epochs=1000, max_steps=LONG, sparse_optimizer=optimizer)
        plan = on_tier(plan_for("row_wise", world, rows=ROWS, dim=8), tier)
        summary = train(
            select_training_settings(current),
            store,
            dataset,
            plan,
            f"runs/{tier}-{optimizer}/checkpoints/k",
            "key",
            lambda record: None,
        )
        found[f"{tier} {optimizer}"] = {
            "steps": summary["train"]["steps"],
            **digests(store, store.get(summary["final"], "train")),
        }
    (folder / f"long-{dist.get_rank()}.json").write_text(json.dumps(found))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_500_steps_end_in_the_same_bytes(tmp_path, world):
    spawn(train_long, world, tmp_path)
    found = json.loads((tmp_path / "long-0.json").read_text())
    for optimizer in ("rowwise_adagrad", "sgd"):
        ddr, ssd = (trained(found[f"{tier} {optimizer}"]) for tier in ("ddr", "ssd"))
        assert ddr == ssd and ddr["steps"] == LONG
    assert len({str(outcome) for outcome in found.values()}) > 2
