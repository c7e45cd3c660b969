"""Checkpoints built from given rows, without a model and without ranks, and the tables they stand for."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import torch

from pipeline.checkpoint.chunks import RowBlock, TableCoding
from pipeline.checkpoint.quantise import Coding
from pipeline.checkpoint.reader import RestoreTarget, restore
from pipeline.checkpoint.save import Job, write_checkpoint
from pipeline.checkpoint.train_state import TrainState
from pipeline.config import Config, DataConfig, SparseFeature, TrainConfig
from pipeline.embeddings.row_access import LocalShard
from pipeline.embeddings.tables import TableSpec
from pipeline.models.settings import DlrmConfig
from pipeline.store import Store

ROWS = {"a": 50, "b/c": 37, "long": 900}
DIM = 12
DIRECTORY = "runs/r/checkpoints/0123456789"
FP32 = TableCoding("fp32")


def config(**checkpoint):
    sparse = {name: SparseFeature() for name in ROWS}
    data = DataConfig(name="d", format="synthetic", sparse=sparse)
    made = Config(data=data, model=DlrmConfig(), train=TrainConfig(global_batch=4096))  # what is recorded is settled
    return dataclasses.replace(made, checkpoint=dataclasses.replace(made.checkpoint, **checkpoint))


def values(step, rows=ROWS, dim=DIM):
    """What all rows are after ``step`` (if all of them changed): weights and sums by table."""
    generator = torch.Generator().manual_seed(step)
    return {
        name: (torch.randn(count, dim, generator=generator) * 0.1, torch.rand(count, generator=generator))
        for name, count in rows.items()
    }


def blocks(step, share, cuts=(0, DIM), rows=ROWS):
    """Rows changed in ``step``: every one, or a ``share`` of them picked at random; columns cut at ``cuts``."""
    picker = np.random.default_rng(step)
    made = []
    for name, (weight, sums) in values(step, rows).items():
        ids = np.arange(len(weight)) if share == 1 else np.flatnonzero(picker.random(len(weight)) < share)
        for left, right in zip(cuts, cuts[1:], strict=False):
            part = torch.from_numpy(ids)
            made.append(
                RowBlock(name, ids, left, weight[part, left:right].contiguous(), {"adagrad_sum": sums[part] + left})
            )
    return made


def put(store, step, parents=(), share=1.0, coding=FP32, cuts=(0, DIM), rows=ROWS, directory=DIRECTORY, **more):
    """Commit a checkpoint; ``coding`` for all tables."""
    generator = torch.Generator().manual_seed(1000 + step)
    dense = {
        "param/head.weight": torch.randn(3, 4, generator=generator),
        "param/head.bias": torch.full((3,), 1.0 * step),
    }
    train = TrainState(step=step, samples=10 * step, next_batch=step, order=more.pop("order", {})).to_json()
    state = {"train": train, "optimizer": None}
    made = dataclasses.asdict(config(**more.pop("checkpoint", {})))
    job = Job(
        path=f"{directory}/step-{step:08d}",
        key=more.pop("key", "k" * 32),
        config=more.pop("config", made),
        inputs={"dataset": "d" * 32},
        blocks=blocks(step, share, cuts, rows),
        coding=lambda block: coding,
        dense=dense,
        state=state,
        tables={name: {"rows": count, "dim": DIM} for name, count in rows.items()},
        summary={
            "step": step,
            "samples": 10 * step,
            "type": "difference" if parents else "baseline",
            "parents": [f"step-{p:08d}" for p in parents],
            "policy": "x",
            "restores": 0,
            "bytes_full": 100_000,
        },
        chunk_bytes=2048,
    )
    return write_checkpoint(store, job, None, lambda phase: None)


CODINGS = {
    "fp32": FP32,
    "fp16": TableCoding("fp16", "bf16"),
    "q8": TableCoding(Coding(8)),
    "q6": TableCoding(Coding(6), "bf16"),
    "q4": TableCoding(Coding(4, 25, 0.6), "bf16"),
    "q3": TableCoding(Coding(3, 10, 0.5)),
    "q2": TableCoding(Coding(2, 10, 0.3), "fp32", compress=False),
    "q2+q3+q4+q6+q8": TableCoding(
        Coding(4),
        "bf16",
        heat="adagrad_sum",
        levels=((0.0, Coding(2, 0, 0.0, 2)), (0.3, Coding(3)), (0.6, Coding(4)), (0.8, Coding(6)), (0.95, Coding(8))),
    ),
    "q4+q8": TableCoding(Coding(4, 0, 0.0, 2), hot=0.1, heat="adagrad_sum"),
}


def new_store(folder):
    return Store(str(folder / "store"))


def quantised_chain(folder):
    """A store with a baseline in 8 bits and two deltas to it in 4."""
    store = new_store(folder)
    put(store, 1, coding=CODINGS["q8"])
    put(store, 2, [1], 0.2, CODINGS["q4"])
    put(store, 3, [1], 0.4, CODINGS["q4"])
    return store


def model(cuts=(0, DIM), rows=ROWS, dim=DIM, fill=0.0):
    """Something to restore into, with shards cut by columns at ``cuts``; the whole tables alias the shards."""
    shards, tables = [], {}
    for name, count in rows.items():
        for left, right in zip(cuts, cuts[1:], strict=False):
            weight, sums = torch.full((count, right - left), fill), torch.full((count,), fill)
            shards.append(LocalShard(name, 0, count, left, right - left, True, weight, {"adagrad_sum": sums}))
        tables[name] = TableSpec(name, count, dim)
    return SimpleNamespace(tables=tables, local_shards=lambda: shards)


def dense():
    return {"head.weight": torch.zeros(3, 4), "head.bias": torch.zeros(3)}


def restored(store, artifact, cuts=(0, DIM)):
    """All shards' weights and sums after a restore."""
    rows = model(cuts)
    restore(store, artifact, RestoreTarget(rows, dense()))
    return [(s.table, s.column, s.weight, s.state["adagrad_sum"]) for s in rows.local_shards()]


def same(one, two):
    for (name, column, w1, s1), (name2, column2, w2, s2) in zip(one, two, strict=True):
        assert (name, column) == (name2, column2)
        assert torch.equal(w1, w2), name
        assert torch.equal(s1, s2), name
