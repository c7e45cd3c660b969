"""The models that speed is measured on: DLRMs of equal tables, plans of whole tables, and rows with a known truth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.config import Config, DataConfig, HardwareConfig, IngestConfig, TrainConfig
from pipeline.ingest.output import rows_writer
from pipeline.models.settings import DlrmConfig
from pipeline.records import DatasetSchema, Plan, ShardPlan, SparseColumn, TablePlan
from pipeline.store import Artifact, Store
from pipeline.training.batches import Batch, BatchReader
from pipeline.training.config_settings import select_model_settings
from pipeline.training.distributed import connect
from pipeline.training.parquet import SplitReader
from pipeline.training.sampler import Order
from pipeline.training.step import StepExecutor

DENSE = 13
TABLES, TABLE_ROWS, DIM, BATCH, GROUP = 26, 20_000, 16, 8192, 65_536  # of the model and rows that ``generate`` makes


def schema_of(tables: int, table_rows: int, **files: Any) -> DatasetSchema:
    """``tables`` tables of ``table_rows`` rows each, and 13 dense features."""
    columns = tuple(SparseColumn(name=f"C{i + 1}", rows=table_rows) for i in range(tables))
    dense = tuple(f"I{i + 1}" for i in range(DENSE))
    return DatasetSchema(dense=dense, sparse=columns, **({"rows": {}, "files": {}, "groups": {}} | files))


def config_of(dim: int = DIM, batch: int = BATCH, ranks: int = 1, threads: int | None = None, **train: Any) -> Config:
    """A run on ``ranks`` ranks of this host; ``train``: more of its settings."""
    settings = {"global_batch": batch, "warmup_steps": 20, "schedule": "constant", "threads_per_rank": threads} | train
    return Config(
        data=DataConfig(name="bench", format="synthetic"),
        hardware=HardwareConfig(name="bench", ranks_per_host=ranks),
        model=DlrmConfig(embedding_dim=dim),
        train=TrainConfig(**settings),
    )


def table_plan(rows: int, dim: int, *shards: ShardPlan, rank: int = 0, **more: Any) -> TablePlan:
    """The plan of a table: in memory and whole on ``rank``, unless its ``shards`` or ``more`` say otherwise."""
    shards = shards or (ShardPlan(rank=rank, row=0, rows=rows, column=0, columns=dim),)
    usual = {"pooling": 1.0, "tier": "ddr", "sharding": "table_wise", "kernel": "fused", "cost_ms": 0.0, "reason": ""}
    return TablePlan(rows=rows, dim=dim, shards=shards, **(usual | more))


def plan_with(
    tables: dict[str, TablePlan], world: int = 1, ranks_per_host: int | None = None, batch: int = BATCH
) -> Plan:
    """A plan for CPUs of these ``tables``."""
    local, common = ranks_per_host or world, {"hardware": "bench", "device": "cpu"}
    return Plan(**common, world_size=world, ranks_per_host=local, global_batch=batch, tables=tables)


def plan_of(schema: DatasetSchema, config: Config, **more: Any) -> Plan:
    """Whole tables, dealt to the ranks in turn."""
    world, dim = config.world_size, config.model.embedding_dim
    tables = {c.name: table_plan(c.rows, dim, rank=i % world, **more) for i, c in enumerate(schema.tables)}
    return plan_with(tables, world, batch=config.train.global_batch)


def trainer_of(config: Config, schema: DatasetSchema, plan: Plan | None = None, **more: Any) -> StepExecutor:
    """A trainer on this process's rank, by ``plan`` or ``plan_of``; it connects the ranks."""
    device = connect(config.hardware, config.train.threads_per_rank)
    return StepExecutor(select_model_settings(config), schema, plan or plan_of(schema, config), device, **more)


@torch.no_grad()
def logits_of(model: torch.nn.Module, split: SplitReader) -> np.ndarray:
    """Of all rows of ``split`` in order; the last output of ``model`` starts with the logits."""
    with BatchReader(split, Order(key="test", seed=0, global_batch=BATCH, shuffle=False)) as reader:
        return torch.cat([model(batch)[1][0].float() for batch in reader]).numpy()[: split.rows]


