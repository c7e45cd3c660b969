"""The model and the Zipf logs of the checkpoint benchmarks: DLRM tables of a given size, ids drawn on the fly."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.config import Config, DataConfig, HardwareConfig, ModelConfig, TrainConfig
from pipeline.contracts import DatasetSchema, Plan, ShardPlan, SparseColumn, TablePlan
from pipeline.training import Batch

DENSE = 13


def schema_of(tables: int, rows: int) -> DatasetSchema:
    """``tables`` tables of ``rows`` rows each, and 13 dense features."""
    columns = tuple(SparseColumn(name=f"C{i + 1}", rows=rows) for i in range(tables))
    return DatasetSchema(dense=tuple(f"I{i + 1}" for i in range(DENSE)), sparse=columns, rows={}, files={}, groups={})


def config_of(dim: int, batch: int, ranks: int = 1, threads: int | None = None) -> Config:
    """A run on ``ranks`` ranks of this host."""
    return Config(
        data=DataConfig(name="bench", format="synthetic"),
        hardware=HardwareConfig(name="bench", ranks_per_host=ranks),
        model=ModelConfig(embedding_dim=dim),
        train=TrainConfig(global_batch=batch, warmup_steps=20, threads_per_rank=threads),
    )


def plan_of(schema: DatasetSchema, config: Config, tier: str = "ddr", cache_rows: int = 0) -> Plan:
    """Whole tables, dealt to the ranks in turn; ``cache_rows`` of each stay in memory on tier ssd."""
    world, dim = config.world_size, config.model.embedding_dim
    tables = {
        column.name: TablePlan(
            rows=column.rows, dim=dim, pooling=1.0, tier=tier, sharding="table_wise", kernel="fused", cost_ms=0.0,
            shards=(ShardPlan(rank=i % world, row=0, rows=column.rows, column=0, columns=dim),), reason="",
            cache_rows=cache_rows,
        )
        for i, column in enumerate(schema.sparse)
    }  # fmt: skip
    return Plan(
        hardware="bench", device="cpu", world_size=world, ranks_per_host=world,
        global_batch=config.train.global_batch, tables=tables,
    )  # fmt: skip


def zipf_ids(rng: np.random.Generator, rows: int, shape: tuple[int, ...], exponent: float = 1.0) -> np.ndarray:
    """Row numbers with P(row) about row ** -exponent, the most frequent row first. int32."""
    if exponent == 1.0:
        drawn = np.exp(rng.random(shape, dtype=np.float32) * np.float32(np.log(rows)))
    else:
        # The inverse of the distribution of x ** -exponent on [1, rows]; float32 would leave gaps between late rows.
        drawn = (1 - rng.random(shape) * (1 - rows ** (1 - exponent))) ** (1 / (1 - exponent))
    return np.minimum(drawn.astype(np.int32) - 1, rows - 1)


def lookups_for(rows: int, share: float) -> int:
    """Lookups of one table until ``share`` of its rows are expected to be touched at least once."""
    row = np.arange(1, rows + 1, dtype=np.float64)
    chance = np.log((row + 1) / row) / np.log(rows)
    low, high = 1.0, 100.0 * rows
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if (1 - np.exp(-middle * chance)).mean() > share else (middle, high)
    return int(high)


def batches(schema: DatasetSchema, batch: int, seed: int, exponent: float = 1.0) -> Iterator[Batch]:
    """Endless batches: Zipf ids, normal dense values, labels drawn at 25 %."""
    rng, names = np.random.default_rng(seed), [column.name for column in schema.sparse]
    rows = schema.sparse[0].rows
    ones = torch.ones(batch)
    lengths = torch.ones(batch * len(names), dtype=torch.int32)
    dense = torch.from_numpy(rng.normal(size=(batch, DENSE)).astype(np.float32))
    labels = (torch.rand(batch, generator=torch.Generator().manual_seed(seed)) < 0.25).float()
    while True:
        ids = torch.from_numpy(zipf_ids(rng, rows, (batch * len(names),), exponent))
        yield Batch(dense, KeyedJaggedTensor(names, ids, lengths=lengths), labels, ones)
