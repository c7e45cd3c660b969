"""The probe of the tower partitioner: measures how features interact, after a short training or in a checkpoint.

It runs in one process, without the plan: tables are cut to ``partition.probe_rows`` rows, which belong to the hottest
ids of a vocabulary and are shared by the others.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist

from pipeline.checkpoint.config_compatibility import check_changes
from pipeline.checkpoint.reader import RestoreTarget
from pipeline.checkpoint.warm import warm_start
from pipeline.config.model import ModelConfig
from pipeline.config.train import RankLossConfig
from pipeline.core.errors import GuardError
from pipeline.records.dataset import RESERVED_ROWS, DatasetSchema
from pipeline.records.plan import Plan, ShardPlan, TablePlan
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact
from pipeline.towers.interaction_strength import Interaction
from pipeline.towers.partitioner import Matrix
from pipeline.training.batches import Batch, BatchReader
from pipeline.training.distributed import connect
from pipeline.training.lr_schedule import warmup_steps
from pipeline.training.parquet import SplitReader
from pipeline.training.sampler import Order, shuffle_key
from pipeline.training.settings import TrainingSettings
from pipeline.training.step import StepExecutor

log = logging.getLogger(__name__)
LARGEST_BATCH = 4096
# The number of batches whose embeddings are compared.
LOOKED_AT = 16


def probe(
    settings: TrainingSettings,
    store: Store,
    dataset: Artifact,
    checkpoint: Artifact | None,
) -> tuple[Matrix, str]:
    """Measure interactions [F, F] of the dataset's sparse features and sequences, in order, and name their source.

    ``checkpoint``: compares its tables; None trains ``partition.probe_steps`` steps. Raises
    ConfigError for a checkpoint of another dataset or embedding dimension, and GuardError where the probe diverged.
    """
    # A probe inside a training or a test must leave their process group as it is.
    alone, outside = one_process_settings(settings), dist.is_initialized()
    device = connect(alone.hardware, alone.train.threads_per_rank)
    try:
        split = SplitReader(store, dataset, "train")
        limit, batch = settings.partition.probe_rows, alone.train.batch
        schema = cut_tables(split.schema, limit)
        trainer = StepExecutor(alone, schema, one_process_plan(schema, settings.model, batch), device)
        steps = settings.partition.probe_steps
        source = f"a probe of {steps:,} steps of {batch:,} rows"
        if checkpoint is not None:
            steps, source = 0, f"the tables of {checkpoint.path}"
        log.info("comparing features by %s, in this process", source)
        if checkpoint is not None:
            # Restore as many rows of its tables as the trainer's tables have, and nothing of its dense part.
            wanted = dataclasses.replace(alone.checkpoint, init_tables_only=True, rename={})
            check_changes(checkpoint, alone.record, wanted, alone.data, dataset.key)
            target = RestoreTarget(trainer.rows, dict(trainer.dense), states=False)
            warm_start(store, checkpoint, target, tables_only=True)
        order = Order(key=shuffle_key(dataset), seed=settings.seed, global_batch=batch)
        epochs = math.ceil((steps + LOOKED_AT) / -(-split.rows // batch))
        with BatchReader(split, order, epochs=epochs) as reader:
            batches = fold_rows(reader, limit)
            for _ in range(steps):
                trainer.step(batches)
            measure = Interaction(len(schema.vectors))
            model = trainer.finished()
            with torch.no_grad():
                for shown in islice(batches, LOOKED_AT):
                    model(shown.to(device))
                    real = shown.weights > 0
                    measure.add(trainer.dense_part.embeddings[real])
    finally:
        if not outside:
            dist.destroy_process_group()
    interactions = measure.matrix()
    if not np.isfinite(interactions).all():
        raise GuardError(
            f"{source} left embeddings that are not finite: features cannot be compared",
            hint=f"train.sparse_lr={settings.train.sparse_lr / 10:g}, or partition.strategy=strided",
        )
    return interactions, source


def one_process_settings(settings: TrainingSettings) -> TrainingSettings:
    """Return the settings of the flat model on one CPU rank, with batches that fit into one process."""
    hardware = dataclasses.replace(settings.hardware, device="cpu", hosts=1, ranks_per_host=1, embedding_hosts=0)
    steps, precision = max(1, settings.partition.probe_steps), settings.train.precision
    # CPUs have no TF32.
    if precision == "tf32":
        precision = "fp32"
    train = dataclasses.replace(
        settings.train,
        compile=False,
        cuda_graphs=False,
        precision=precision,
        pipeline="base",
        global_batch=min(settings.train.batch, LARGEST_BATCH),
        accumulate=1,
        warmup_steps=min(warmup_steps(settings.train, steps), steps // 10),
        schedule="constant",
        epochs=1,
        max_steps=steps,
        rank_loss=RankLossConfig(),
    )
    return dataclasses.replace(settings, hardware=hardware, train=train)


def cut_tables(schema: DatasetSchema, limit: int) -> DatasetSchema:
    """Return ``schema`` with at most ``limit`` rows in each table."""
    sparse = [dataclasses.replace(column, rows=min(column.rows, limit)) for column in schema.sparse]
    sequences = []
    for sequence in schema.sequences:
        columns = [dataclasses.replace(column, rows=min(column.rows, limit)) for column in sequence.columns]
        sequences.append(dataclasses.replace(sequence, columns=tuple(columns)))
    return dataclasses.replace(schema, sparse=tuple(sparse), sequences=tuple(sequences))


def fold_rows(batches: Iterator[Batch], limit: int) -> Iterator[Batch]:
    """Yield the batches with rows from ``limit`` on folded onto the first ones, except the reserved rows."""
    for batch in batches:
        for lookup in (batch.sparse, batch.lookups):
            if lookup is None or not lookup.values().numel():
                continue
            values = lookup.values()
            if int(values.max()) >= limit:
                folded = RESERVED_ROWS + (values - RESERVED_ROWS) % (limit - RESERVED_ROWS)
                values[:] = torch.where(values < limit, values, folded)
        yield batch


def one_process_plan(schema: DatasetSchema, model: ModelConfig, batch: int) -> Plan:
    """Return the plan that has every table whole in memory, on the only rank."""
    tables = {}
    for table in schema.tables:
        dim = model.dim_of(table.name)
        tables[table.name] = TablePlan(
            rows=table.rows,
            dim=dim,
            pooling=1.0,
            tier="ddr",
            sharding="table_wise",
            kernel="fused",
            shards=(ShardPlan(rank=0, row=0, rows=table.rows, column=0, columns=dim),),
            cost_ms=0.0,
            reason="",
        )
    return Plan(hardware="probe", device="cpu", world_size=1, ranks_per_host=1, global_batch=batch, tables=tables)
