"""A rank of ``benchmarks.bipartite``: trains and evaluates a run, or takes steps of Twitter's sparse linear layer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness import serve, silent
from benchmarks.models_and_rows import DENSE, ZipfIds
from pipeline.config import Config, DataConfig, HardwareConfig, TrainConfig
from pipeline.config.compose import compose
from pipeline.models.settings import WideDeepConfig
from pipeline.planning import PlanInputs, make_plan
from pipeline.planning.bipartite import sample_bytes
from pipeline.plugins.hogwild.executor import Hogwild
from pipeline.records import DatasetSchema, FeatureProfile, Plan, Profile, ShardPlan, SparseColumn
from pipeline.stages.stage_inputs import read_dataset
from pipeline.store import Store
from pipeline.training.batches import Batch
from pipeline.training.config_settings import (
    select_model_settings,
    select_prediction_settings,
    select_training_settings,
)
from pipeline.training.distributed import connect
from pipeline.training.predict import predict
from pipeline.training.step import StepExecutor
from pipeline.training.trainer import train

KEPT = 4  # batches, drawn once and used over and over
WARM = 3


def fit(overrides: list[str], dataset: str) -> dict[str, Any]:
    """A training and its test NE (rank 0), with the payload that a sample sent between hosts, by the formula too."""
    config = compose(overrides)
    store = Store(config.store)
    artifact = store.get(dataset, "ingest")
    inputs = PlanInputs.of(config, *read_dataset(store, artifact))
    plan = make_plan(inputs)
    place = f"runs/{config.run}/checkpoints/bench"
    summary = train(select_training_settings(config), store, artifact, plan, place, str(config.run), lambda _: None)
    found = predict(select_prediction_settings(config), store, artifact, plan, summary["final"])
    figures: dict[str, Any] = {"sent": summary["train"]["bytes_per_sample"]["inter_host"]}
    if config.hardware.embedding_hosts:
        figures["formula"] = sample_bytes(plan, inputs).total
    if found is not None:
        logits, labels = found.logits.astype(np.float64), found.labels
        rate = float(labels.mean())
        loss = float(np.mean(np.logaddexp(0, logits) - labels * logits))
        figures["ne"] = loss / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    return figures


class Shape:
    """Twitter's sparse linear layer as ``parts`` tables, into which a hash deals the ids, on the ranks that run."""

    def __init__(self) -> None:
        self.trainer: StepExecutor | None = None
        self.batches: Iterator[Batch] = iter(())
        self.samples = 0

    def build(
        self,
        hosts: int,
        owners: int,
        rows: int,
        dim: int,
        wide: int,
        parts: int,
        shards: int,
        ids: int,
        batch: int,
        threads: int,
        exchange: str,
    ) -> dict[str, Any]:
        """``rows`` of ``dim`` weights in all, ``ids`` a sample, ``batch`` samples a worker or thread.

        ``shards``: into which the columns of each part are cut; ``exchange``: precision of embeddings on the network.
        No ``owners``: Hogwild with ``threads``.
        """
        schema, config = schema_of(rows, parts), config_of(hosts, owners, dim, wide, batch, threads)
        config.partition.exchange = exchange if owners else "fp32"
        inputs = PlanInputs.of(config, schema, profile_of(schema, ids / parts))
        plan = make_plan(inputs)
        if owners:
            plan = cut(plan, hosts - owners, owners, shards)
        device = connect(config.hardware, 1)
        settings = select_model_settings(config)
        kind = StepExecutor if owners else Hogwild
        self.trainer = kind(settings, schema, plan, device, total=10**6)
        workers = config.hardware.workers
        here = owners == 0 or dist.get_rank() < workers
        self.samples = batch if here else 0
        drawn = itertools.islice(batches(schema, self.samples, ids // parts, dist.get_rank()), KEPT)
        self.batches = itertools.cycle(list(drawn))
        dense = sum(parameter.nbytes for parameter in self.trainer.dense.values())
        self.steps(WARM)
        sample, share = sample_bytes(plan, inputs), 1.0 if exchange == "fp32" else 0.5
        return {"dense_bytes": dense, "ids": sample.ids, "pooled": share * sample.pooled, "here": here}

    def steps(self, count: int) -> dict[str, Any]:
        """``count`` steps: wall and processor seconds, bytes sent to other hosts for tables and for the dense part."""
        assert self.trainer is not None
        self.trainer.links.take()
        dist.barrier()
        began, spent = time.perf_counter(), time.process_time()
        for _ in range(count):
            self.trainer.step(self.batches)
        self.trainer.drain()
        cpu, wall = time.process_time() - spent, time.perf_counter() - began
        dist.barrier()
        sent = self.trainer.links.take()
        return {"wall": wall, "cpu": cpu, "sent": sent.inter_host, "dense": sent.dense_inter_host}


def cut(plan: Plan, workers: int, owners: int, shards: int) -> Plan:
    """``plan`` with each table in ``shards`` blocks of columns, dealt to the embedding ranks in turn."""
    tables = {}
    for number, (name, table) in enumerate(plan.tables.items()):
        width = table.dim // shards
        own = tuple(
            ShardPlan(
                rank=workers + (number * shards + i) % owners, row=0, rows=table.rows, column=i * width, columns=width
            )
            for i in range(shards)
        )
        kind = "column_wise" if shards > 1 else "table_wise"
        tables[name] = replace(table, shards=own, sharding=kind)
    return replace(plan, tables=tables)


def latency(times: int) -> dict[str, Any]:
    """The median seconds of a small all-to-all."""
    given = torch.zeros(dist.get_world_size())
    got, spent = torch.empty_like(given), []
    for _ in range(times):
        dist.barrier()
        began = time.perf_counter()
        dist.all_to_all_single(got, given)
        spent.append(time.perf_counter() - began)
    return {"seconds": float(np.median(spent))}


def schema_of(rows: int, parts: int) -> DatasetSchema:
    """``parts`` lists of weighted ids, a table each of ``rows`` / ``parts`` rows, and dense features."""
    columns = tuple(SparseColumn(name=f"part{i}", rows=rows // parts, multi=True, weighted=True) for i in range(parts))
    dense = tuple(f"I{i + 1}" for i in range(DENSE))
    return DatasetSchema(dense=dense, sparse=columns, rows={"train": 10**6}, files={}, groups={})


def profile_of(schema: DatasetSchema, pooling: float) -> Profile:
    """A profile of ``pooling`` ids a sample in each list."""
    sparse = {
        column.name: FeatureProfile(
            rows=column.rows,
            distinct=column.rows,
            missing_share=0.0,
            pooling=pooling,
            hot_rows=[column.rows // 100, column.rows],
            hot_share=[0.5, 1.0],
        )
        for column in schema.sparse
    }
    return Profile(rows={}, label_rate={}, dense={}, sparse=sparse)


def config_of(hosts: int, owners: int, dim: int, wide: int, batch: int, threads: int) -> Config:
    """One rank a host; ``threads`` of Hogwild without ``owners``."""
    config = Config(
        data=DataConfig(name="bench", format="synthetic"),
        hardware=HardwareConfig(name="bench", hosts=hosts, embedding_hosts=owners, inter_host_gb_per_s=0.15),
        model=WideDeepConfig(embedding_dim=dim, wide=wide),
        train=TrainConfig(
            global_batch=batch * max(hosts - owners, 1),
            warmup_steps=20,
            schedule="constant",
            threads_per_rank=1,
            precision="fp32",
        ),
    )
    config.plan.sharding_types = ["table_wise"]
    if not owners:
        config.train.mode = "hogwild"
        config.train.hogwild.threads = threads
    return config


def batches(schema: DatasetSchema, batch: int, pooling: int, seed: int) -> Iterator[Batch]:
    """Endless batches of Zipf ids, ``pooling`` with random weights in each list."""
    names = [column.name for column in schema.sparse]
    ids, rng = ZipfIds(schema.sparse[0].rows, 1.05), np.random.default_rng(seed)
    count = batch * len(names) * pooling
    lengths = torch.full((batch * len(names),), pooling, dtype=torch.int32)
    while True:
        drawn = torch.from_numpy(ids.draw(rng, count))
        weights = torch.from_numpy(rng.uniform(0.5, 1.5, count).astype(np.float32))
        sparse = KeyedJaggedTensor(names, drawn, weights=weights, lengths=lengths, stride=batch)
        dense = torch.from_numpy(rng.normal(size=(batch, len(schema.dense))).astype(np.float32))
        labels = torch.from_numpy((rng.random(batch) < 0.25).astype(np.float32))
        yield Batch(dense, sparse, labels, torch.full((batch,), 1.0 / max(batch, 1)))


if __name__ == "__main__":
    silent()
    shape = Shape()
    work = {"fit": fit, "build": shape.build, "steps": shape.steps, "latency": latency}
    serve(lambda what, **asked: work[what](**asked))
    if dist.is_initialized():
        dist.destroy_process_group()
