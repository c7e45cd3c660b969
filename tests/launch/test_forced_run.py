"""A forced training that dies: its further attempt goes on from its own checkpoints, a version's stays as it was."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.checkpoint.index import committed
from pipeline.launch.forkserver import RANK
from pipeline.store import Store
from tests.commands import nightjar
from tests.conftest import ROOT
from tests.launch.launchers import descendants_named
from tests.launch.test_launched import environment
from tests.waits import PATIENCE, until

# A rank stands still once its first checkpoint is committed, and no later one does.
HANGING = """
import sys

if "fork-server" in sys.orig_argv:
    import signal
    from contextlib import contextmanager
    from pathlib import Path

    from pipeline.stages import execution

    first_step_in_time, mark = execution.first_step_in_time, Path("{mark}")

    @contextmanager
    def hanging(minutes, fail):
        with first_step_in_time(minutes, fail) as passed:

            def hang_once(point):
                passed(point)
                if point == "after commit" and not mark.exists():
                    mark.touch()
                    while True:
                        signal.pause()

            yield hang_once

    execution.first_step_in_time = hanging
"""
SETTINGS = [
    "run=f",
    "data.synthetic.rows=6000",
    "data.synthetic.ids_per_feature=60",
    "train.global_batch=64",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "model.embedding_dim=8",
    "train.threads_per_rank=1",
    "launch.inline=[ingest,plan,partition,evaluate]",
    "launch.attempts=2",
    "launch.limit_memory=never",
    "stages=[ingest,plan,partition,train]",
]


def command(store: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "pipeline.cli", "run", f"store={store}", *SETTINGS, *more]


def kill_rank(launcher: subprocess.Popen) -> None:
    """Kill the rank of the launcher's stage."""
    for rank in descendants_named(RANK, launcher.pid):
        rank.kill()


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
    env = environment(tmp_path, HANGING.format(mark=tmp_path / "hangs"))
    launcher = subprocess.Popen(again, cwd=ROOT, stdout=out, stderr=out, env=env)
    try:
        until(lambda: (tmp_path / "hangs").exists() or launcher.poll() is not None)
        kill_rank(launcher)
        assert launcher.wait(PATIENCE) == 0, (tmp_path / "out").read_text()
    finally:
        launcher.kill()
    said = (tmp_path / "out").read_text()
    assert "attempt 1 of 2" in said  # the attempt before it left a checkpoint
    assert re.search(rf"resumed from {directory}\.2/step-\d+ after step \d+", said)
    store.verify(store.get(final.path, "train"))
    (train,) = store.names("runs/f/train")
    assert store.get(f"runs/f/train/{train}", "train").summary["final"].startswith(f"{directory}.2/step-")
