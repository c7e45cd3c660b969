"""``make bench-plan-random``: random planning cases, our plans against those of TorchRec's planner as it comes.

A case draws tables (number, rows, width, ids a sample, skew), ranks, batch and how tight memory is. TorchRec's
``EmbeddingShardingPlanner`` gets the memory that a rank may fill with tables, and keeps its own proposers, estimators
and partitioner. Both plans are rated in both cost models.

``ratio``: the worst of all cases and both models, TorchRec's cost over ours; ``median``: of the cases, each by the
model in which it gains less. ``stock_median`` and ``own_median`` are by model.
"""

from __future__ import annotations

import contextlib
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
from torchrec.distributed.planner.types import PlannerError, ShardingOption

from benchmarks.harness import finish, options, processes, show, silent
from benchmarks.models_and_rows import plan_with, table_plan
from benchmarks.stock import Stock, slowest_rank
from pipeline.config import Config, TableFigures
from pipeline.config.compose import compose
from pipeline.core.cpus import available_cpus
from pipeline.core.errors import PlanError
from pipeline.core.units import GIB
from pipeline.ingest.table_specs import dataset
from pipeline.planning import PlanInputs, make_plan
from pipeline.planning.problem import build_problem
from pipeline.planning.step_prediction import predict
from pipeline.records import Plan, ShardPlan

CACHED = 0.2  # TorchRec's share of a table's rows in a cache
TIER_OF_KERNEL = {"fused_uvm": "ddr", "fused_uvm_caching": "hbm_cached"}
MODELS = ("stock", "own")
Case = dict[str, Any]


def main() -> None:
    given = options(__doc__, cases=200, processes=min(2, available_cpus()))
    cases = []
    with processes(given.processes) as pool:
        for case in pool.map(compare, range(given.cases)):
            show(f"case {case['case']}", case, ".4g")
            cases.append(case)
    both = [case for case in cases if case["ours"] and case["rival"]]
    gains = {model: [case["rival"][i] / case["ours"][i] for case in both] for i, model in enumerate(MODELS)}
    least = [min(pair) for pair in zip(*gains.values(), strict=True)]
    lost = [case["case"] for case in cases if case["ours"] is None and case["rival"] is not None]
    finish(
        "plan_random",
        0.0 if lost else min(least),
        median=statistics.median(least),
        **{f"{model}_median": statistics.median(each) for model, each in gains.items()},
        **{f"{model}_worst": min(each) for model, each in gains.items()},
        cases=len(cases),
        compared=len(both),
        lost=lost,
    )


def compare(number: int) -> Case:
    """Both planners on case ``number``: ms of the slowest rank in each of ``MODELS``, None where one has no plan."""
    silent()
    config = random_config(number)
    inputs = PlanInputs.of(config, *dataset(config.data))
    stock = Stock(config, inputs.schema, inputs.profile, build_problem(inputs).room)
    ours = rival = None
    with contextlib.suppress(PlanError):
        plan = make_plan(inputs)
        ours = [stock.rate(plan), plan.predicted_step_ms]
    with contextlib.suppress(PlannerError):
        options = stock.plan()
        rival = [slowest_rank(options, config.world_size), predict(_as_plan(options, inputs), inputs).step_ms]
    return {"case": number, "ours": ours, "rival": rival}


def random_config(number: int) -> Config:
    """The configuration of case ``number``."""
    rng = np.random.default_rng(number)
    cuda = rng.random() < 0.6
    worlds = ((1, 2), (1, 4), (1, 8), (2, 4), (2, 8)) if cuda else ((1, 2), (1, 4), (2, 2))
    hosts, ranks = worlds[rng.integers(len(worlds))]
    tables = int(rng.integers(4, 41))
    rows = np.exp(rng.uniform(np.log(1e2), np.log(3e7 if cuda else 3e6), tables)).astype(int).tolist()
    dim = int(rng.choice([16, 32, 64, 128, 256]))
    pooling = np.where(rng.random(tables) < 0.6, 1.0, np.exp(rng.uniform(0.0, np.log(40), tables))).tolist()
    zipf = rng.uniform(0.6, 1.3, tables).tolist()
    config = compose(["experiment=dlrmv2", f"hardware={'h100x8' if cuda else 'cpu_cluster'}", "plan.hbm_reserve=0.15"])
    config.data.tables = {f"T{i}": TableFigures(rows=rows[i], pooling=pooling[i], zipf=zipf[i]) for i in range(tables)}
    config.model.embedding_dim, config.train.global_batch = dim, int(rng.choice([512, 2048, 8192])) * hosts * ranks
    large = {"hbm_gib": 200.0, "ddr_gib": 2_000.0} if cuda else {"ddr_gib": 2_000.0}
    config.hardware = replace(config.hardware, name="random", hosts=hosts, ranks_per_host=ranks, ssd_gib=0.0, **large)
    # What a rank needs beside tables is kept free, so memory is given as that and a multiple of the tables' share.
    share = float(sum(rows)) * (dim + 1) * 4 / GIB / (hosts * ranks) * float(rng.choice([0.7, 1.5, 3.0, 10.0]))
    beside = sum(build_problem(PlanInputs.of(config, *dataset(config.data))).reserved.values()) / GIB / 0.85
    if cuda:
        config.hardware.hbm_gib = round(beside + share / 0.85 + 0.2, 2)
    else:
        config.hardware.ddr_gib = round(beside + share * 1.6 / 0.85 + 1.0, 2)
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
