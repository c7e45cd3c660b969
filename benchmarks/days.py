"""``make bench-days``: ingestion of rows over thousands of days, split by day and with histories, against two days.

Both logs have the same rows but for their times, which are drawn over ``--days`` days and over two. Each is ingested
``--rounds`` times, in turns, in a process of its own with all CPUs. ``ratio``: seconds of many days over those of two,
medians.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import polars as pl

from benchmarks.harness import finish, options, words
from pipeline.config.compose import compose
from pipeline.ingest.stage import ingest
from pipeline.store import Store

DAY_SECONDS = 86_400


def main() -> None:
    given = options(
        __doc__,
        rows=100_000,
        days=4000,
        users=1000,
        rounds=3,
        test_days=(1, "days at the end that are test days"),
        leak=("off", "data.checks.leak; its cost is that of ids, not of days"),
    )
    seconds: dict[int, list[float]] = {2: [], given.days: []}
    with tempfile.TemporaryDirectory() as folder:
        for days in seconds:
            write_log(Path(folder, f"{days}.parquet"), given.rows, days, given.users)
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            for number in range(given.rounds):
                for days, found in seconds.items():
                    tested = f"data.split.test_days={min(given.test_days, days - 1)}"
                    places = f"{folder}/{days}.parquet", f"{folder}/store-{days}-{number}"
                    found.append(pool.apply(timed, (*places, tested, f"data.checks.leak={given.leak}")))
                    print(f"round {number + 1}, {days:,} days: {found[-1]:.2f} s", flush=True)
    many, few = median(seconds[given.days]), median(seconds[2])
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


def write_log(path: Path, rows: int, days: int, users: int) -> None:
    """Write clicks of ``users`` on 5,000 items, in no order of time."""
    rng = np.random.default_rng(0)
    item, kind = rng.zipf(1.3, rows) % 5_000, rng.integers(0, 20, rows)
    frame = pl.DataFrame(
        {
            "label": rng.binomial(1, 0.2 + 0.4 * (item % 2)),
            "x": rng.normal(size=rows),
            "item": item,
            "kind": kind,
            "user": rng.integers(0, users, rows),
            "time": 1_600_000_000 + rng.integers(0, days * DAY_SECONDS, rows),
        }
    )
    frame.write_parquet(path)


def timed(log: str, store: str, *more: str) -> float:
    """Return the seconds that the ingestion of ``log`` takes."""
    config = compose(
        [
            "data=parquet",
            f"data.path={log}",
            *words("""data.name=days data.timestamp=time data.split.by=day +data.dense.x={}"""),
            "+data.sparse={item: {}, kind: {}, user: {}}",
            "+data.sequences.seen={features: {item: {table: item}}, target: item, max_length: 20, history: {by: user}}",
            "data.sequences.seen.history.days=null",
            "stages=[ingest]",
            *more,
        ]
    )
    began = time.perf_counter()
    with Store(store).draft("datasets/days/k", kind="ingest", key="k", config={}, inputs={}) as draft:
        draft.commit(ingest(config.data, config.ingest, config.seed, draft))
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
