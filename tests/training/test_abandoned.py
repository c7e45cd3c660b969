"""A training that a guard stops leaves no thread that writes a checkpoint: a process cannot end well beside one."""

import json
import multiprocessing
import threading
from pathlib import Path

import tests.embeddings.ranks  # noqa: F401 (it says what the fork server imports)
from pipeline.checkpoint import job
from pipeline.checkpoint.flight import Flight
from pipeline.cli import main
from tests.waits import PATIENCE

SETTINGS = [
    "run=e", "stages=[ingest,plan,partition,train]", "data.synthetic.rows=3000", "data.synthetic.ids_per_feature=60",
    "train.global_batch=256", "model.bottom_mlp=[16]", "model.top_mlp=[16]", "model.embedding_dim=8",
    "launch.inline=[ingest,plan,partition,train,evaluate]", "train.threads_per_rank=1", "train.log_every_steps=2",
    "checkpoint.every_steps=6", "checkpoint.grace_seconds=600", "train.guard.min_logit_std=1e9",
    "train.guard.collapse_after_steps=7", "train.guard.window_steps=2",
]  # fmt: skip


def stopped_by_a_guard(folder: Path) -> None:
    """Train beside a disk that is slow until somebody waits for it: a training that ends finds it writing."""
    written, abandon, waits = job._write_dense, Flight.abandon, threading.Event()

    def slow(*arguments):
        assert waits.wait(PATIENCE)
        return written(*arguments)

    def abandoned(flight, seconds):
        waits.set()
        abandon(flight, seconds)

    job._write_dense, Flight.abandon = slow, abandoned
    code = main(["run", f"store={folder}/store", *SETTINGS])
    writing = any(thread.name == "nightjar-checkpoint" for thread in threading.enumerate())
    (folder / "ended").write_text(json.dumps([code, writing]))


def test_a_guard_that_stops_a_training_waits_for_the_checkpoint_in_flight(tmp_path: Path) -> None:
    # It waits for ``grace_seconds`` at most, for a thread that takes what other programs leave of the cores: on a busy
    # machine that is long.
    process = multiprocessing.get_context("forkserver").Process(target=stopped_by_a_guard, args=(tmp_path,))
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 0
    assert json.loads((tmp_path / "ended").read_text()) == [5, False]
    assert list((tmp_path / "store/runs/e/checkpoints").glob("*/step-00000006/manifest.json"))
