"""``make bench-scaling``: samples per second on 1, 2 and 4 ranks of one thread each, on one machine.

The model, rows and global batch of ``bench-train``; the tables are dealt out whole, and every rank reads the Parquet
files. ``ratio``: 4 ranks over 1; ``ratio_2``: 2 over 1; medians over rounds, in which the numbers of ranks take turns.
The phases of a step are those of the last round, in ms.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.clicks import config_of, generate, plan_of
from benchmarks.common import finish
from pipeline.config import HardwareConfig
from pipeline.records import DatasetSchema, Plan
from pipeline.store import Store
from pipeline.training.data import BatchReader, Order
from pipeline.training.distributed import connect
from pipeline.training.parquet import SplitReader
from pipeline.training.settings import ModelSettings
from pipeline.training.trainer import Trainer

WARM_UP = 12  # steps before the clock starts


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=60, help="timed steps of a round")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--precision", default="auto", help="train.precision")
    options.add_argument("--exchange", default="fp32", help="partition.exchange")
    given = options.parse_args()
    worlds = [world for world in (1, 2, 4) if world <= (os.cpu_count() or 1)]
    speeds: dict[int, list[float]] = {world: [] for world in worlds}
    phases: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        generate(Store(folder), (given.steps + WARM_UP + 8) * 8192, 0)
        for number in range(given.rounds):
            for world in worlds:
                rank = (world, _free_port(), folder, given.steps, given.precision, given.exchange)
                mp.spawn(_rank, args=rank, nprocs=world)
                figures = json.loads((Path(folder) / "figures.json").read_text())
                speeds[world].append(figures["samples_per_s"])
                phases[str(world)] = figures["phases"]
            print(f"round {number + 1}: " + "  ".join(f"{w}: {speeds[w][-1]:,.0f}/s" for w in worlds), flush=True)
    ratios = {
        world: statistics.median(b / a for a, b in zip(speeds[1], speeds[world], strict=True)) for world in worlds
    }
    finish(
        "scaling", ratios.get(4), ratio_2=ratios.get(2), phases_ms=phases, precision=given.precision,
        **{f"samples_per_s_{world}": statistics.median(each) for world, each in speeds.items()},
    )  # fmt: skip


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _rank(number: int, world: int, port: int, folder: str, steps: int, precision: str, exchange: str) -> None:
    """Train as a rank; the first one writes ``figures.json``."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ |= {
        "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    config = config_of(threads=1)
    config = replace(
        config,
        hardware=HardwareConfig(name="bench", ranks_per_host=world),
        train=replace(config.train, precision=precision),
        partition=replace(config.partition, exchange=exchange),
    )
    device = connect(config.hardware, config.train.threads_per_rank)
    store: Store = Store(folder)
    split = SplitReader(store, store.get("data", "ingest"), "train")
    trainer = Trainer(ModelSettings.of(config), split.schema, _plan(split.schema, world), device)
    order = Order(key="scaling", seed=1, global_batch=config.train.batch, rank=number, world_size=world)
    with BatchReader(split, order) as reader:
        for _ in range(WARM_UP):
            trainer.step(reader)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            trainer.step(reader)
        dist.barrier()
        seconds = time.perf_counter() - began
    if number == 0:
        figures: dict[str, Any] = {"samples_per_s": steps * config.train.batch / seconds}
        figures["phases"] = {name: round(ms, 2) for name, ms in trainer.clock.figures().items()}
        (Path(folder) / "figures.json").write_text(json.dumps(figures))


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
