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

from benchmarks.harness import finish, in_turns, options, processes, seconds_of, show, words
from benchmarks.ingest import ingested
from pipeline.config.compose import compose

DAY_SECONDS = 86_400


def main() -> None:
    given = options(
        __doc__,
        rows=100_000,
        days=4_000,
        users=1_000,
        rounds=3,
        test_days=(1, "days at the end that are test days"),
        leak=("off", "data.checks.leak; its cost is that of ids, not of days"),
    )
    with tempfile.TemporaryDirectory() as folder, processes(1, runs_each=1) as pool:

        def timed(days: int) -> float:
            split = [f"data.split.test_days={min(given.test_days, days - 1)}", f"data.checks.leak={given.leak}"]
            return pool.submit(ingest, f"{folder}/{days}.parquet", split).result()

        for days in (2, given.days):
            write_log(f"{folder}/{days}.parquet", given.rows, days, given.users)
        seconds = in_turns({str(days): lambda days=days: timed(days) for days in (2, given.days)}, given.rounds)
    many, few = median(seconds[str(given.days)]), median(seconds["2"])
    show("seconds", {f"{days} days": median(taken) for days, taken in seconds.items()}, ".2f")
    finish(
        "days",
        many / few,
        seconds_many=many,
        seconds_two=few,
        rows=given.rows,
        days=given.days,
        users=given.users,
        test_days=given.test_days,
        leak=given.leak,
        rows_per_s=given.rows / many,
        rounds=given.rounds,
    )


def write_log(path: str, rows: int, days: int, users: int) -> None:
    """Write clicks of ``users`` on 5,000 items, in no order of time."""
    rng = np.random.default_rng(0)
    item, kind = rng.zipf(1.3, rows) % 5_000, rng.integers(0, 20, rows)
    columns = {"label": rng.binomial(1, 0.2 + 0.4 * (item % 2)), "x": rng.normal(size=rows), "item": item, "kind": kind}
    columns["user"] = rng.integers(0, users, rows)
    columns["time"] = 1_600_000_000 + rng.integers(0, days * DAY_SECONDS, rows)
    pl.DataFrame(columns).write_parquet(path)


def ingest(log: str, split: list[str]) -> float:
    """Return the seconds that the ingestion of ``log`` takes."""
    history = "{features: {item: {table: item}}, target: item, max_length: 20, history: {by: user}}"
    columns = ["+data.dense.x={}", "+data.sparse={item: {}, kind: {}, user: {}}", f"+data.sequences.seen={history}"]
    world = words("data=parquet data.name=days data.timestamp=time data.split.by=day stages=[ingest]")
    no_limit = "data.sequences.seen.history.days=null"
    config = compose([*world, f"data.path={log}", *columns, no_limit, *split])
    with tempfile.TemporaryDirectory() as store:
        return seconds_of(lambda: ingested(config, store))


if __name__ == "__main__":
    main()
