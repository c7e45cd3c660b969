"""``make bench-plan-random``: random planning cases, our plans against those of TorchRec's planner as it comes.

A case draws tables (number, rows, width, ids a sample, skew), ranks, batch and how tight memory is. TorchRec's
``EmbeddingShardingPlanner`` gets the memory that a rank may fill with tables, and keeps its own proposers, estimators
and partitioner. Both plans are rated in both cost models.

``ratio``: the worst of all cases and both models, TorchRec's cost over ours; ``median``: of the cases, each by the
model in which it gains less. ``stock_median`` and ``own_median`` are by model; seconds are sums.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from torchrec.distributed.planner.types import PlannerError, ShardingOption

from benchmarks.harness import finish, options
from benchmarks.models_and_rows import plan_with, table_plan
from benchmarks.stock import Stock, slowest_rank
from pipeline.config import Config, TableFigures
from pipeline.config.compose import compose
from pipeline.core.errors import PlanError
from pipeline.core.units import GIB
from pipeline.ingest.table_specs import dataset
from pipeline.planning import PlanInputs, make_plan
from pipeline.planning.problem import build_problem
from pipeline.planning.step_prediction import predict
from pipeline.records import Plan, ShardPlan

CASES = 200
CACHED = 0.2  # TorchRec's share of a table's rows in a cache
TIER_OF_KERNEL = {"fused_uvm": "ddr", "fused_uvm_caching": "hbm_cached"}
Case = dict[str, Any]


def main() -> None:
    """Run all cases, print each and the JSON line."""
    given = options(
        __doc__,
        cases=CASES,
        first=(0, "number of the first case, which is also its seed"),
        alone=(False, "run them in this process and print their figures"),
        processes=min(2, len(os.sched_getaffinity(0))),
    )
    numbers = range(given.first, given.first + given.cases)
    if given.alone:
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        compare(numbers[0])  # the first plan of a process pays for imports
        for number in numbers:
            print(json.dumps(compare(number)), flush=True)
        return
    parts = [part for part in np.array_split(numbers, given.processes) if len(part)]
    with ThreadPoolExecutor(len(parts)) as pool:
        cases = [case for part in pool.map(_child, parts) for case in part]
    _report(cases)


def _child(numbers: np.ndarray) -> list[Case]:
    command = [sys.executable, "-m", "benchmarks.plan_random", "--alone"]
    command += ["--first", str(numbers[0]), "--cases", str(len(numbers))]
    cases = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            cases.append(json.loads(line))
    return cases


def _report(cases: list[Case]) -> None:
    both = [case for case in cases if "stock" in case]
    lost = [case["case"] for case in cases if case["ours"] is None and case["rival"] is not None]
    gains = [min(case["stock"], case["own"]) for case in both]
    finish(
        "plan_random",
        0.0 if lost else min(gains),
        median=statistics.median(gains),
        stock_median=statistics.median(case["stock"] for case in both),
        own_median=statistics.median(case["own"] for case in both),
        stock_worst=min(case["stock"] for case in both),
        own_worst=min(case["own"] for case in both),
        cases=len(cases),
        compared=len(both),
        below=[case["case"] for case in both if min(case["stock"], case["own"]) < 0.99],
        lost=lost,
        rival_found_none=sum(case["rival"] is None for case in cases),
        seconds=sum(case["seconds"] for case in both),
        rival_seconds=sum(case["rival_seconds"] for case in both),
        slower=sum(case["seconds"] > case["rival_seconds"] for case in both),
    )


def compare(number: int) -> Case:
    """Both planners on case ``number``: ms of the slowest rank by planner and model, seconds, and the two ratios."""
    config = random_config(number)
    inputs = PlanInputs.of(config, *dataset(config.data))
    stock = Stock(config, inputs.schema, inputs.profile, build_problem(inputs).room)
    plan, seconds = _timed(lambda: make_plan(inputs), PlanError)
    options, rival_seconds = _timed(stock.plan, PlannerError)
    case: Case = {
        "case": number,
        "tables": len(inputs.schema.sparse),
        "ranks": config.world_size,
        "device": config.hardware.device,
        "seconds": seconds,
        "rival_seconds": rival_seconds,
        "ours": None,
        "rival": None,
    }
    if plan is not None:
        case["ours"] = [stock.rate(plan), plan.predicted_step_ms]
    if options is not None:
        theirs = _as_plan(options, inputs)
        case["rival"] = [slowest_rank(options, config.world_size), predict(theirs, inputs).step_ms]
    if case["ours"] and case["rival"]:
        case |= {name: case["rival"][i] / case["ours"][i] for i, name in enumerate(("stock", "own"))}
    return case


def _timed(work: Any, refused: type[Exception]) -> tuple[Any, float]:
    began = time.perf_counter()
    try:
        result = work()
    except refused:
        result = None
    return result, round(time.perf_counter() - began, 4)


def random_config(number: int) -> Config:
    """The configuration of case ``number``."""
    rng = np.random.default_rng(number)
    cuda = rng.random() < 0.6
    hosts, ranks = (
        ((1, 2), (1, 4), (1, 8), (2, 4), (2, 8))[rng.integers(5)] if cuda else ((1, 2), (1, 4), (2, 2))[rng.integers(3)]
    )
    tables, largest = int(rng.integers(4, 41)), 3e7 if cuda else 3e6
    rows = np.exp(rng.uniform(np.log(1e2), np.log(largest), tables)).astype(int)
    dim = int(rng.choice([16, 32, 64, 128, 256]))
    pooling = np.where(rng.random(tables) < 0.6, 1.0, np.exp(rng.uniform(0.0, np.log(40), tables)))
    zipf = rng.uniform(0.6, 1.3, tables)
    config = compose(["experiment=dlrmv2", f"hardware={'h100x8' if cuda else 'cpu_cluster'}", "plan.hbm_reserve=0.15"])
    config.data.tables = {
        f"T{i}": TableFigures(rows=int(rows[i]), pooling=float(pooling[i]), zipf=float(zipf[i])) for i in range(tables)
    }
    config.model.embedding_dim, config.train.global_batch = dim, int(rng.choice([512, 2048, 8192])) * hosts * ranks
    hardware = replace(config.hardware, name="random", hosts=hosts, ranks_per_host=ranks, ssd_gib=0.0)
    # What a rank needs beside tables is kept free, so memory is given as that and a multiple of the tables' share.
    share = float(rows.sum()) * (dim + 1) * 4 / GIB / (hosts * ranks) * float(rng.choice([0.7, 1.5, 3.0, 10.0]))
    config.hardware = replace(hardware, hbm_gib=200.0, ddr_gib=2_000.0) if cuda else replace(hardware, ddr_gib=2_000.0)
    kept = build_problem(PlanInputs.of(config, *dataset(config.data)))
    beside = sum(kept.reserved.values()) / GIB / 0.85
    if cuda:
        config.hardware = replace(config.hardware, hbm_gib=round(beside + share / 0.85 + 0.2, 2))
    else:
        config.hardware = replace(config.hardware, ddr_gib=round(beside + max(share, 0.0) * 1.6 / 0.85 + 1.0, 2))
    return config


def _as_plan(options: list[ShardingOption], inputs: PlanInputs) -> Plan:
    """TorchRec's plan as a record, with the cache that its model assumes."""
    hardware, tables = inputs.hardware, {}
    for option in options:
        rows, dim = option.tensor.shape
        tier = TIER_OF_KERNEL.get(option.compute_kernel, "hbm" if hardware.device == "cuda" else "ddr")
        shards = []
        for shard in option.shards:
            (row, column), (count, width) = shard.offset, shard.size
            shards.append(ShardPlan(rank=int(shard.rank or 0), row=row, rows=count, column=column, columns=width))
        tables[option.name] = table_plan(
            rows,
            dim,
            *shards,
            pooling=inputs.profile.sparse[option.name].pooling,
            tier=tier,
            sharding=option.sharding_type,
            kernel=option.compute_kernel,
            cache_rows=max(1, round(CACHED * rows)) if tier == "hbm_cached" else 0,
        )
    plan = plan_with(tables, hardware.world_size, hardware.ranks_per_host, inputs.batch)
    return replace(plan, hardware=hardware.name, device=hardware.device)


if __name__ == "__main__":
    main()
