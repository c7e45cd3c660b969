"""``python -m benchmarks.lanes``: test NE of 64 lanes against one lane, the order before there were lanes, by seed.

A seed draws the log, initial values and the order of the rows; the two orders share log and initial values. The train
rows have some 520 row groups, so a window of eight is 1.5 % of an epoch, as in a log of 34 million rows. ``--drift``:
radians by which the effects turn in the log's seven days, whose last one is held out. ``ratio``: 1 + the mean relative
difference of NE; ``error`` is its standard error.
"""

from __future__ import annotations

import argparse
import tempfile

import numpy as np

from benchmarks.common import finish
from benchmarks.runs import processes, run

LANES = (1, 64)


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=125_000)
    options.add_argument("--seeds", type=int, default=10)
    options.add_argument("--drift", type=float, default=0.0)
    options.add_argument("--set", nargs="*", default=[], help="overrides of every run's configuration")
    given = options.parse_args()
    changes = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.seeds):
            own = [*_base(given.rows, given.drift), f"store={folder}", f"seed={seed}", *given.set]
            with processes(1) as pool:
                before, now = pool.map(_ne, [[*own, f"run=s{seed}l{n}", f"train.lanes={n}"] for n in LANES])
            changes.append(now / before - 1)
            print(f"seed {seed}: NE {before:.5f}, with lanes {now:.5f}, {changes[-1]:+.3%}", flush=True)
    error = float(np.std(changes, ddof=1) / len(changes) ** 0.5)
    finish("lanes", 1 + float(np.mean(changes)), error=error, changes=[round(each, 6) for each in changes])


def _base(rows: int, drift: float) -> list[str]:
    log = ["data=synthetic", f"data.synthetic.rows={rows}", f"ingest.rows_per_group={rows * 4 // 5 // 520}"]
    if drift:
        log += [f"data.synthetic.drift={drift / 7}", "data.synthetic.days=7", "data.split.by=day"]
    train = ["train.global_batch=448", "train.guard.collapse=false", "train.log_every_steps=100"]
    return [*log, "model=dlrm_small", *train]


def _ne(settings: list[str]) -> float:
    return float(run(settings)["evaluate"].summary["ne"])


if __name__ == "__main__":
    main()
