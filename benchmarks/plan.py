"""``make bench-plan``: our plan of MLPerf's DLRMv2 tables against TorchRec's planners', in TorchRec's cost model.

``ratio``: the default planner's cost over ours, for 16 hosts of 8 H100s. Then the same tables on 2 ranks with little
memory, with an SSD and without, and 1,000 random tables on 128 ranks. Every case runs in a process of its own.
"""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness import NIGHTJAR, finish, options, words
from pipeline.config import Config, TableFigures
from pipeline.config.compose import compose
from pipeline.core.errors import NightjarError
from pipeline.ingest.table_specs import dataset
from pipeline.planning import PlanInputs, make_plan
from pipeline.records import Plan, Profile

GIB = 2**30
BINS = 100
CLUSTER = ["experiment=dlrmv2", "hardware=h100x16x8"]
SMALL = words("experiment=dlrmv2 hardware=h100x8 hardware.name=small hardware.ranks_per_host=2")
SMALL += words("hardware.hbm_gib=16 hardware.ddr_gib=16")
SSD_GIB = 200


def main() -> None:
    """Run all cases, say what was promised and missed, and print the JSON line."""
    given = options(__doc__, case=(None, "only this one, in this process", {"choices": list(CASES)}))
    if given.case:
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        print(json.dumps(measure(CASES[given.case])))
        return
    cases = {name: _child(name) for name in CASES}
    ours, ssd, none, many = (cases[name] for name in ("ours", "ssd", "no_ssd", "thousand"))
    cost, default, dynamic = (cases[name].get("cost_ms", float("nan")) for name in ("ours", "default", "dynamic"))
    checks = {
        "DLRMv2 on 128 ranks planned in under 30 s": ours.get("seconds", 1e9) < 30,
        "cost at most the default planner's": cost <= default * (1 + 1e-9),
        f"cost within 10% of the dynamic-programming proposer's ({BINS} bins)": cost <= 1.1 * dynamic,
        "2 ranks of 16 GiB HBM, 16 GiB DDR and an SSD: a plan": "error" not in ssd,
        "the coldest bytes lie on the SSD": bool(ssd.get("coldest")),
        "without the SSD: exit 4 and the shortfall": none.get("exit_code") == 4 and none.get("names_shortfall", False),
        "1,000 tables on 128 ranks in under 60 s": many.get("seconds", 1e9) < 60,
        "1,000 tables on 128 ranks in under 4 GiB": many.get("peak_rss_gib", 1e9) < 4,
    }
    for text, held in checks.items():
        print(f"{'ok    ' if held else 'MISSED'} {text}")
    finish(
        "plan",
        default / cost,
        cost_ms=cost,
        default_cost_ms=default,
        dynamic_cost_ms=dynamic,
        dynamic_ratio=dynamic / cost,
        missed=[text for text, held in checks.items() if not held],
        **{f"{case}_{key}": value for case, part in cases.items() for key, value in part.items() if key != "cost_ms"},
    )


def _child(name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.plan", "--case", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        figures = {"error": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]}
    print(f"{name}: {json.dumps(figures)}", flush=True)
    return figures


def measure(case: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The case's figures and this process's peak memory; an error of the family becomes a figure."""
    try:
        figures = case()
    except NightjarError as error:
        figures = {"error": error.message, "exit_code": error.exit_code}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**figures, "peak_rss_gib": round(peak / GIB, 3)}


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
    plan, profile, seconds = _planned(compose([*SMALL, f"hardware.ssd_gib={SSD_GIB}"]))
    used = {tier: sum(rank[tier] for rank in plan.memory) for tier in ("hbm", "ddr", "ssd")}
    # Share of all lookups that the plan expects to read from the SSD.
    total = sum(profile.sparse[name].pooling for name in plan.tables)
    on_ssd = [(profile.sparse[name].pooling, table) for name, table in plan.tables.items() if table.tier == "ssd"]
    cold = sum(pooling * (1 - table.hit_rate) for pooling, table in on_ssd) / total
    return {
        "seconds": seconds,
        **{f"{tier}_gib": round(size / GIB, 3) for tier, size in used.items()},
        "step_ms": plan.predicted_step_ms,
        "lookup_share": round(cold, 6),
        "least_lookup_share": round(_least_lookups(plan, profile), 6),
        "coldest": used["ssd"] > 0 and cold < used["ssd"] / sum(used.values()),
    }


def _least_lookups(plan: Plan, profile: Profile) -> float:
    """The share that were left for the SSD if HBM and DDR held the rows most looked up, of any table.

    By the profiles' own curves, taken as straight between their points; memory is what the plan puts into HBM and DDR.
    """
    room = sum(rank["hbm"] + rank["ddr"] for rank in plan.memory)
    pieces = []
    for name, table in plan.tables.items():
        feature = profile.sparse[name]
        ks, shares = np.array([0, *feature.hot_rows]), np.array([0.0, *feature.hot_share])
        lookups, sizes = feature.pooling * np.diff(shares), np.diff(ks) * ((table.dim + 1) * 4)
        pieces += list(zip((lookups / sizes).tolist(), lookups.tolist(), sizes.tolist(), strict=True))
    left = total = sum(lookups for _, lookups, _ in pieces)
    for _, lookups, size in sorted(pieces, reverse=True):
        taken = min(room, size)
        left -= lookups * taken / size
        room -= taken
    return max(left, 0.0) / total


def _no_ssd() -> dict[str, Any]:
    """The command itself: its exit code, and whether its message says what is short."""
    with tempfile.TemporaryDirectory() as store:
        command = [sys.executable, *NIGHTJAR, "plan", *SMALL, "hardware.ssd_gib=0", f"store={store}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    message = done.stderr.strip()
    named = "short by" in message and "GiB" in message
    return {"exit_code": done.returncode, "names_shortfall": named, "message": message}


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
    "no_ssd": _no_ssd,
    "thousand": _thousand,
}


if __name__ == "__main__":
    main()
