"""The same bytes make the same model: where a log lies and when it was written decide nothing that is trained."""

import datetime
import json
import os
import shutil
from pathlib import Path

import pytest

from pipeline.checkpoint.reference import find_checkpoint
from pipeline.config.compose import compose
from pipeline.ingest.synthetic import write_tsv
from pipeline.store import Store
from tests.commands import nightjar_in_turn
from tests.tiers import with_slow
from tests.training import test_sequences

STAGES = "[ingest,plan,partition,train,evaluate]"
SMALL = [
    "store=store",
    f"stages={STAGES}",
    f"launch.inline={STAGES}",
    "model=dlrm_small",
    "model.embedding_dim=8",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "ingest.rows_per_group=256",
    "train.global_batch=200",
    "train.max_steps=12",
    "train.warmup_steps=auto",
    "train.precision=fp32",
    "train.threads_per_rank=1",
    "train.guard.collapse=false",
    "checkpoint.final_quantise=fp32",
]
# A Monday morning and, two years later, a Saturday night, in another folder, where the path is absolute.
PLACES = {"here": datetime.datetime(2024, 1, 1, 8, 30), "elsewhere/there": datetime.datetime(2026, 1, 3, 23, 59)}
NAMES = {"here": "log", "elsewhere/there": "a copy"}


def write_adult(folder: Path, name: str, real_data: Path) -> list[str]:
    shutil.copy(real_data / "adult.data", folder / name)
    return ["experiment=adult"]


def write_demo(folder: Path, name: str) -> list[str]:
    """The demo's log as the file of text that users have."""
    config = compose(["experiment=demo", "data.synthetic.rows=4000"])
    write_tsv(config.data.synthetic, config.seed, str(folder / name))
    return ["data=criteo", "seed=5"]


def write_histories(folder: Path, name: str) -> list[str]:
    test_sequences.write_log(folder)
    (folder / "log.parquet").rename(folder / name)
    return ["-cd", "my", "data=clicks", "+model.sequences.searches={block: sasrec}"]


def trained(folder: Path, arguments: list[str], written: datetime.datetime) -> tuple[dict, dict, dict]:
    """Checksums of the dataset's and the last checkpoint's files, and the figures of the evaluation."""
    for path in folder.rglob("*"):
        os.utime(path, (written.timestamp(), written.timestamp()))
    (done,) = nightjar_in_turn([["run", *arguments, *SMALL, "run=r"]], cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    store = Store(str(folder / "store"))
    result = json.loads((folder / "store/runs/r/result.json").read_text())
    dataset = store.get(result["stages"]["ingest"]["artifact"], "ingest")
    checkpoint = find_checkpoint(store, "r")
    files = {name: entry.checksum for name, entry in checkpoint.files.items()}
    sums = {name: entry.checksum for name, entry in dataset.files.items() if name != "sources.json"}  # where logs lay
    return sums, files, result["eval"]


@pytest.mark.parametrize("log", with_slow(("adult", "demo", "histories"), ("histories",)))
def test_another_folder_and_time_of_writing_change_no_bit(log: str, tmp_path: Path, request) -> None:
    made = []
    suffix = {"adult": ".data", "demo": ".tsv", "histories": ".parquet"}[log]
    for place, written in PLACES.items():
        folder, name = tmp_path / place, NAMES[place] + suffix
        folder.mkdir(parents=True)
        if log == "adult":
            arguments = write_adult(folder, name, request.getfixturevalue("real_data"))
        else:
            arguments = write_demo(folder, name) if log == "demo" else write_histories(folder, name)
        path = name if place == "here" else folder / name
        made.append(trained(folder, [*arguments, f"data.path='{path}'"], written))
    (here, checkpoint, figures), (there, other_checkpoint, other_figures) = made
    assert here == there
    assert checkpoint == other_checkpoint
    assert figures == other_figures
