"""``make bench-bipartite``: a cluster of workers and embedding hosts against a flat one, and Twitter's shape.

**Same model.** Four hosts (ranks of this machine), flat and as 2 + 2: test NE, and the bytes that a sample sends
between hosts, counted, beside those of the formula (``planning.bipartite.sample_bytes``).

**Twitter's shape.** A sparse linear layer of 23 M weights. Measured on network namespaces with 150 MB/s each: processor
seconds a sample of one host's Hogwild threads, of a worker and of the embedding ranks of 2 + 2 hosts, and the latency
of a small all-to-all. Carried by the model below: 32 workers. Wall clocks do not count, since four hosts share this
machine.

A step of W workers and E embedding hosts, each with C cores and a link of B bytes/s, with b samples a worker, takes

    b w / C + W b e / (E C) + 4 l + sum over exchanges of max(b x, W b x / E) / B + 2 (W - 1) / W d / B

w, e: processor seconds of a sample on a worker and on all embedding ranks; l: latency; x: bytes of a sample of the
pooled embeddings and their gradients; d: bytes of the dense part. Only the exchange of the next batch's ids overlaps
with it, and counts where it takes longer. Hogwild's C threads are taken to be C times as
fast as one, which memory would not let them be. ``ratio``: samples/s of 32 workers over those of Hogwild on one host of
as many cores; the bar is 8.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness import NIGHTJAR, finish, options, python, result_of, run_config, serve, silent, words
from benchmarks.models_and_rows import DENSE, ZipfIds, config_of, plan_with, table_plan
from benchmarks.network import Bed, Ranks, require_bed
from pipeline.config.compose import compose
from pipeline.models.settings import WideDeepConfig
from pipeline.planning import PlanInputs
from pipeline.planning.bipartite import sample_bytes
from pipeline.plugins.hogwild.executor import Hogwild
from pipeline.records import DatasetSchema, Plan, Profile, ShardPlan, SparseColumn
from pipeline.records.record import read
from pipeline.stages.stage_inputs import read_dataset
from pipeline.store import Store
from pipeline.training.batches import Batch
from pipeline.training.config_settings import select_model_settings
from pipeline.training.distributed import connect
from pipeline.training.step import StepExecutor

HOSTS, OWNERS, MB_PER_S = 4, 2, 150.0
# Weights of an id, of them outputs of the layer; tables, into which ids are dealt, and blocks of columns of each.
DIM, WIDE, PARTS, SHARDS = 48, 40, 8, 4
IDS = 96  # of a sample
# What is carried: cores of a host, workers, and embedding hosts, of which the first number is judged.
CORES, WORKERS, EMBEDDING_HOSTS = 2, 32, (32, 16, 8)
RANK = "rank"  # the word that makes this program one
KEPT = 4  # batches, drawn once and used over and over
WARM = 3


@dataclass(frozen=True)
class Measured:
    """Processor seconds of a sample, the latency in seconds, and bytes of a sample and of the dense part."""

    worker: float
    owners: float
    latency: float
    ids: float
    pooled: float
    dense: float

    def step(self, workers: int, owners: int, batch: int, cores: int, rate: float) -> dict[str, float]:
        """Seconds of a step by part."""
        carried = {"ids": self.ids, "pooled": self.pooled, "gradients": self.pooled}
        link = {name: max(batch * size, workers * batch * size / owners) / rate for name, size in carried.items()}
        return {
            "worker": batch * self.worker / cores,
            "lookups": workers * batch * self.owners / (owners * cores),
            "latency": 4 * self.latency,
            **link,
            "all_reduce": 2 * (workers - 1) / workers * self.dense / rate,
        }


def seconds_of(parts: dict[str, float]) -> float:
    """Seconds of a step: the ids of the next batch travel beside all the rest, as the planner counts, too."""
    return max(sum(parts.values()) - parts["ids"], parts["ids"])


def main() -> None:
    given = options(
        __doc__,
        rows=(60_000, "of the synthetic log"),
        weights=(23_040_000, "of the sparse linear layer"),
        exchange=("fp16", "of pooled embeddings", {"choices": ["fp32", "fp16", "bf16"]}),
        batch=(2048, "samples of a worker or Hogwild thread in a step"),
        steps=(10, "of a round"),
        rounds=5,
    )
    require_bed()
    began = time.monotonic()
    same = same_model(given.rows)
    alone, measured = hogwild(given), two_and_two(given)
    carried = {}
    for owners in EMBEDDING_HOSTS:
        parts = measured.step(WORKERS, owners, given.batch, CORES, 1e6 * MB_PER_S)
        speed = WORKERS * given.batch / seconds_of(parts)
        carried[owners] = {"ratio": round(speed * alone / CORES, 2), "samples_per_s": round(speed), "seconds": parts}
    finish(
        "bipartite",
        carried[EMBEDDING_HOSTS[0]]["ratio"],
        seconds=time.monotonic() - began,
        **same,
        measured={"hogwild": alone, **asdict(measured)},
        carried=carried,
    )


def same_model(rows: int) -> dict[str, Any]:
    """NE and bytes of both kinds of clusters."""
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, owners in (("flat", 0), ("bipartite", OWNERS)):
            settings = words(f"""data=synthetic data.synthetic.rows={rows} data.synthetic.days=1 hardware=laptop
                model=dlrm_small train.global_batch=1024 train.precision=fp32 train.warmup_steps=10
                train.threads_per_rank=1 train.guard.collapse=false store={folder} partition=flat
                plan.sharding_types=[table_wise] hardware.hosts={HOSTS} hardware.embedding_hosts={owners} run={name}""")
            python(*NIGHTJAR, "run", *settings)
            result = result_of(folder, name)
            figures[f"ne_{name}"] = result["eval"]["ne"]
            figures[f"bytes_{name}"] = result["train"]["bytes_per_sample"]["inter_host"]
        config, store = compose(settings), Store(folder)
        made = run_config(config, last="plan")  # already there
        plan = read(Plan, store, f"{made['plan'].path}/plan.json")
        formula = sample_bytes(plan, PlanInputs.of(config, *read_dataset(store, made["ingest"]))).total
    change = abs(figures["ne_bipartite"] / figures["ne_flat"] - 1)
    of_formula = figures["bytes_bipartite"] / formula
    return {**figures, "ne_change": change, "bytes_formula": formula, "bytes_of_formula": of_formula}


def hogwild(given: argparse.Namespace) -> float:
    """Processor seconds of a sample with as many threads as a host has cores: the median of the rounds."""
    with Bed(1) as bed, Ranks(bed, 1, "benchmarks.bipartite", RANK) as ranks:
        ranks.ask(what="build", hosts=1, owners=0, weights=given.weights, batch=given.batch, exchange="fp32")
        spent = [ranks.ask(what="steps", count=given.steps)[0]["cpu"] for _ in range(given.rounds)]
    return statistics.median(spent) / given.steps / given.batch


def two_and_two(given: argparse.Namespace) -> Measured:
    """What workers and embedding hosts take, medians of the rounds."""
    workers, samples = HOSTS - OWNERS, given.steps * given.batch
    shape = {"weights": given.weights, "batch": given.batch, "exchange": given.exchange}
    with Bed(HOSTS) as bed, Ranks(bed, 1, "benchmarks.bipartite", RANK) as ranks:
        bed.limit(1e6 * MB_PER_S)
        built = ranks.ask(what="build", hosts=HOSTS, owners=OWNERS, **shape)[0]
        rounds = [[each["cpu"] for each in ranks.ask(what="steps", count=given.steps)] for _ in range(given.rounds)]
        latency = ranks.ask(what="latency", times=50)[0]["seconds"]
    worker = statistics.median(each for spent in rounds for each in spent[:workers]) / samples
    owners = statistics.median(sum(spent[workers:]) for spent in rounds) / samples / workers
    return Measured(worker, owners, latency, **built)


class Shape:
    """On a rank: Twitter's sparse linear layer as ``PARTS`` tables, into which a hash deals the ids."""

    trainer: StepExecutor
    batches: Iterator[Batch]

    def build(self, hosts: int, owners: int, weights: int, batch: int, exchange: str) -> dict[str, Any]:
        """``weights`` in all, ``batch`` samples a worker or thread; no ``owners``: Hogwild.

        ``exchange``: precision of embeddings on the network.
        """
        workers = max(hosts - owners, 1)
        config = config_of(DIM, batch * workers, threads=1, precision="fp32")
        config.hardware.hosts, config.hardware.embedding_hosts = hosts, owners
        config.hardware.inter_host_gb_per_s = MB_PER_S / 1000
        config.model = WideDeepConfig(embedding_dim=DIM, wide=WIDE)
        config.partition.exchange = exchange
        if not owners:
            config.train.mode, config.train.hogwild.threads = "hogwild", CORES
        schema = schema_of(weights // DIM // PARTS)
        plan = plan_of(schema, hosts, owners, config.train.global_batch)
        kind, device = (StepExecutor if owners else Hogwild), connect(config.hardware, 1)
        self.trainer = kind(select_model_settings(config), schema, plan, device, total=10**6)
        mine = batch if dist.get_rank() < workers else 0
        self.batches = itertools.cycle(list(itertools.islice(batches(schema, mine, dist.get_rank()), KEPT)))
        self.steps(WARM)
        sample = sample_bytes(plan, PlanInputs.of(config, schema, Profile(rows={}, label_rate={}, dense={}, sparse={})))
        dense = sum(parameter.nbytes for parameter in self.trainer.dense.values())
        return {"ids": sample.ids, "pooled": sample.pooled * (1.0 if exchange == "fp32" else 0.5), "dense": dense}

    def steps(self, count: int) -> dict[str, Any]:
        """Processor seconds of ``count`` steps."""
        dist.barrier()
        spent = time.process_time()
        for _ in range(count):
            self.trainer.step(self.batches)
        self.trainer.drain()
        return {"cpu": time.process_time() - spent}

    def latency(self, times: int) -> dict[str, Any]:
        """The median seconds of a small all-to-all."""
        given = torch.zeros(dist.get_world_size())
        got, spent = torch.empty_like(given), []
        for _ in range(times):
            dist.barrier()
            began = time.perf_counter()
            dist.all_to_all_single(got, given)
            spent.append(time.perf_counter() - began)
        return {"seconds": statistics.median(spent)}


def schema_of(rows: int) -> DatasetSchema:
    """Lists of weighted ids, a table each, and dense features."""
    columns = tuple(SparseColumn(name=f"part{i}", rows=rows, multi=True, weighted=True) for i in range(PARTS))
    dense = tuple(f"I{i + 1}" for i in range(DENSE))
    return DatasetSchema(dense=dense, sparse=columns, rows={"train": 10**6}, files={}, groups={})


def plan_of(schema: DatasetSchema, hosts: int, owners: int, batch: int) -> Plan:
    """Blocks of columns, dealt to the embedding ranks in turn; without ``owners`` whole tables."""
    width, tables = DIM // SHARDS, {}
    for number, column in enumerate(schema.sparse):
        shards, rows = [], column.rows
        for i in range(SHARDS if owners else 0):
            rank = hosts - owners + (number * SHARDS + i) % owners
            shards.append(ShardPlan(rank=rank, row=0, rows=rows, column=i * width, columns=width))
        kind = "column_wise" if owners else "table_wise"
        tables[column.name] = table_plan(rows, DIM, *shards, pooling=IDS / PARTS, sharding=kind)
    return replace(plan_with(tables, hosts, 1, batch), embedding_hosts=owners)


def batches(schema: DatasetSchema, batch: int, seed: int) -> Iterator[Batch]:
    """Endless batches of Zipf ids with random weights."""
    names, pooling = [column.name for column in schema.sparse], IDS // PARTS
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
    if sys.argv[1:] == [RANK]:
        silent()
        shape = Shape()
        serve(lambda what, **asked: getattr(shape, what)(**asked))
        dist.destroy_process_group()
    else:
        main()