class ZipfIds:
    """Row numbers drawn with P(row) proportional to (row + 1) ** -exponent, by a table of the inverse distribution."""

    _CELLS = 1 << 20

    def __init__(self, rows: int, exponent: float) -> None:
        self._rows, self._exponent = rows, exponent
        # The row at each cell's start: a draw within a cell of the head is exact, in the tail some rows share a cell.
        starts = np.searchsorted(np.cumsum(self._weights()), np.arange(self._CELLS) / self._CELLS)
        self._starts = starts.astype(np.int32)
        self._spans = np.diff(np.append(self._starts, rows)).astype(np.float32)

    def _weights(self) -> np.ndarray:
        # Float64 of every row; not kept, for benchmarks measure memory.
        weights = np.arange(1, self._rows + 1, dtype=np.float64) ** -self._exponent
        return weights / weights.sum()

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """int32 [count]."""
        cell = rng.integers(0, self._CELLS, count, dtype=np.int32)
        return self._starts[cell] + (rng.random(count, dtype=np.float32) * self._spans[cell]).astype(np.int32)

    def lookups_for(self, share: float) -> int:
        """Lookups until ``share`` of the rows are expected to be touched at least once."""
        weights = self._weights()
        low, high = 1.0, 1e4 * self._rows
        while high / low > 1.001:
            middle = (low * high) ** 0.5
            low, high = (low, middle) if -np.expm1(-middle * weights).mean() > share else (middle, high)
        return int(high)


def batches(schema: DatasetSchema, batch: int, seed: int, ids: ZipfIds) -> Iterator[Batch]:
    """Endless batches: Zipf ids, normal dense values, labels drawn at 25 %."""
    rng, names = np.random.default_rng(seed), [column.name for column in schema.sparse]
    ones = torch.ones(batch)
    lengths = torch.ones(batch * len(names), dtype=torch.int32)
    dense = torch.from_numpy(rng.normal(size=(batch, DENSE)).astype(np.float32))
    labels = (torch.rand(batch, generator=torch.Generator().manual_seed(seed)) < 0.25).float()
    while True:
        drawn = torch.from_numpy(ids.draw(rng, batch * len(names)))
        yield Batch(dense, KeyedJaggedTensor(names, drawn, lengths=lengths), labels, ones)


def generate(store: Store, train: int, test: int, group: int = GROUP, file_groups: int | None = None) -> Artifact:
    """Rows of 26 tables of 20,000 rows: Zipf ids, normal dense values, first-order and pairwise effects on a click.

    ``group``: rows of a row group; ``file_groups``: row groups of a file (None: all of a split).
    """
    rng, splits = np.random.default_rng(7), {"train": train, "test": test}
    first = rng.normal(0, 0.35, (TABLES, TABLE_ROWS)).astype(np.float32)
    pair = rng.normal(0, 0.6, (TABLES, TABLE_ROWS)).astype(np.float32)
    effects = rng.normal(0, 0.2, DENSE).astype(np.float32)
    groups, files = {}, {}
    for name, rows in splits.items():
        counts = [min(group, rows - at) for at in range(0, rows, group)] or [0]
        each = file_groups or len(counts)
        groups[name] = [counts[at : at + each] for at in range(0, len(counts), each)]
        files[name] = [f"{name}/part-{number:05d}.parquet" for number in range(len(groups[name]))]
    schema = schema_of(TABLES, TABLE_ROWS, rows=splits, files=files, groups=groups)
    fields = [pa.field(name, pa.float32(), nullable=False) for name in ("label", *schema.dense)]
    fields += [pa.field(column.name, pa.int32(), nullable=False) for column in schema.sparse]
    compression = IngestConfig().compression

    def block(count: int) -> pa.Table:
        dense = rng.normal(size=(DENSE, count)).astype(np.float32)
        ids = np.minimum((TABLE_ROWS ** rng.random((TABLES, count)) - 1).astype(np.int32), TABLE_ROWS - 1)
        logit = effects @ dense - 1.0
        for table in range(TABLES):
            logit += first[table][ids[table]]
            if table % 2:
                logit += pair[table][ids[table]] * pair[table - 1][ids[table - 1]]
        label = (rng.random(count) < 1 / (1 + np.exp(-logit))).astype(np.float32)
        return pa.table([label, *dense, *ids], schema=pa.schema(fields))

    with store.draft("data", kind="ingest", key="bench", config={}, inputs={}) as draft:
        for name in splits:
            for file, counts in zip(files[name], groups[name], strict=True):
                with draft.open(file) as sink, rows_writer(sink, pa.schema(fields), compression) as writer:
                    for count in counts:
                        writer.write_table(block(count), row_group_size=group)
        draft.write_json("schema.json", schema.to_json())
        return draft.commit({})
