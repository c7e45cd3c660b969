"""A made-up run that has every part, and its files in a store."""

import math
import random

from pipeline.records import Result
from pipeline.report.records import MetricsLog

TABLES = {
    f"C{index}": (3 + 2_000 * index, ("data_parallel", "table_wise", "row_wise")[index % 3]) for index in range(26)
}
CONFIG = """\
run: demo
store: ./store
seed: 2026
data:
  name: synthetic
  format: synthetic
  columns: []
  label:
    column: label
  sparse:
    C1:
      rows: 2002
model:
  name: dlrm
  top_mlp:
  - 512
  - 256
train:
  global_batch: 4096
  lr: 0.002
launch:
  name: local
"""


PHASES_MS = {
    "input_exchange": {"predicted_ms": 2.0, "measured_ms": 2.5},
    "lookup": {"predicted_ms": 4.0, "measured_ms": 5.0},
    "dense": {"predicted_ms": 30.0, "measured_ms": 31.5},
    "overhead": {"predicted_ms": 0.0, "measured_ms": 1.25},
}


def make_result(**changes):
    names = ("ingest", "plan", "partition", "train", "evaluate")
    paths = ("datasets/synthetic", "plans", "towers", "runs/demo/train", "runs/demo/evaluate")
    seconds = (9.731, 0.412, 0.006, 61.27, 4.113)
    result = {
        "run": "demo",
        "status": "done",
        "stages": {
            name: {"status": "done", "seconds": took, "artifact": f"{path}/{'0123456789abcdef' * 2}"}
            for name, path, took in zip(names, paths, seconds, strict=True)
        },
        "ingest": {"rows": 400_000, "rows_quarantined": 12, "bytes_in": 98_123_456, "rows_per_s": 412_345.6},
        "plan": {
            "tiers": {"hbm_bytes": 0, "ddr_bytes": 41_943_040, "ssd_bytes": 0},
            "predicted_step_ms": 1.2345,
            "tables": {
                name: {"tier": "ddr", "sharding": kind, "ranks": [index % 2] if kind == "table_wise" else [0, 1]}
                for index, (name, (_, kind)) in enumerate(TABLES.items())
            },
        },
        "train": {
            "samples": 4_800_000,
            "steps": 1_172,
            "seconds": 58.9,
            "samples_per_s": 81_494.2,
            "data_wait_share": 0.0041,
            "peak_rss_bytes": 1_234_567_890,
            "world_size": 2,
            "phases": PHASES_MS,
            "step": {"predicted_ms": 48.1, "measured_ms": 50.25},
            "memory": {"predicted_bytes": 629_145_600, "measured_bytes": 734_003_200},
        },
        "checkpoint": {
            "count": 3,
            "bytes_written": 83_886_080,
            "bytes_full_equivalent": 125_829_120,
            "stall_share": 0.0021,
        },
        "eval": {
            "samples": 80_123,
            "ne": 0.83214,
            "auc": 0.78123,
            "logloss": 0.46712,
            "calibration": 1.0031,
            "bayes_ne": 0.8021,
        },
    }
    return {**result, **changes}


def result_of(record):
    """The result whose JSON ``record`` is, or parts of it."""
    return Result.from_json({"run": "demo", "status": "done", **record})


def make_record(step, total=1172, **changes):
    noise = random.Random(step)
    record = {
        "step": step,
        "steps_total": total,
        "samples": step * 4096,
        "samples_per_s": 81_234 * (0.9 + 0.15 * noise.random()),
        "data_wait_share": 0.004 * noise.random() + (0.05 if step < 40 else 0),
        "seconds": step * 0.05,
        "loss": 0.46 + 0.2 * math.exp(-step / 90) + 0.01 * noise.gauss(0, 1),
        "lr": 0.002 * min(1, step / 100),
        "ne_window": 0.83 + 0.25 * math.exp(-step / 100) + 0.004 * noise.gauss(0, 1),
        "eta_seconds": (total - step) * 0.05,
    }
    return {**record, **changes}


def make_plan():
    kernels = {"data_parallel": "dense", "table_wise": "fused", "row_wise": "fused"}
    tables = {
        name: {
            "rows": rows,
            "dim": 16,
            "pooling": 1.0,
            "tier": "ddr",
            "sharding": kind,
            "kernel": kernels[kind],
            "shards": [{"rank": 0, "row": 0, "rows": rows, "column": 0, "columns": 16}],
            "cost_ms": rows / 1e6,
            "reason": f"{name} is cheapest {kind}",
        }
        for name, (rows, kind) in TABLES.items()
    }
    return {
        "version": 2,
        "hardware": "laptop",
        "device": "cpu",
        "world_size": 2,
        "ranks_per_host": 2,
        "global_batch": 4096,
        "tables": tables,
        "memory": [{"hbm": 0, "ddr": 20_971_520, "ssd": 0}] * 2,
        "predicted_step_ms": 1.2345,
    }


def make_reliability():
    predicted = [0.02 + 0.045 * index for index in range(18)]
    return {
        "predicted": predicted,
        "observed": [min(1, p * 1.03 + 0.012 * math.sin(9 * p)) for p in predicted],
        "rows": [4_000] * 18,
    }


def fill(store, result=None, records=None, reliability=True, plan=None):
    """Write everything ``write_report`` may find for run ``demo``."""
    result = make_result() if result is None else result
    store.write_json("runs/demo/result.json", result)
    store.write_bytes("runs/demo/config.yaml", CONFIG.encode())
    log = MetricsLog(store, "demo")
    for record in [make_record(step) for step in [*range(20, 1172, 20), 1172]] if records is None else records:
        log.append(record)
    for name, file, value in (
        ("plan", "plan.json", plan or make_plan()),
        ("evaluate", "reliability.json", make_reliability() if reliability else None),
    ):
        path = result.get("stages", {}).get(name, {}).get("artifact")
        if path and value:
            with store.draft(path, kind=name, key="k", config={}, inputs={}) as draft:
                draft.write_json(file, value)
                draft.commit({})
    return result
