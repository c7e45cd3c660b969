"""Real two-rank runs that are told to stop or lose a rank: what they save, say and exit with, and how they go on."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pipeline.config.compose import compose
from pipeline.launch.appdefs import stage_app
from pipeline.launch.forkserver import RANK
from pipeline.launch.stage_logs import killed_rank
from tests.launch.launchers import descendants_named, launched
from tests.waits import PATIENCE

ROOT = Path(__file__).parents[2]
SETTINGS = [
    "data.synthetic.rows=12000",
    "data.synthetic.ids_per_feature=200",
    "model.embedding_dim=8",
    "model.bottom_mlp=[32]",
    "model.top_mlp=[32]",
    "train.global_batch=512",
    "train.epochs=10000",
    "train.guard.collapse=false",
    "train.precision=fp32",
    "train.log_every_steps=2",
    "train.threads_per_rank=1",
    "hardware.ranks_per_host=2",
    "checkpoint.every_steps=20",
    "checkpoint.quantise=fp32",
    "checkpoint.grace_seconds=3600",
    # With which steps are the same whatever the length: a long training is compiled where measured times say it pays.
    "train.schedule=constant",
    "train.warmup_steps=5",
    "train.compile=false",
    "stages=[ingest,plan,partition,train]",
]


def start(store: Path, run: str, *more: str) -> subprocess.Popen:
    """Start a training that does not end by itself before somebody stops it, unless ``more`` says so."""
    return launched([sys.executable, "-m", "pipeline.cli", "run", *SETTINGS, f"run={run}", f"store={store}", *more])


def wait_for_steps(launcher: subprocess.Popen, lines: int) -> str:
    """What the launcher printed until it had printed so many lines of progress."""
    text = ""
    for line in launcher.stdout:
        text += line
        if len(re.findall(r"^step ", text, re.M)) >= lines:
            return text
    raise AssertionError(f"too few training steps were told: {text}")


def rank_of(launcher: subprocess.Popen, rank: int) -> psutil.Process:
    (found,) = descendants_named(f"{RANK}{rank}", launcher.pid)
    return found


def tensors(store: Path, run: str) -> dict[str, bytes]:
    """The files of the final checkpoint that hold tensors."""
    (folder,) = (store / "runs" / run / "checkpoints").iterdir()
    last = sorted(folder.glob("step-*/manifest.json"))[-1].parent
    return {str(path.relative_to(last)): path.read_bytes() for path in last.rglob("*.safetensors")}


@pytest.mark.slow
def test_stopped_and_bereaved_runs_go_on_and_end_bit_for_bit_alike(tmp_path: Path) -> None:
    # A rank is killed: the others stop, long before their grace time is over, and the error names it.
    launcher = start(tmp_path, "stormy")
    output = wait_for_steps(launcher, 5)
    while not list(tmp_path.glob("runs/stormy/checkpoints/*/*/manifest.json")):
        line = launcher.stdout.readline()
        assert line, output  # or it has ended
        output += line
    victim, peer = rank_of(launcher, 1), rank_of(launcher, 0)
    os.kill(victim.pid, signal.SIGKILL)
    output += launcher.communicate(timeout=PATIENCE)[0]
    assert launcher.returncode == 8, output
    assert "the train stage failed: rank 1 was killed by signal 9" in output
    assert "Traceback" not in output
    assert not peer.is_running()

    # The launcher is told to stop: an emergency checkpoint, the signal's exit code, and its name.
    launcher = start(tmp_path, "stormy")
    output = wait_for_steps(launcher, 5)
    launcher.send_signal(signal.SIGTERM)
    output += launcher.communicate(timeout=PATIENCE)[0]
    assert launcher.returncode == 143, output
    assert re.search(r"resumed from runs/stormy/checkpoints/\w+/step-\d+ after step", output)
    found = re.search(r"stopped on SIGTERM after step (\d+); its checkpoint (\S+) is committed", output)
    assert found, output
    assert found[2].endswith(f"step-{int(found[1]):08d}")
    assert (tmp_path / found[2] / "manifest.json").is_file()

    # Ctrl-C keeps its own exit code, and one rank alone that is told to stop stops all.
    launcher = start(tmp_path, "stormy")
    output = wait_for_steps(launcher, 5)
    launcher.send_signal(signal.SIGINT)
    output += launcher.communicate(timeout=PATIENCE)[0]
    assert launcher.returncode == 130, output
    assert f"resumed from {found[2]}" in output
    assert re.search(r"stopped by SIGINT; .*its checkpoint \S+ is committed", output), output

    launcher = start(tmp_path, "stormy")
    output = wait_for_steps(launcher, 5)
    os.kill(rank_of(launcher, 1).pid, signal.SIGTERM)
    output += launcher.communicate(timeout=PATIENCE)[0]
    assert launcher.returncode == 8, output
    found = re.search(r"step-(\d+) is committed", output)
    assert found, output

    end = f"train.max_steps={int(found[1]) + 10}"
    for run in ("stormy", "calm"):
        launcher = start(tmp_path, run, end)
        output = launcher.communicate(timeout=PATIENCE)[0]
        assert launcher.returncode == 0, output
        assert ("resumed from" in output) == (run == "stormy")
    assert tensors(tmp_path, "stormy") == tensors(tmp_path, "calm")


def test_torchrun_gives_ranks_the_grace_time() -> None:
    config = compose(["run=x", "checkpoint.grace_seconds=61.5"])
    assert "--shutdown-timeout 67" in " ".join(stage_app("train", config, "/s/runs/x/config.yaml").roles[0].args)
    assert "--shutdown-timeout 5" in " ".join(stage_app("ingest", config, "/s/runs/x/config.yaml").roles[0].args)


def test_the_killed_rank_is_the_cause_not_those_it_took_along() -> None:
    account = """
[1]:
  time      : 2026
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 10)
[2]:
  rank      : 2 (local_rank: 2)
  exitcode  : -15 (pid: 12)
Root Cause (first observed failure):
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 11)
"""
    assert killed_rank(account) == (1, 9)
    assert killed_rank(account.replace("-9", "1")) is None
