"""``make bench-plan``: our plan of MLPerf's DLRMv2 tables against TorchRec's planners, in TorchRec's cost model.

``ratio``: the default planner's cost over ours, for 16 hosts of 8 H100s; ``dynamic_ratio``: the same of the proposer by
dynamic programming. Then the same tables on 2 ranks with little memory and an SSD, and 1,000 random tables on 128
ranks. Every case runs in a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness import finish, options, peak_bytes, processes, show, silent, words
from pipeline.config import Config, TableFigures
from pipeline.config.compose import compose
from pipeline.core.units import GIB
from pipeline.ingest.table_specs import dataset
from pipeline.planning import PlanInputs, make_plan
from pipeline.records import Plan, Profile

BINS = 100
CLUSTER = ["experiment=dlrmv2", "hardware=h100x16x8"]
SMALL = words("""experiment=dlrmv2 hardware=h100x8 hardware.name=small hardware.ranks_per_host=2 hardware.hbm_gib=16
    hardware.ddr_gib=16 hardware.ssd_gib=200""")


def main() -> None:
    options(__doc__)
    cases = {}
    with processes(1, runs_each=1) as pool:
        for name in CASES:
            cases[name] = pool.submit(measure, name).result()
            show(name, cases[name], ".6g")
    cost, default, dynamic = (cases[name].pop("cost_ms") for name in ("ours", "default", "dynamic"))
    finish(
        "plan",
        default / cost,
        cost_ms=cost,
        default_cost_ms=default,
        dynamic_cost_ms=dynamic,
        dynamic_ratio=dynamic / cost,
        **{f"{case}_{key}": value for case, part in cases.items() for key, value in part.items()},
    )


def measure(case: str) -> dict[str, Any]:
    """The case's figures and this process's peak memory."""
    silent()
    return {**CASES[case](), "peak_rss_gib": round(peak_bytes() / GIB, 3)}


def _planned(config: Config) -> tuple[Plan, Profile, float]:
    schema, profile = dataset(config.data)
    began = time.perf_counter()
    plan = make_plan(PlanInputs.of(config, schema, profile))
    return plan, profile, round(time.perf_counter() - began, 3)


def _ours() -> dict[str, Any]:
    from benchmarks.stock import Stock

    config = compose(CLUSTER)
    plan, _, seconds = _planned(config)
    return {"cost_ms": Stock(config, *dataset(config.data)).rate(plan), "seconds": seconds, "gap": plan.gap}


def _stock(dynamic: bool = False) -> dict[str, Any]:
    from torchrec.distributed.planner.proposers import DynamicProgrammingProposer

    from benchmarks.stock import Stock, slowest_rank

    config = compose(CLUSTER)
    began = time.perf_counter()
    found = Stock(config, *dataset(config.data)).plan(DynamicProgrammingProposer(BINS) if dynamic else None)
    return {"cost_ms": slowest_rank(found, config.world_size), "seconds": round(time.perf_counter() - began, 3)}


def _ssd() -> dict[str, Any]:
    """``lookup_share``: of all lookups, those that the plan expects to read from the SSD."""
    plan, profile, seconds = _planned(compose(SMALL))
    used = {tier: sum(rank[tier] for rank in plan.memory) for tier in ("hbm", "ddr", "ssd")}
    total = sum(profile.sparse[name].pooling for name in plan.tables)
    on_ssd = [(profile.sparse[name].pooling, table) for name, table in plan.tables.items() if table.tier == "ssd"]
    cold = sum(pooling * (1 - table.hit_rate) for pooling, table in on_ssd) / total
    return {
        "seconds": seconds,
        **{f"{tier}_gib": round(size / GIB, 3) for tier, size in used.items()},
        "step_ms": plan.predicted_step_ms,
        "lookup_share": round(cold, 6),
        "least_lookup_share": round(_least_lookups(plan, profile), 6),
    }


def _least_lookups(plan: Plan, profile: Profile) -> float:
    """The share that were left for the SSD if HBM and DDR held the rows most looked up, of any table.

    By the profiles' own curves, taken as straight between their points; memory is what the plan puts into HBM and DDR.
    """
    lookups, sizes = list[float](), list[float]()
    for name, table in plan.tables.items():
        feature = profile.sparse[name]
        lookups += (feature.pooling * np.diff([0.0, *feature.hot_share])).tolist()
        sizes += (np.diff([0, *feature.hot_rows]) * ((table.dim + 1) * 4)).tolist()
    most = np.argsort(-np.divide(lookups, sizes))
    room = sum(rank["hbm"] + rank["ddr"] for rank in plan.memory)
    filled, found = (np.cumsum([0.0, *np.take(each, most)]) for each in (sizes, lookups))
    fits = np.interp(room, filled, found)
    return float(1 - fits / np.sum(lookups))


def _thousand() -> dict[str, Any]:
    """1,000 tables of 1,000 to 30 million rows, 1 to 50 ids a sample, Zipf 0.6 to 1.3, D 64, on 128 ranks."""
    config, rng = compose([*CLUSTER, "model.embedding_dim=64"]), np.random.default_rng(2026)
    rows = np.exp(rng.uniform(np.log(1e3), np.log(3e7), 1000)).astype(int).tolist()
    pooling = np.exp(rng.uniform(0.0, np.log(50), 1000)).tolist()
    zipf = rng.uniform(0.6, 1.3, 1000).tolist()
    config.data.tables = {f"T{i}": TableFigures(rows=rows[i], pooling=pooling[i], zipf=zipf[i]) for i in range(1000)}
    plan, _, seconds = _planned(config)
    return {"seconds": seconds, "step_ms": plan.predicted_step_ms, "table_gib": round(sum(rows) * 65 * 4 / GIB, 1)}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "ours": _ours,
    "default": _stock,
    "dynamic": lambda: _stock(dynamic=True),
    "ssd": _ssd,
    "thousand": _thousand,
}


if __name__ == "__main__":
    main()
