"""``make bench-scaling``: samples per second on 1, 2 and 4 ranks of one thread each, on one machine.

The model, rows and global batch of ``bench-train``; the tables are dealt out whole, and a rank reads the row groups of
its own lanes, as it does of any dataset with eight for each rank. ``ratio``: 4 ranks over 1; ``ratio_2``: 2 over 1;
medians over rounds, in which the numbers of ranks take turns. ``ceiling``: what the machine allows, 4 trainings at once
with a quarter of the batch each, which exchange nothing, over 1; ``share``: ``ratio`` over it. The phases of a step are
those of the last round, in ms. On a machine with fewer CPUs than ranks all processes of a comparison get the same
``cpus_a_rank``, however many they are, by a cgroup's quota, from their warm-up on: so 4 ranks are to one as on a
machine of 4 CPUs that are as much slower.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import statistics
import tempfile
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from benchmarks.cgroup import awake, equal_share, shares
from benchmarks.clicks import config_of, generate, plan_of
from benchmarks.common import finish
from pipeline.config import HardwareConfig
from pipeline.records import DatasetSchema, Plan
from pipeline.store import Store
from pipeline.training.batches import BatchReader
from pipeline.training.config_settings import select_model_settings
from pipeline.training.distributed import connect
from pipeline.training.parquet import SplitReader
from pipeline.training.sampler import Order
from pipeline.training.step import StepExecutor

WARM_UP = 12  # steps before the clock starts
GROUP = 8192  # rows of a row group: enough of them for a lane a rank


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=60, help="timed steps of a round")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--precision", default="auto", help="train.precision")
    options.add_argument("--exchange", default="fp32", help="partition.exchange")
    given = options.parse_args()
    runs = [_Run(world, 1, equal_share(most)) for most in (2, 4) for world in (1, most)]
    runs = list(dict.fromkeys([*runs, _Run(1, 4, equal_share(4))]))
    speeds: dict[_Run, list[float]] = {run: [] for run in runs}
    phases: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        generate(Store(folder), (given.steps + WARM_UP + 8) * 8192, 0, GROUP)
        for number in range(given.rounds):
            for run in runs:
                rate, phases[str(run)] = _measured(given, folder, run)
                speeds[run].append(rate)
            rates = "  ".join(f"{run}: {speeds[run][-1]:,.0f}/s" for run in runs)
            print(f"round {number + 1}: {rates}", flush=True)
    over_one = {(run.world, run.copies): _over(speeds[replace(run, world=1, copies=1)], speeds[run]) for run in runs}
    finish(
        "scaling",
        over_one[4, 1],
        ratio_2=over_one[2, 1],
        ceiling=over_one[1, 4],
        share=over_one[4, 1] / over_one[1, 4],
        phases_ms=phases,
        precision=given.precision,
        cpus_a_rank={2: equal_share(2), 4: equal_share(4)},
        samples_per_s={str(run): statistics.median(each) for run, each in speeds.items()},
    )


def _over(first: list[float], second: list[float]) -> float:
    return statistics.median(b / a for a, b in zip(first, second, strict=True))


def _measured(given: argparse.Namespace, folder: str, run: _Run) -> tuple[float, dict[str, float]]:
    """Samples/s of all trainings of ``run``, and the phases of the first one's step."""
    context = mp.get_context("spawn")
    ports, ranks = [_free_port() for _ in range(run.copies)], run.world * run.copies
    task = _Task(run.world, run.copies, folder, given.steps, given.precision, given.exchange, ports)
    ready, together = context.Barrier(ranks + 1), context.Barrier(ranks)
    running = mp.spawn(_rank, args=(task, ready, together), nprocs=ranks, join=False)
    while ready.n_waiting < ranks:
        running.join(0.05)  # raises the error of a rank that ended
    with awake() if run.cpus < 1 else nullcontext(), shares(running.pids(), run.cpus):
        ready.wait()
        while not running.join():
            pass
    figures = json.loads((Path(folder) / "figures.json").read_text())
    return figures["samples_per_s"], figures["phases"]


@dataclass(frozen=True)
class _Run:
    """``copies`` trainings at once on ``world`` ranks each, of which each process has so many ``cpus``."""

    world: int
    copies: int
    cpus: float

    def __str__(self) -> str:
        return f"{self.world * self.copies}{' apart' if self.copies > 1 else ''} at {self.cpus:g}"


@dataclass(frozen=True)
class _Task:
    """``copies`` trainings on ``world`` ranks each, which divide the global batch."""

    world: int
    copies: int
    folder: str
    steps: int
    precision: str
    exchange: str
    ports: list[int]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _rank(number: int, task: _Task, ready: Any, together: Any) -> None:
    """Train as a rank of a training; the first one writes ``figures.json``. All start and stop the clock together."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    copy, rank = divmod(number, task.world)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(task.world),
        "MASTER_ADDR": "127.0.0.1",
        "LOCAL_WORLD_SIZE": str(task.world),
        "MASTER_PORT": str(task.ports[copy]),
    }
    config = config_of(threads=1)
    batch = config.train.batch // task.copies
    config = replace(
        config,
        hardware=HardwareConfig(name="bench", ranks_per_host=task.world),
        train=replace(config.train, precision=task.precision, global_batch=batch),
        partition=replace(config.partition, exchange=task.exchange),
    )
    device = connect(config.hardware, config.train.threads_per_rank)
    store: Store = Store(task.folder)
    split = SplitReader(store, store.get("data", "ingest"), "train")
    trainer = StepExecutor(select_model_settings(config), split.schema, _plan(split.schema, task.world), device)
    order = Order(
        key="scaling", seed=1, global_batch=batch, lanes=config.train.dealt_lanes, rank=rank, world_size=task.world
    )
    ready.wait()
    with BatchReader(split, order) as reader:
        for _ in range(WARM_UP):
            trainer.step(reader)
        together.wait()
        began = time.perf_counter()
        for _ in range(task.steps):
            trainer.step(reader)
        together.wait()
        seconds = time.perf_counter() - began
    if number == 0:
        figures: dict[str, Any] = {"samples_per_s": task.steps * batch * task.copies / seconds}
        figures["phases"] = {name: round(ms, 2) for name, ms in trainer.clock.figures().items()}
        (Path(task.folder) / "figures.json").write_text(json.dumps(figures))


def _plan(schema: DatasetSchema, world: int) -> Plan:
    """The tables whole, neighbours on the same rank."""
    plan = plan_of(schema)
    names = list(plan.tables)
    ranks = {name: i * world // len(names) for i, name in enumerate(names)}
    tables = {
        name: replace(table, shards=(replace(table.shards[0], rank=ranks[name]),))
        for name, table in plan.tables.items()
    }
    return replace(plan, tables=tables, world_size=world, ranks_per_host=world)


if __name__ == "__main__":
    main()
