"""``make bench-lanes``: test NE of 64 lanes against one lane, the order before there were lanes, on two logs.

``demo``: model and log of ``experiment=demo``. ``drift``: the same, but the effects turn by 0.03 radians a day for
seven days, and the last day is held out. A seed draws the log, initial values and the order of the rows; the two
orders share log and initial values. The train rows have some 520 row groups, so that 64 lanes fit and a window of
eight is 1.5 % of an epoch. Any other order of the rows changes NE a little, with lanes or without; 200 steps of 4,096
rows, whose learning rates fall to zero, make that 0.05 to 0.2 % a seed. So each side is the mean of ``--orders``
trainings on the same rows in row groups of another size, whose order is another one. ``--control``: one lane against
one lane with windows of nine row groups.

``ratio``: 1 + the larger of the logs' mean relative changes of NE; for each log the mean, its standard error, and the
change of every seed.
"""

from __future__ import annotations

import argparse
import tempfile

import numpy as np

from benchmarks.common import finish
from benchmarks.runs import processes, run

GROUPS = 520  # of the train rows: eight a lane, and some
LOGS = {
    "demo": ["data.split.test_share=0.2"],
    "drift": ["data.synthetic.drift=0.03", "data.synthetic.days=7", "data.split.by=day"],
}
BEFORE, LANES = "train.lanes=1", ("train.lanes=64",)
CONTROL = (BEFORE, "train.shuffle_window_groups=9")


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=1_000_000)
    options.add_argument("--seeds", type=int, default=10)
    options.add_argument("--logs", nargs="*", choices=LOGS, default=list(LOGS))
    options.add_argument("--orders", type=int, default=6, help="of the rows, on each side")
    options.add_argument("--jobs", type=int, default=2, help="seeds at a time, a thread each")
    options.add_argument("--control", action="store_true", help="one lane against one lane in another order")
    given = options.parse_args()
    other = CONTROL if given.control else LANES
    jobs = [(log, seed, given.rows, given.orders, other) for log in given.logs for seed in range(given.seeds)]
    changes: dict[str, list[float]] = {log: [] for log in given.logs}
    with processes(given.jobs) as pool:
        for (log, seed, *_), (before, now) in zip(jobs, pool.map(_pair, *zip(*jobs, strict=True)), strict=True):
            changes[log].append(now / before - 1)
            print(f"{log}, seed {seed}: NE {before:.5f}, then {now:.5f}, {changes[log][-1]:+.3%}", flush=True)
    means = {log: float(np.mean(each)) for log, each in changes.items()}
    errors = {f"{log}_error": float(np.std(each, ddof=1) / len(each) ** 0.5) for log, each in changes.items()}
    figures = {f"{log}_changes": [round(change, 6) for change in each] for log, each in changes.items()}
    finish("lanes", 1 + max(means.values()), **means, **errors, **figures)


def _pair(log: str, seed: int, rows: int, orders: int, other: tuple[str, ...]) -> tuple[float, float]:
    """Mean test NE of trainings with one lane, and of the same trainings with ``other``."""
    share = 6 / 7 if log == "drift" else 0.8
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for order in range(orders):
            own = [
                "experiment=demo",
                f"store={folder}",
                f"seed={seed}",
                *LOGS[log],
                f"data.synthetic.rows={rows}",
                f"ingest.rows_per_group={int(rows * share) // (GROUPS + order)}",
                "train.global_batch=4096",
                "train.threads_per_rank=1",
                "train.log_every_steps=100",
            ]
            found.append((_ne([*own, f"run=before{order}", BEFORE]), _ne([*own, f"run=then{order}", *other])))
    before, then = np.mean(found, axis=0)
    return float(before), float(then)


def _ne(settings: list[str]) -> float:
    return float(run(settings)["evaluate"].summary["ne"])


if __name__ == "__main__":
    main()
