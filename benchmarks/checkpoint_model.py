"""The model and the Zipf logs of the checkpoint benchmarks: DLRM tables of a given size, ids drawn on the fly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.config import Config, DataConfig, HardwareConfig, TrainConfig
from pipeline.models.settings import DlrmConfig
from pipeline.records import DatasetSchema, Plan, ShardPlan, SparseColumn, TablePlan
from pipeline.training.batches import Batch

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
        model=DlrmConfig(embedding_dim=dim),
        train=TrainConfig(global_batch=batch, warmup_steps=20, schedule="constant", threads_per_rank=threads),
    )


def plan_of(schema: DatasetSchema, config: Config, tier: str = "ddr", cache_rows: int = 0) -> Plan:
    """Whole tables, dealt to the ranks in turn; ``cache_rows`` of each stay in memory on tier ssd."""
    world, dim = config.world_size, config.model.embedding_dim
    tables = {
        column.name: TablePlan(
            rows=column.rows,
            dim=dim,
            pooling=1.0,
            tier=tier,
            sharding="table_wise",
            kernel="fused",
            cost_ms=0.0,
            shards=(ShardPlan(rank=i % world, row=0, rows=column.rows, column=0, columns=dim),),
            reason="",
            cache_rows=cache_rows,
        )
        for i, column in enumerate(schema.sparse)
    }
    return Plan(
        hardware="bench",
        device="cpu",
        world_size=world,
        ranks_per_host=world,
        global_batch=config.train.global_batch,
        tables=tables,
    )


class ZipfIds:
    """Row numbers drawn with P(row) proportional to (row + 1) ** -exponent, by a table of the inverse distribution."""

    _CELLS = 1 << 20

    def __init__(self, rows: int, exponent: float) -> None:
        self._rows, self._exponent = rows, exponent
        # The row at each cell's start: a draw within a cell of the head is exact, in the tail some rows share a cell.
        self._starts = np.searchsorted(np.cumsum(self._weights()), np.arange(self._CELLS) / self._CELLS).astype(
            np.int32
        )
        self._spans = np.diff(np.append(self._starts, rows)).astype(np.float32)

    def _weights(self) -> np.ndarray:
        """P(row) of every row, float64; not kept, for benchmarks measure memory."""
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


class Draws(Protocol):
    """What ids are drawn from."""

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """int32 [count]."""
        ...


def batches(schema: DatasetSchema, batch: int, seed: int, ids: Draws) -> Iterator[Batch]:
    """Endless batches: Zipf ids, normal dense values, labels drawn at 25 %."""
    rng, names = np.random.default_rng(seed), [column.name for column in schema.sparse]
    ones = torch.ones(batch)
    lengths = torch.ones(batch * len(names), dtype=torch.int32)
    dense = torch.from_numpy(rng.normal(size=(batch, DENSE)).astype(np.float32))
    labels = (torch.rand(batch, generator=torch.Generator().manual_seed(seed)) < 0.25).float()
    while True:
        drawn = torch.from_numpy(ids.draw(rng, batch * len(names)))
        yield Batch(dense, KeyedJaggedTensor(names, drawn, lengths=lengths), labels, ones)
