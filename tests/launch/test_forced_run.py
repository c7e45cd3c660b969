"""A forced training that dies: its further attempt goes on from its own checkpoints, a version's stays as it was."""

import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.checkpoint.index import committed
from pipeline.launch.forkserver import RANK
from pipeline.store import Store
from tests.commands import nightjar
from tests.conftest import ROOT

SETTINGS = [
    "run=f", "data.synthetic.rows=6000", "data.synthetic.ids_per_feature=60", "train.global_batch=64",
    "model.bottom_mlp=[16]", "model.top_mlp=[16]", "model.embedding_dim=8", "train.threads_per_rank=1",
    "launch.inline=[ingest,plan,partition,evaluate]", "launch.attempts=2", "launch.limit_memory=never",
    "stages=[ingest,plan,partition,train]",
]  # fmt: skip


def command(store: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "pipeline.cli", "run", f"store={store}", *SETTINGS, *more]


def kill_rank(launcher: subprocess.Popen) -> None:
    """Kill the rank of the launcher's stage."""
    for child in psutil.Process(launcher.pid).children(recursive=True):
        if child.name() == RANK:
            child.kill()


@pytest.mark.slow
def test_a_further_attempt_of_a_forced_training_goes_on_from_its_own_checkpoints(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    done = nightjar("run", f"store={tmp_path}/store", *SETTINGS)
    assert done.returncode == 0, done.stderr
    (directory,) = [f"runs/f/checkpoints/{name}" for name in store.names("runs/f/checkpoints")]
    (final,) = committed(store, directory)
    with store.draft("models/m/v1", kind="publish", key="v", config={}, inputs={"checkpoint": final.path}) as draft:
        draft.commit({})

    out = (tmp_path / "out").open("w")
    again = command(tmp_path / "store", "force=true", "stages=[train]", "checkpoint.every_steps=10")
    launcher = subprocess.Popen(again, cwd=ROOT, stdout=out, stderr=out)
    while not list((tmp_path / "store/runs/f/checkpoints").glob("*.2/step-*/manifest.json")):
        assert launcher.poll() is None, (tmp_path / "out").read_text()
        time.sleep(0.02)
    kill_rank(launcher)
    assert launcher.wait() == 0, (tmp_path / "out").read_text()
    said = (tmp_path / "out").read_text()
    assert "attempt 1 of 2" in said  # the attempt before it left a checkpoint
    assert re.search(rf"resumed from {directory}\.2/step-\d+ after step \d+", said)
    store.verify(store.get(final.path, "train"))
    (train,) = store.names("runs/f/train")
    assert store.get(f"runs/f/train/{train}", "train").summary["final"].startswith(f"{directory}.2/step-")
