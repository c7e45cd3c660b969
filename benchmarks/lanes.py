"""``make bench-lanes``: test NE of 64 lanes against one lane, the order before there were lanes, on two logs.

``demo``: model and log of ``experiment=demo``. ``drift``: the same, but the effects turn by 0.03 radians a day for
seven days, and the last day is held out. A seed draws the log, initial values and the order of the rows; the two
orders share log and initial values. The train rows have some 520 row groups, so that 64 lanes fit and a window of
eight is 1.5 % of an epoch. Any other order of the rows changes NE by 0.05 to 0.2 % a seed, with lanes or without. So
each side is the mean of ``--orders`` trainings on the same rows in row groups of another size, whose order is another
one.

``ratio``: 1 + the larger of the logs' mean relative changes of NE; for each log the mean, its standard error, and the
change of every seed.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from benchmarks.harness import finish, options, standard_error
from benchmarks.studies import per_case, trained

GROUPS = 520  # of the train rows: eight a lane, and some
LOGS = {
    "demo": ["data.split.test_share=0.2"],
    "drift": ["data.synthetic.drift=0.03", "data.synthetic.days=7", "data.split.by=day"],
}


def main() -> None:
    given = options(
        __doc__,
        rows=1_000_000,
        seeds=10,
        logs=(list(LOGS), None, {"choices": LOGS}),
        orders=(6, "of the rows, on each side"),
        jobs=(2, "seeds at a time, a thread each"),
    )
    mean, figures = dict[str, float](), dict[str, Any]()
    for log in given.logs:
        found = per_case(change_of, given, [(log, seed) for seed in range(given.seeds)])
        mean[log] = float(np.mean(found))
        figures |= {f"{log}_error": standard_error(found), f"{log}_changes": [round(change, 6) for change in found]}
    finish("lanes", 1 + max(mean.values()), **mean, **figures)


def change_of(given: argparse.Namespace, folder: str, log: str, seed: int) -> float:
    """The relative change of mean test NE from trainings with one lane to the same with many."""
    train_rows = int(given.rows * (6 / 7 if log == "drift" else 0.8))
    world = ["experiment=demo", f"store={folder}", f"seed={seed}", *LOGS[log], f"data.synthetic.rows={given.rows}"]
    world += ["train.global_batch=4096", "train.threads_per_rank=1", "train.log_every_steps=100"]
    pairs = []
    for order in range(given.orders):
        ordered = [*world, f"ingest.rows_per_group={train_rows // (GROUPS + order)}"]
        figures = trained(ordered, {f"before{order}": ["train.lanes=1"], f"then{order}": ["train.lanes=64"]})
        pairs.append([each["ne"] for each in figures.values()])
    before, then = np.mean(pairs, axis=0)
    return float(then / before - 1)


if __name__ == "__main__":
    main()
