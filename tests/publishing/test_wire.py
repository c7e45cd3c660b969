"""What ranks that score side by side tell each other arrives as it was sent."""

import dataclasses
import socket

import numpy as np
import polars as pl
import pytest

from pipeline.ingest.file_source import PartitionBlock
from pipeline.ingest.formats.json_lines import JsonBlock, Several
from pipeline.ingest.sources import RawBlock, TextBlock
from pipeline.ingest.text import TextLayout
from pipeline.ingest.values import Reject
from pipeline.serving import ipc
from pipeline.serving.scorer import ScoredBlock
from pipeline.serving.scoring_processes import Effort

TEXT = TextBlock(
    data=b"1,a\n2,b\n",
    file="x.csv",
    first_line=7,
    columns=("b", "a"),
    place="p",
    layout=TextLayout(names=("a", "b"), separator=",", quote='"', numbers=frozenset({"a"})),
)
JSON = JsonBlock(
    data=b'{"a": 1, "b": [2]}\n',
    file="x.jsonl",
    first_line=3,
    columns=("a", "b"),
    lists={"b": Several("|", maps=True, weight_separator=":")},
)
RAW = RawBlock(
    frame=pl.DataFrame({"a": [1.5, None], "b": ["x", "y"]}),
    file="x.orc",
    lines=np.array([4, 9]),
    place="p",
    rejects=[Reject(5, "kind", "reason", "a")],
)
BLOCKS = [TEXT, JSON, RAW, PartitionBlock(block=TEXT, values={"c": None, "d": "1"}, columns=["a", "c", "d"])]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: type(block).__name__)
def test_a_block_is_read_alike_on_the_other_side(block) -> None:
    here, there = socket.socketpair()
    ipc.Channel(here).send(*ipc.block_message(block))
    moved = ipc.block_of(*ipc.Channel(there).receive())
    found, known = moved.read(), block.read()
    assert type(moved) is type(block)
    assert found.frame.equals(known.frame) and found.frame.schema == known.frame.schema
    assert (found.file, found.place, found.rejects) == (known.file, known.place, known.rejects)
    assert np.array_equal(found.lines, known.lines)


@pytest.mark.parametrize("tasks", [0, 1, 3])
def test_scores_keep_their_bits_and_shapes(tasks: int) -> None:
    rng = np.random.default_rng(tasks)
    logits = rng.normal(size=(5, tasks) if tasks else 5).astype(np.float32)
    labels = {"click": np.array([0, 1, np.nan, 1, 0], np.float32)} if tasks else {}
    weights = rng.random(5).astype(np.float32) if tasks == 1 else None
    known = ScoredBlock("f", np.arange(3, 8), logits, labels, weights, [Reject(1, "k", "r")])
    found = ipc.scored_of(*ipc.scored_message(known))
    for one, other in zip(dataclasses.astuple(known), dataclasses.astuple(found), strict=True):
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    assert (found.file, found.rejects, found.weights is None) == ("f", known.rejects, weights is None)
    assert {n: v.tobytes() for n, v in found.labels.items()} == {n: v.tobytes() for n, v in labels.items()}


def test_the_other_end_that_goes_is_noticed() -> None:
    here, there = socket.socketpair()
    here.sendall(b"123")
    here.close()
    with pytest.raises(EOFError):
        ipc.Channel(there).receive()


def test_ranks_are_started_where_what_is_left_takes_longer_than_their_start(monkeypatch) -> None:
    monkeypatch.setattr("pipeline.serving.scoring_processes.available_cpus", lambda: 4)
    monkeypatch.setattr("pipeline.serving.scoring_processes.own_memory", lambda: 10)
    monkeypatch.setattr("pipeline.serving.scoring_processes.spare_memory", lambda: 100)
    log = Effort(None, 1000, 10)
    assert log.ranks(10, seconds=1.0, start=5.0) == 4, "99 seconds are left"
    assert log.ranks(10, seconds=1.0, start=80.0) == 1, "three quarters of them are saved at most"
    assert log.ranks(500, seconds=1.0, start=0.4) == 2, "one more block keeps no more busy"
    monkeypatch.setattr("pipeline.serving.scoring_processes.spare_memory", lambda: 10)
    assert log.ranks(10, seconds=1.0, start=5.0) == 2, "each has a memory of its own"
    assert Effort(3, 1000, 10).ranks(1000, seconds=0.0, start=9.0) == 3, "as asked for"
