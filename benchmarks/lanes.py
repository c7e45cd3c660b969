"""``make bench-lanes``: test NE of 64 lanes against one lane, the order before there were lanes, on two logs.

``demo``: model and log of ``experiment=demo``. ``drift``: the same, but the effects turn by 0.03 radians a day for
seven days, and the last day is held out. A seed draws the log, initial values and the order of the rows; the two
orders share log and initial values. The train rows have some 520 row groups, so that 64 lanes fit and a window of
eight is 1.5 % of an epoch. Any other order of the rows changes NE by 0.05 to 0.2 % a seed, with lanes or without. So
each side is the mean of ``--orders`` trainings on the same rows in row groups of another size, whose order is another
one. ``--control``: one lane against one lane with windows of nine row groups.

``ratio``: 1 + the larger of the logs' mean relative changes of NE; for each log the mean, its standard error, and the
change of every seed.
"""

from __future__ import annotations

import tempfile

import numpy as np

from benchmarks.harness import finish, options, processes, standard_error, test_ne

GROUPS = 520  # of the train rows: eight a lane, and some
LOGS = {
    "demo": ["data.split.test_share=0.2"],
    "drift": ["data.synthetic.drift=0.03", "data.synthetic.days=7", "data.split.by=day"],
}
ONE_LANE, LANES = "train.lanes=1", ("train.lanes=64",)
CONTROL = (ONE_LANE, "train.shuffle_window_groups=9")


def main() -> None:
    given = options(
        __doc__,
        rows=1_000_000,
        seeds=10,
        logs=(list(LOGS), None, {"choices": LOGS}),
        orders=(6, "of the rows, on each side"),
        jobs=(2, "seeds at a time, a thread each"),
        control=(False, "one lane against one lane in another order"),
    )
    other = CONTROL if given.control else LANES
    jobs = [(log, seed, given.rows, given.orders, other) for log in given.logs for seed in range(given.seeds)]
    changes: dict[str, list[float]] = {log: [] for log in given.logs}
    with processes(given.jobs) as pool:
        for (log, seed, *_), (before, now) in zip(jobs, pool.map(compare, *zip(*jobs, strict=True)), strict=True):
            changes[log].append(now / before - 1)
            print(f"{log}, seed {seed}: NE {before:.5f}, then {now:.5f}, {changes[log][-1]:+.3%}", flush=True)
    mean = {log: float(np.mean(values)) for log, values in changes.items()}
    errors = {f"{log}_error": standard_error(values) for log, values in changes.items()}
    each = {f"{log}_changes": [round(change, 6) for change in values] for log, values in changes.items()}
    finish("lanes", 1 + max(mean.values()), **mean, **errors, **each)


def compare(log: str, seed: int, rows: int, orders: int, other: tuple[str, ...]) -> tuple[float, float]:
    """Mean test NE of trainings with one lane, and of the same trainings with ``other``."""
    train_rows = int(rows * (6 / 7 if log == "drift" else 0.8))
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        world = ["experiment=demo", f"store={folder}", f"seed={seed}", *LOGS[log], f"data.synthetic.rows={rows}"]
        world += ["train.global_batch=4096", "train.threads_per_rank=1", "train.log_every_steps=100"]
        for order in range(orders):
            ordered = [*world, f"ingest.rows_per_group={train_rows // (GROUPS + order)}"]
            one = test_ne([*ordered, f"run=before{order}", ONE_LANE])
            pairs.append((one, test_ne([*ordered, f"run=then{order}", *other])))
    before, then = np.mean(pairs, axis=0)
    return float(before), float(then)


if __name__ == "__main__":
    main()
