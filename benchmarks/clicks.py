"""Generated clicks with a known truth, and the model the benchmarks train on them: 26 tables of 20,000 rows, D 16."""

from __future__ import annotations

from typing import BinaryIO

import numpy as np
import pyarrow as pa

from pipeline.config import Config, DataConfig, HardwareConfig, IngestConfig, TrainConfig
from pipeline.ingest.output import rows_writer
from pipeline.models.settings import DlrmConfig
from pipeline.records import DatasetSchema, Plan, ShardPlan, SparseColumn, TablePlan
from pipeline.store import Artifact, Store

TABLES, TABLE_ROWS, DENSE, GROUP = 26, 20_000, 13, 65_536


def config_of(threads: int | None = None) -> Config:
    """One rank, global batch 8192."""
    return Config(
        data=DataConfig(name="bench", format="synthetic"),
        hardware=HardwareConfig(name="bench"),
        model=DlrmConfig(),
        train=TrainConfig(global_batch=8192, warmup_steps=20, schedule="constant", threads_per_rank=threads),
    )


def plan_of(schema: DatasetSchema) -> Plan:
    """Every table whole on the one rank."""
    tables = {
        column.name: TablePlan(
            rows=column.rows,
            dim=16,
            pooling=1.0,
            tier="ddr",
            sharding="table_wise",
            kernel="fused",
            cost_ms=0.0,
            shards=(ShardPlan(rank=0, row=0, rows=column.rows, column=0, columns=16),),
            reason="",
        )
        for column in schema.sparse
    }
    return Plan(hardware="bench", device="cpu", world_size=1, ranks_per_host=1, global_batch=8192, tables=tables)


def generate(store: Store, train: int, test: int, group: int = GROUP) -> Artifact:
    """Zipf ids, normal dense values and a logistic truth with first-order and pairwise effects.

    ``group``: rows of a row group.
    """
    rng = np.random.default_rng(7)
    truth = {
        "first": rng.normal(0, 0.35, (TABLES, TABLE_ROWS)).astype(np.float32),
        "pair": rng.normal(0, 0.6, (TABLES, TABLE_ROWS)).astype(np.float32),
        "dense": rng.normal(0, 0.2, DENSE).astype(np.float32),
    }
    schema = DatasetSchema(
        dense=tuple(f"I{i + 1}" for i in range(DENSE)),
        sparse=tuple(SparseColumn(name=f"C{i + 1}", rows=TABLE_ROWS) for i in range(TABLES)),
        rows={"train": train, "test": test},
        files={name: [f"{name}/part-00000.parquet"] for name in ("train", "test")},
        groups={
            name: [[min(group, rows - at) for at in range(0, rows, group)]]
            for name, rows in (("train", train), ("test", test))
        },
    )
    with store.draft("data", kind="ingest", key="bench", config={}, inputs={}) as draft:
        for name, rows in schema.rows.items():
            with draft.open(schema.files[name][0]) as sink:
                _write(sink, schema, rows, truth, rng, group)
        draft.write_json("schema.json", schema.to_json())
        return draft.commit({})


def _write(
    sink: BinaryIO, schema: DatasetSchema, rows: int, truth: dict[str, np.ndarray], rng: np.random.Generator, group: int
) -> None:
    names = ["label", *schema.dense, *(column.name for column in schema.sparse)]
    writer = None
    for start in range(0, rows, group):
        count = min(group, rows - start)
        dense = rng.normal(size=(DENSE, count)).astype(np.float32)
        ids = np.minimum((TABLE_ROWS ** rng.random((TABLES, count)) - 1).astype(np.int32), TABLE_ROWS - 1)
        logit = truth["dense"] @ dense - 1.0
        for table in range(TABLES):
            logit += truth["first"][table][ids[table]]
            if table % 2:
                logit += truth["pair"][table][ids[table]] * truth["pair"][table - 1][ids[table - 1]]
        label = (rng.random(count) < 1 / (1 + np.exp(-logit))).astype(np.float32)
        columns = [pa.array(column) for column in (label, *dense, *ids)]
        fields = [pa.field(name, column.type, nullable=False) for name, column in zip(names, columns, strict=True)]
        block = pa.table(columns, schema=pa.schema(fields))
        writer = writer or rows_writer(sink, block.schema, IngestConfig().compression)
        writer.write_table(block, row_group_size=group)
    if writer is not None:
        writer.close()
