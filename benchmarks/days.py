"""``make bench-days``: ingestion of rows over thousands of days, split by day and with histories, against two days.

Both logs have the same rows but for their times, which are drawn over ``--days`` days and over two. Each is ingested
``--rounds`` times, in turns, in a process of its own with all CPUs. ``ratio``: seconds of many days over those of two,
medians.
"""

from __future__ import annotations

import tempfile
from statistics import median

import numpy as np
import polars as pl

from benchmarks.harness import finish, in_turns, options, processes, seconds_of, words
from benchmarks.ingest import ingested
from pipeline.config.compose import compose

DAY_SECONDS = 86_400
HISTORY = "{features: {item: {table: item}}, target: item, max_length: 20, history: {by: user, days: null}}"
WORLD = words("""data=parquet data.name=days data.timestamp=time data.split.by=day data.split.test_days=1
    data.checks.leak=off stages=[ingest]""")


def main() -> None:
    given = options(__doc__, rows=100_000, days=4_000, users=1_000, rounds=3)
    with tempfile.TemporaryDirectory() as folder, processes(1, runs_each=1) as pool:
        logs = {days: f"{folder}/{days}.parquet" for days in (2, given.days)}
        for days, log in logs.items():
            write_log(log, given.rows, days, given.users)
        turns = {log: lambda log=log: pool.submit(ingest, log).result() for log in logs.values()}
        few, many = (median(each) for each in in_turns(turns, given.rounds).values())
    rates = {"seconds_many": many, "seconds_two": few, "rows_per_s": given.rows / many}
    finish("days", many / few, **rates, **vars(given))


def write_log(path: str, rows: int, days: int, users: int) -> None:
    """Write clicks of ``users`` on 5,000 items, in no order of time."""
    rng = np.random.default_rng(0)
    item, kind = rng.zipf(1.3, rows) % 5_000, rng.integers(0, 20, rows)
    columns = {"label": rng.binomial(1, 0.2 + 0.4 * (item % 2)), "x": rng.normal(size=rows), "item": item, "kind": kind}
    columns["user"] = rng.integers(0, users, rows)
    columns["time"] = 1_600_000_000 + rng.integers(0, days * DAY_SECONDS, rows)
    pl.DataFrame(columns).write_parquet(path)


def ingest(log: str) -> float:
    """Return the seconds that the ingestion of ``log`` takes."""
    columns = ["+data.dense.x={}", "+data.sparse={item: {}, kind: {}, user: {}}", f"+data.sequences.seen={HISTORY}"]
    config = compose([*WORLD, f"data.path={log}", *columns])
    with tempfile.TemporaryDirectory() as store:
        return seconds_of(lambda: ingested(config, store))


if __name__ == "__main__":
    main()
