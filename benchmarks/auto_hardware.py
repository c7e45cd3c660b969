"""``make bench-auto``: ``hardware=auto`` on a machine that was never calibrated: predictions beside the first run's.

The demo (300,000 rows) and Adult, each with 1, 2 and 4 threads; every run has an empty cache folder, so each of them
calibrates first. ``ratio``: the worst relative error of a step; ``memory``: the worst one of training's memory;
``seconds``: the longest calibration. Run nothing beside it.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from benchmarks.harness import NIGHTJAR, finish, options, python, result_of, show

ADULT = Path(__file__).parents[2] / "shared" / "data" / "adult.data"
EXPERIMENTS = {
    "demo": ["experiment=demo", "data.synthetic.rows=300000"],
    "adult": ["experiment=adult", f"data.path={ADULT}"],
}


def main() -> None:
    names = list(EXPERIMENTS)
    several = {"nargs": "+"}
    given = options(
        __doc__, threads=([1, 2, 4], None, several), experiments=(names, None, {"choices": names, **several})
    )
    cases = {f"{name}_{count}": first_run(name, count) for name in given.experiments for count in given.threads}
    finish(
        "auto_hardware",
        max(case["step_error"] for case in cases.values()),
        memory=max(case["memory_error"] for case in cases.values()),
        seconds=max(case["calibration_s"] for case in cases.values()),
        **{f"{name}_{key}": value for name, case in cases.items() for key, value in case.items()},
    )


def first_run(name: str, threads: int) -> dict[str, float]:
    """One first run with so many threads, on so many cores of this machine."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    with tempfile.TemporaryDirectory() as folder:
        settings = ["run=first", f"store={folder}/store", f"train.threads_per_rank={threads}"]
        python(
            *(*NIGHTJAR, "run", "hardware=auto", *EXPERIMENTS[name], "stages=[ingest,plan,partition,train]", *settings),
            enter=lambda: os.sched_setaffinity(0, cores),
            XDG_CACHE_HOME=f"{folder}/cache",
            XDG_CONFIG_HOME=f"{folder}/config",
        )
        trained = result_of(f"{folder}/store", "first")["train"]
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
    show(f"{name}, {threads} threads", case, ".2f")
    return case


if __name__ == "__main__":
    main()
