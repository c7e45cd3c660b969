"""A training that a guard stops leaves no thread that writes a checkpoint: a process cannot end well beside one."""

import threading
from pathlib import Path

from pipeline.checkpoint import save
from pipeline.checkpoint.async_save import AsyncSave
from pipeline.cli import main
from tests.alone import alone
from tests.waits import PATIENCE

SETTINGS = [
    "run=e",
    "stages=[ingest,plan,partition,train]",
    "data.synthetic.rows=3000",
    "data.synthetic.ids_per_feature=60",
    "train.global_batch=256",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "model.embedding_dim=8",
    "launch.inline=[ingest,plan,partition,train,evaluate]",
    "train.threads_per_rank=1",
    "train.log_every_steps=2",
    "checkpoint.every_steps=6",
    "checkpoint.grace_seconds=600",
    "train.guard.min_logit_std=1e9",
    "train.guard.collapse_after_steps=7",
    "train.guard.window_steps=2",
]


@alone
def test_a_guard_that_stops_a_training_waits_for_the_checkpoint_in_flight(tmp_path: Path) -> None:
    # It waits for ``grace_seconds`` at most, for a thread that takes what other programs leave of the cores: on a busy
    # machine that is long. The disk is slow until somebody waits for it: a training that ends finds it writing.
    written, abandon, waits = save._write_dense, AsyncSave.abandon, threading.Event()

    def slow(*arguments):
        assert waits.wait(PATIENCE)
        return written(*arguments)

    def abandoned(flight, seconds):
        waits.set()
        abandon(flight, seconds)

    save._write_dense, AsyncSave.abandon = slow, abandoned  # of this process, which ends with the test
    assert main(["run", f"store={tmp_path}/store", *SETTINGS]) == 5
    assert "nightjar-checkpoint" not in {thread.name for thread in threading.enumerate()}
    assert list((tmp_path / "store/runs/e/checkpoints").glob("*/step-00000006/manifest.json"))
