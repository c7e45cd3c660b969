"""The probe of the tower partitioner: a short training of the flat model, or a checkpoint, and how features interact.

One process, without the plan: the tables are cut to ``partition.probe_rows`` rows, whose hottest keep their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist

from pipeline.artifacts import Artifact, Store
from pipeline.config import Config
from pipeline.contracts import RESERVED_ROWS, DatasetSchema, Plan, ShardPlan, TablePlan
from pipeline.embeddings import RowAccess, dense_parameters
from pipeline.errors import GuardError
from pipeline.towers.distances import Matrix
from pipeline.towers.interaction import Interaction
from pipeline.training.checkpoints import load_weights
from pipeline.training.data import Batch, BatchReader, Order
from pipeline.training.distributed import connect
from pipeline.training.parquet import SplitReader
from pipeline.training.trainer import Trainer

LARGEST_BATCH = 4096
LOOKED_AT = 16  # batches whose embeddings are compared


def probe(
    config: Config, store: Store, dataset: Artifact, checkpoint: Artifact | None, say: Callable[[str], None]
) -> Matrix:
    """Interactions [F, F] of the dataset's sparse features, in the order of its schema.

    ``checkpoint``: of the flat model, read whole into this process; None: ``partition.probe_steps`` are trained.
    Raises ArtifactError for a checkpoint of another model or dataset, GuardError where the probe diverged.
    """
    alone, outside = _alone(config), dist.is_initialized()
    device = connect(alone)
    try:
        split = SplitReader(store, dataset, "train")
        limit = None if checkpoint is not None else config.partition.probe_rows
        trainer = Trainer(alone, _cut(split.schema, limit), _plan(alone, split.schema, limit), device)
        steps = 0 if checkpoint is not None else config.partition.probe_steps
        if checkpoint is not None:
            load_weights(store, checkpoint.path, RowAccess(trainer.model), dense_parameters(trainer.model))
        order = Order(key=dataset.key, seed=config.seed, global_batch=alone.train.global_batch)
        per_epoch = -(-split.rows // order.global_batch)
        with BatchReader(split, order, epochs=math.ceil((steps + LOOKED_AT) / per_epoch)) as reader:
            batches = _folded(reader, limit)
            say(_words(checkpoint, steps, order.global_batch))
            for _ in range(steps):
                trainer.step(batches)
            found = _look(trainer, batches, len(split.schema.sparse), device)
    finally:
        if not outside:
            dist.destroy_process_group()
    if not np.isfinite(found).all():
        raise GuardError(
            f"the probe of {steps} steps left embeddings that are not finite: features cannot be compared",
            hint=f"train.sparse_lr={config.train.sparse_lr / 10:g}, or partition.strategy=strided",
        )
    return found


def _words(checkpoint: Artifact | None, steps: int, batch: int) -> str:
    if checkpoint is not None:
        return f"probe: the embeddings of {checkpoint.path}"
    return f"probe: {steps:,} steps of {batch:,} rows in this process"


@torch.no_grad()
def _look(trainer: Trainer, batches: Iterator[Batch], features: int, device: torch.device) -> Matrix:
    """Interactions over the next batches."""
    model, interaction = trainer.finished(), Interaction(features)
    for _, batch in zip(range(LOOKED_AT), batches, strict=False):
        model(batch.to(device))
        real = batch.weights > 0
        interaction.add(trainer.head.embeddings[real])
    return interaction.matrix()


def _alone(config: Config) -> Config:
    """The settings of the flat model on one CPU rank, in batches that one process can take."""
    hardware = dataclasses.replace(config.hardware, device="cpu", hosts=1, ranks_per_host=1)
    steps = max(1, config.partition.probe_steps)
    train = dataclasses.replace(
        config.train,
        compile=False,
        global_batch=min(config.train.global_batch, LARGEST_BATCH),
        warmup_steps=min(config.train.warmup_steps, steps // 10),
        epochs=1,
        max_steps=steps,
    )
    return dataclasses.replace(config, hardware=hardware, train=train)


def _cut(schema: DatasetSchema, limit: int | None) -> DatasetSchema:
    """``schema`` with tables of at most ``limit`` rows."""
    if limit is None:
        return schema
    sparse = tuple(dataclasses.replace(column, rows=min(column.rows, limit)) for column in schema.sparse)
    return dataclasses.replace(schema, sparse=sparse)


def _folded(batches: Iterator[Batch], limit: int | None) -> Iterator[Batch]:
    """``batches`` with the rows from ``limit`` on folded onto the first ones, the reserved rows apart."""
    for batch in batches:
        values = batch.sparse.values()
        if limit is not None and values.numel() and int(values.max()) >= limit:
            values[:] = torch.where(
                values < limit, values, RESERVED_ROWS + (values - RESERVED_ROWS) % (limit - RESERVED_ROWS)
            )
        yield batch


def _plan(config: Config, schema: DatasetSchema, limit: int | None) -> Plan:
    """Every table whole on the one rank."""
    dim = config.model.embedding_dim
    return Plan(
        hardware="probe",
        device="cpu",
        world_size=1,
        ranks_per_host=1,
        global_batch=config.train.global_batch,
        tables={
            column.name: TablePlan(
                rows=column.rows, dim=dim, pooling=1.0, tier="ddr", sharding="table_wise", kernel="fused",
                shards=(ShardPlan(rank=0, row=0, rows=column.rows, column=0, columns=dim),), cost_ms=0.0, reason="",
            )
            for column in _cut(schema, limit).sparse
        },
    )  # fmt: skip
