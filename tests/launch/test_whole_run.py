"""Whole runs, raw logs to figures, on 1 and 2 ranks, forked and under torchrun; stopped ones go on."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pipeline.records import PHASES
from tests.commands import nightjar
from tests.few_features import FEW
from tests.waits import PATIENCE, until

ROOT = Path(__file__).parents[2]
SMALL = [
    *FEW,
    "data.synthetic.rows=12000",
    "data.synthetic.ids_per_feature=200",
    "model.embedding_dim=8",
    "model.bottom_mlp=[32]",
    "train.threads_per_rank=1",
    "model.top_mlp=[32]",
    "train.global_batch=512",
    "train.warmup_steps=5",
    "train.guard.collapse=false",
    "train.precision=fp32",
    "train.log_every_steps=2",
]
ONE, TWO = "hardware.ranks_per_host=1", "hardware.ranks_per_host=2"


def result(store: Path, run: str) -> dict:
    return json.loads((store / "runs" / run / "result.json").read_text())


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """A store with one finished run on each number of ranks."""
    place = tmp_path_factory.mktemp("store")
    for run, ranks in (("one", ONE), ("two", TWO)):
        done = nightjar("run", *SMALL, ranks, f"run={run}", f"store={place}")
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr == ""
    return place


@pytest.mark.slow
def test_a_run_has_every_part_and_leaves_what_it_promises(store: Path) -> None:
    found = result(store, "one")
    assert list(found) == ["run", "status", "stages", "ingest", "plan", "train", "checkpoint", "eval"]
    assert found["train"]["world_size"] == 1
    assert found["eval"]["bayes_ne"] < 1
    names = {path.name for path in (store / "runs" / "one").iterdir()}
    assert {"config.yaml", "metrics.jsonl", "result.json", "report.html", "train", "evaluate", "checkpoints"} <= names


@pytest.mark.slow
def test_one_and_two_ranks_agree(store: Path) -> None:
    one, two = result(store, "one"), result(store, "two")
    assert two["train"]["world_size"] == 2
    first, second = one["stages"]["ingest"], two["stages"]["ingest"]
    assert second == {**first, "status": "skipped", "seconds": 0.0, "started": second["started"]}
    assert second["started"] > first["started"]
    assert two["eval"]["ne"] == pytest.approx(one["eval"]["ne"], rel=1e-6)
    assert two["eval"]["samples"] == one["eval"]["samples"]


@pytest.mark.slow
def test_ranks_under_torchrun_train_the_same_bits_as_forked_ones(store: Path) -> None:
    done = nightjar("run", *SMALL, TWO, "run=under", "launch.torchrun=true", f"store={store}")
    assert done.returncode == 0, done.stderr
    forked, under = tensors(store, "two"), tensors(store, "under")
    assert len(forked) > 2 and forked == under


def tensors(store: Path, run: str) -> dict[str, bytes]:
    """The files of the checkpoints of ``run`` that hold tensors."""
    (place,) = (store / "runs" / run / "checkpoints").iterdir()
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*.safetensors")}


@pytest.mark.slow
@pytest.mark.parametrize("run", ["one", "two"])
def test_measured_phases_and_memory_are_in_result_and_report(store: Path, run: str) -> None:
    train = result(store, run)["train"]
    assert tuple(train["phases"]) == PHASES
    assert min(part["measured_ms"] for part in train["phases"].values()) >= 0
    assert train["step"]["measured_ms"] > 0 < train["memory"]["measured_bytes"]
    page = (store / "runs" / run / "report.html").read_text()
    assert "<h2>Step time and memory, predicted and measured</h2>" in page
    assert f"{train['phases']['dense']['measured_ms']:.3f} ms" in page


KILLED = [
    *SMALL,
    "train.epochs=10000",
    "checkpoint.every_steps=4",
    "stages=[ingest,plan,partition,train]",
    "run=killed",
    "train.compile=false",  # which so long a training tries
]


def committed_steps(store: Path) -> list[int]:
    """The steps of the killed run's checkpoints."""
    found = (store / "runs" / "killed" / "checkpoints").glob("*/step-*/manifest.json")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in found)


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """A store with a training on two ranks whose launcher was killed after a checkpoint."""
    place, temporary = tmp_path_factory.mktemp("killed") / "store", tmp_path_factory.mktemp("temporary")
    launcher = subprocess.Popen(
        [sys.executable, "-m", "pipeline.cli", "run", TWO, *KILLED, f"store={place}"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    try:
        until(lambda: committed_steps(place) or launcher.poll() is not None)
        children = psutil.Process(launcher.pid).children(recursive=True)
    finally:
        launcher.kill()
        launcher.wait()
    psutil.wait_procs(children, timeout=PATIENCE)  # what is copied from now on does not change
    return place


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_launcher_killed_while_training_goes_on_from_its_checkpoint(killed: Path, tmp_path: Path, ranks: int) -> None:
    """With as many ranks, or with other hardware: then the plan is another one, the training the same."""
    store = tmp_path / "store"
    shutil.copytree(killed, store)
    assert not (store / "runs" / "killed" / "result.json").exists()
    end = f"train.max_steps={committed_steps(store)[-1] + 20}"
    done = nightjar("run", *([TWO] if ranks == 2 else []), *KILLED, end, f"store={store}")
    assert done.returncode == 0, done.stderr
    assert ("plan       skipped" in done.stdout) == (ranks == 2)
    first, total = map(int, re.findall(r"^step +(\d+)/(\d+)", done.stdout, re.MULTILINE)[0])
    assert 4 < first < total
    figures = result(store, "killed")["train"]
    assert (figures["steps"], figures["world_size"]) == (total, ranks)
    assert 4 <= figures["resumed"]["step"] < first
    assert f"in all, resumed after step {figures['resumed']['step']}" in done.stdout


@pytest.mark.slow
def test_a_guard_on_two_ranks_is_one_message_with_its_exit_code(store: Path) -> None:
    done = nightjar("run", *SMALL, TWO, "train.lr=1e30", "run=guard", f"store={store}")
    assert done.returncode == 5
    assert "is not finite" in done.stderr
    assert done.stderr.count("nightjar: ") == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert result(store, "guard")["error"]["exit_code"] == 5
