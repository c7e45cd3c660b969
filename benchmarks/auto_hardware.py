"""``make bench-auto``: ``hardware=auto`` on a machine that was never calibrated: predictions beside the first run's.

The demo (300,000 rows) and Adult, each with 1, 2 and 4 threads; every run has an empty cache folder, so each of them
calibrates first. ``ratio``: the worst relative error of a step; ``memory``: the worst one of training's memory;
``seconds``: the longest calibration. Run nothing beside it.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from benchmarks.harness import ADULT, finish, options, show
from benchmarks.predict import predict_and_train

EXPERIMENTS = {
    "demo": ["experiment=demo", "data.synthetic.rows=300000"],
    "adult": ["experiment=adult", f"data.path={ADULT.resolve()}"],
}


def main() -> None:
    names, several = list(EXPERIMENTS), {"nargs": "+"}
    given = options(
        __doc__, threads=([1, 2, 4], None, several), experiments=(names, None, {"choices": names, **several})
    )
    cases = {}
    for name in given.experiments:
        for threads in given.threads:
            with tempfile.TemporaryDirectory() as folder:
                case = predict_and_train(folder, "first", EXPERIMENTS[name], threads)
                (kept,) = Path(folder, "cache/nightjar/machines").glob("*.json")
                case["calibration_s"] = json.loads(kept.read_text())["seconds"]
            show(f"{name}, {threads} threads", case, ".2f")
            cases[f"{name}_{threads}"] = case
    finish(
        "auto_hardware",
        max(abs(case["step"]) for case in cases.values()),
        memory=max(abs(case["memory"]) for case in cases.values()),
        seconds=max(case["calibration_s"] for case in cases.values()),
        **{f"{name}_{key}": value for name, case in cases.items() for key, value in case.items()},
    )


if __name__ == "__main__":
    main()
