"""The four id mappings at equal rows: test NE and AUC on synthetic logs whose ids are alike in groups and on real ones.

    python -m benchmarks.mappings [--logs synthetic,flights] [--seeds 3] [--rows 300000] [--table 1000]

Every mapping trains the same model on the same logs, one epoch; all that differs is which ids share a row. A seed draws
other synthetic logs, and other initial values everywhere. ``flights``: those of ``benchmarks.flights``, fetched once;
``--adult FILE`` and ``--criteo FILE`` add a log that lies here. Real logs have fewer ids, so their tables are smaller.
The ratio of the JSON line: NE of ``learned`` to the best of the three others, on the first log, the mean over seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import flights
from pipeline.cli import main as nightjar

MAPPINGS = ("vocab", "hash", "double_hash", "learned")
REAL_TABLE, ADULT_TABLE = 150, 12  # rows of a table: about a tenth of the ids of the largest features


def main() -> None:
    """Train once for each log, seed and mapping, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logs", default="synthetic", help="synthetic, flights, or both")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--ids", type=int, default=20_000)
    parser.add_argument("--table", type=int, default=1_000)
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--adult", default=None)
    parser.add_argument("--criteo", default=None)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for log, settings in _logs(args).items():
        runs = [{m: measured([*settings, f"seed={seed + 1}"], m) for m in MAPPINGS} for seed in range(args.seeds)]
        found[log] = {m: _summary([run[m] for run in runs]) for m in MAPPINGS} | {"ratio": _ratio(runs)}
        _show(log, found[log])
    first = next(iter(found))
    print(json.dumps({"bench": "mappings", "ratio": round(found[first]["ratio"], 5), "log": first, "figures": found}))


def _logs(args: argparse.Namespace) -> dict[str, list[str]]:
    """The settings of every log that is asked for."""
    logs: dict[str, list[str]] = {}
    for name in filter(None, args.logs.split(",")):
        if name == "synthetic":
            logs[name] = [
                "data=synthetic",
                f"data.synthetic.rows={args.rows}",
                f"data.synthetic.ids_per_feature={args.ids}",
                f"data.synthetic.id_groups={args.groups}",
                "data.synthetic.zipf=1.05",
                f"data.sparse_defaults.rows={args.table}",
            ]
        elif (path := flights.flights()) is not None:
            settings = [one for one in flights.overrides(path) if "sparse_defaults" not in one]
            logs[name] = [*settings, "data.sparse_defaults.min_count=1", f"data.sparse_defaults.rows={REAL_TABLE}"]
    if args.adult:
        logs["adult"] = ["data=adult", f"data.path={args.adult}", f"data.sparse_defaults.rows={ADULT_TABLE}"]
    if args.criteo:
        logs["criteo"] = [
            "experiment=criteo",
            f"data.path={args.criteo}",
            "data.sparse_defaults.min_count=1",
            f"data.sparse_defaults.rows={args.table}",
        ]
    return logs


def measured(overrides: list[str], mapping: str) -> dict[str, float]:
    """NE and AUC on the test rows, and the seconds of ingestion, after training with ``mapping``."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            *overrides,
            "run=m",
            f"store={folder}",
            f"data.sparse_defaults.mapping={mapping}",
            "model.embedding_dim=8",
            "model.bottom_mlp=[32]",
            "model.top_mlp=[64]",
            "train.precision=fp32",
            "train.log_every_steps=1000",
            "train.global_batch=512",
            "train.warmup_steps=20",
            "train.sparse_lr=0.1",
            "train.schedule=constant",
            "launch.inline=[ingest,plan,partition,train,evaluate]",
        ]
        with contextlib.redirect_stdout(io.StringIO()):
            code = nightjar(["run", *settings])
        result = json.loads(Path(folder, "runs/m/result.json").read_text())
    if code:
        raise SystemExit(f"{mapping}: {result['error']['message']}")
    return {"ne": result["eval"]["ne"], "auc": result["eval"]["auc"], "seconds": result["stages"]["ingest"]["seconds"]}


def _summary(runs: list[dict[str, float]]) -> dict[str, float]:
    """Means over the seeds, and how far NE spreads (standard deviation; 0 of one seed)."""
    means = {name: statistics.fmean(run[name] for run in runs) for name in runs[0]}
    return means | {"ne_spread": statistics.stdev([run["ne"] for run in runs]) if len(runs) > 1 else 0.0}


def _ratio(runs: list[dict[str, dict[str, float]]]) -> float:
    return statistics.fmean(run["learned"]["ne"] / min(run[m]["ne"] for m in MAPPINGS[:3]) for run in runs)


def _show(log: str, figures: dict[str, Any]) -> None:
    print(f"{'logs':<12}{'mapping':<14}{'NE':>9}{'spread':>9}{'AUC':>9}{'seconds':>9}")
    for m in MAPPINGS:
        one = figures[m]
        print(
            f"{log:<12}{m:<14}{one['ne']:>9.5f}{one['ne_spread']:>9.5f}{one['auc']:>9.5f}{one['seconds']:>9.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
