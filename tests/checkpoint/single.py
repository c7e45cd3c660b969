"""Checkpoints of made-up shards in one process, without ranks."""

from types import SimpleNamespace

import torch

from pipeline.checkpoint.chunks import TableCoding
from pipeline.checkpoint.fault_points import ignore
from pipeline.checkpoint.index import name_of
from pipeline.checkpoint.reader import RestoreTarget, restore
from pipeline.checkpoint.row_copies import CopyBuffers, copy_rows
from pipeline.checkpoint.save import Job, write_checkpoint
from pipeline.checkpoint.train_state import TrainState, flatten_optimizer
from pipeline.embeddings.row_access import LocalShard
from pipeline.embeddings.table_optimizers import TableRules
from pipeline.embeddings.tables import TableSpec
from pipeline.specs import TABLE_OPTIMIZERS


def shard(table="t", rows=10, columns=4, row=0, column=0, owner=True):
    weight = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    return LocalShard(table, row, rows, column, columns, owner, weight, {"adagrad_sum": torch.ones(rows)})


def access(*shards):
    """What checkpoint code uses of RowAccess, without ranks."""
    tables = {s.table: TableSpec(s.table, s.rows, s.columns) for s in shards}
    optimizer = TABLE_OPTIMIZERS.get("rowwise_adagrad")
    return SimpleNamespace(tables=tables, local_shards=lambda: list(shards), rules=TableRules(optimizer))


class Picked:
    """What a snapshot uses of TouchedRows: the same row numbers of every shard."""

    def __init__(self, *rows):
        self.rows = list(rows)

    def mask(self, key):
        marks = torch.zeros(1000, dtype=torch.uint8)
        marks[self.rows] = 1
        return marks


def job(path="c/step-00000001", rows=None, dense=None, optimizer=None, state=None, parents=(), picked=None, chunk=160):
    """A job as the checkpointer makes it; a delta of the rows ``picked`` where it has ``parents``."""
    rows, dense, state = rows or access(shard()), dense or {}, state or TrainState(step=int(path[-8:]))
    tensors = {f"param/{name}": value.detach() for name, value in dense.items()}
    record = {"train": state.to_json(), "optimizer": None}
    if optimizer is not None:
        parts, record["optimizer"] = flatten_optimizer(optimizer, dense)
        tensors |= {f"optimizer/{name}": value for name, value in parts.items()}
    if state.rng is not None:
        tensors["rng"] = state.rng
    return Job(
        path=path,
        key="k",
        config={"seed": 1},
        inputs={"dataset": "d"},
        blocks=copy_rows(rows, picked, CopyBuffers()),
        coding=lambda block: TableCoding("fp32"),
        dense=tensors,
        state=record,
        tables={name: {"rows": t.rows, "dim": t.dim} for name, t in rows.tables.items()},
        summary={
            "step": state.step,
            "type": "difference" if parents else "baseline",
            "bytes_full": 1,
            "parents": [name_of(step) for step in parents],
        },
        chunk_bytes=chunk,
    )


def write(store, *args, on_point=ignore, **more):
    return write_checkpoint(store, job(*args, **more), None, on_point)


def read(store, artifact, rows, dense=None, optimizer=None, **more):
    return restore(store, artifact, RestoreTarget(rows, dense or {}, optimizer, **more))
