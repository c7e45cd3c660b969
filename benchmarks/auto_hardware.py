"""``make bench-auto``: ``hardware=auto`` on a machine that was never calibrated: predictions beside the first run's.

The demo (300,000 rows) and Adult, each with 1, 2 and 4 threads; every run has an empty cache folder, so each of them
calibrates first. ``ratio``: the worst relative error of a step; ``memory``: the worst one of training's memory;
``seconds``: the longest calibration. Run nothing beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import finish

ADULT = Path(__file__).parents[2] / "shared" / "data" / "adult.data"
EXPERIMENTS = {
    "demo": ["experiment=demo", "data.synthetic.rows=300000"],
    "adult": ["experiment=adult", f"data.path={ADULT}"],
}
STAGES = "stages=[ingest,plan,partition,train]"


def main() -> None:
    """Run every case and print the JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4])
    options.add_argument("--experiments", nargs="+", default=list(EXPERIMENTS), choices=list(EXPERIMENTS))
    given = options.parse_args()
    cases = {f"{name}_{count}": _run(name, count) for name in given.experiments for count in given.threads}
    finish(
        "auto_hardware",
        max(case["step_error"] for case in cases.values()),
        memory=max(case["memory_error"] for case in cases.values()),
        seconds=max(case["calibration_s"] for case in cases.values()),
        **{f"{name}_{key}": value for name, case in cases.items() for key, value in case.items()},
    )


def _run(name: str, threads: int) -> dict[str, Any]:
    """One first run with so many threads, on so many cores of this machine."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pipeline.cli",
            "run",
            "hardware=auto",
            *EXPERIMENTS[name],
            STAGES,
            "run=first",
            f"store={folder}/store",
            f"train.threads_per_rank={threads}",
        ]
        environment = {**os.environ, "XDG_CACHE_HOME": f"{folder}/cache", "XDG_CONFIG_HOME": f"{folder}/config"}
        subprocess.run(
            command,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        trained = json.loads(Path(folder, "store/runs/first/result.json").read_text())["train"]
        (kept,) = Path(folder, "cache/nightjar/machines").glob("*.json")
        calibration = json.loads(kept.read_text())
    step, memory = trained["step"], trained["memory"]
    case = {
        "step_ms": step["measured_ms"],
        "predicted_ms": step["predicted_ms"],
        "step_error": abs(step["predicted_ms"] / step["measured_ms"] - 1),
        "memory_mib": memory["measured_bytes"] / 2**20,
        "predicted_mib": memory["predicted_bytes"] / 2**20,
        "memory_error": abs(memory["predicted_bytes"] / memory["measured_bytes"] - 1),
        "calibration_s": calibration["seconds"],
    }
    print(f"{name}, {threads} threads: {case}", flush=True)
    return case


if __name__ == "__main__":
    main()
