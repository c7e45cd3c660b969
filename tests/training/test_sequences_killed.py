"""Histories from a log, night by night, with processes that are killed in ingestion and in training: the same bits."""

import json
import random
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.reader import ChainReader
from pipeline.store import Store
from tests.commands import kill_nightjar, nightjar_in_turn

pytestmark = pytest.mark.slow
SCHEMA = """
defaults: [csv]
name: clicks
path: "logs/{day}.csv"
label: {column: clicked}
timestamp: time
sparse:
  user: {rows: 64}
  item: {rows: 100}
  category: {rows: 16}
sequences:
  seen:
    max_length: 6
    target: item
    age_bins: 16
    features:
      item: {table: item}
      category: {table: category}
    history: {by: user, days: 2}
"""
DAYS = ["2026-01-01", "2026-01-02"]
BASE = [
    "run",
    "-cd",
    "my",
    "data=clicks",
    "model=mlp_small",
    "model.embedding_dim=8",
    "model.top_mlp=[16]",
    "train.global_batch=100",
    "train.threads_per_rank=1",
    "train.precision=fp32",
    "train.epochs=2",
    "train.guard.collapse=false",
    "+model.sequences.seen={block: hstu, options: {layers: 2, ages: true}}",
    "checkpoint.every_steps=3",
    "checkpoint.quantise=fp32",
    "checkpoint.final_quantise=fp32",
    "checkpoint.state=fp32",
    "hardware=laptop",
    "launch.inline=[ingest,plan,partition,train]",
    "stages=[ingest,plan,partition,train]",
    "data.checks.hold={}",
]
BUILD, WRITE, STEP = (
    "pipeline.ingest.histories:HistoryBuilder.build",
    "pipeline.ingest.output:PartWriter.add",
    "pipeline.training.step:StepExecutor.step",
)


def write_logs(folder: Path) -> None:
    """Two days of few users; the second day has items that the first did not."""
    chance = random.Random(3)
    (folder / "logs").mkdir(parents=True)
    (folder / "my" / "data").mkdir(parents=True)
    (folder / "my" / "data" / "clicks.yaml").write_text(SCHEMA)
    for number, day in enumerate(DAYS):
        lines = ["time,user,item,category,clicked"]
        for row in range(1200):
            item = chance.randrange(30 + 20 * number)
            time = f"{day} {row // 60:02}:{row % 60:02}:00"
            lines.append(f"{time},u{chance.randrange(25)},i{item},c{item % 4},{int(chance.random() < 0.3)}")
        (folder / "logs" / f"{day}.csv").write_text("\n".join(lines) + "\n")


def day_of(store: Path, number: int) -> list[str]:
    """The command of a day, which goes on from the one before."""
    command = [*BASE, f"store={store}", f"run=d{number}", f"data.day={DAYS[number]}"]
    if number:
        (before,) = (store / "datasets/clicks" / DAYS[number - 1]).iterdir()
        command += [
            f"checkpoint.init_from=d{number - 1}",
            f"data.mapping_from=datasets/clicks/{DAYS[number - 1]}/{before.name}",
        ]
    return command


def kill(store: Path, number: int, where: str, count: int) -> None:
    """Begin the day's command in a process that dies at ``where``."""
    kill_nightjar(day_of(store, number), cwd=store.parent, where=where, count=count)


def finish(store: Path, number: int) -> dict:
    (done,) = nightjar_in_turn([day_of(store, number)], cwd=store.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((store / "runs" / f"d{number}" / "result.json").read_text())


def state_of(folder: Path, result: dict) -> tuple[dict[str, str], dict[str, torch.Tensor], str]:
    """The files of the dataset by checksum, the rows of every table, and the checksum of the dense part."""
    store = Store(str(folder))
    paths = {name: stage["artifact"] for name, stage in result["stages"].items()}
    dataset = store.get(paths["ingest"], "ingest")
    final = store.get(store.get(paths["train"], "train").summary["final"], "train")
    reader = ChainReader(store, final)
    rows = {name: torch.cat([window.weight for window in reader.windows(name)]) for name in reader.tables}
    return (
        {name: entry.checksum for name, entry in dataset.files.items() if name.endswith(".parquet")},
        rows,
        final.files["dense.safetensors"].checksum,
    )


def test_killed_nights_with_histories_end_with_the_same_bits(tmp_path):
    """Killed twice a day in ingestion and twice in training, at steps between checkpoints; items are new on day two."""
    quiet, rough = tmp_path / "quiet", tmp_path / "rough"
    write_logs(tmp_path)
    for number in range(2):
        undisturbed = state_of(quiet, finish(quiet, number))
        for where, count in ((BUILD, 1), (WRITE, 1), (STEP, 8), (STEP, 4)):
            kill(rough, number, where, count)
        result = finish(rough, number)
        assert result["train"]["resumed"]["step"] in (3, 6, 9)  # what was committed when the process died
        files, rows, dense = state_of(rough, result)
        assert files == undisturbed[0] and any(name.startswith("histories/") for name in files)
        assert dense == undisturbed[2] and rows.keys() == undisturbed[1].keys()
        assert all(torch.equal(rows[name], each) for name, each in undisturbed[1].items())
        seen = len(rows["item"])
    assert seen > 32, "the second day's items have rows of their own"
