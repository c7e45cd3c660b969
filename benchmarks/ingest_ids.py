"""``python -m benchmarks.ingest_ids``: peak memory of counting a feature whose ids never end, exactly, for ``vocab``.

A CSV with one feature, every other row an id of its own; ingested twice, each time in a process of its own: as it is,
where counts beyond two million ids go to disk, and with all of them in memory. ``ratio``: peak of the first to that
of the second. The two must write the same rows.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.harness import child, finish, options, peak_bytes, show
from benchmarks.ingest import ingested
from pipeline.config.compose import compose

CHUNK = 1_000_000


def main() -> None:
    given = options(
        __doc__,
        ids=(30_000_000, "distinct ids; twice as many rows"),
        one=(None, argparse.SUPPRESS, {"choices": ("spilled", "held")}),
        log=(None, argparse.SUPPRESS),
    )
    if given.one:
        _one(given.log, held=given.one == "held")
        return
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        log = f"{folder}/log.csv"
        _generate(log, given.ids)
        for name in ("spilled", "held"):
            found[name] = child("benchmarks.ingest_ids", "--one", name, "--log", log)
            show(name, found[name], ".1f")
    assert found["spilled"]["rows_hash"] == found["held"]["rows_hash"], "not the same rows"
    peaks, seconds = ({name: one[what] for name, one in found.items()} for what in ("peak", "seconds"))
    finish("ingest_ids", peaks["spilled"] / peaks["held"], ids=given.ids, peak_bytes=peaks, seconds=seconds)


def _generate(log: str, ids: int) -> None:
    """Rows in turn of a new id and of an old one, popular ones more often."""
    rng = np.random.default_rng(1)
    with Path(log).open("wb") as sink:
        sink.write(b"label,x,user\n")
        for start in range(0, ids, CHUNK):
            count = min(CHUNK, ids - start)
            new = np.arange(start, start + count)
            old = (rng.random(count) ** 4 * (start + count)).astype(np.int64)
            user = np.stack([new, old], axis=1).reshape(-1)
            frame = pl.DataFrame({"label": user % 3 == 0, "x": user % 97, "user": user * 2654435761})
            text = frame.with_columns(pl.col("label").cast(pl.Int8)).write_csv(include_header=False)
            sink.write(text.encode())


def _one(log: str, *, held: bool) -> None:
    from pipeline.ingest import counts

    if held:
        counts.IDS_IN_MEMORY = counts.IDS_OF_A_FEATURE = 1 << 40
    columns = ["+data.dense.x={}", "+data.sparse.user={rows: 500000, min_count: 1}", "data.checks.leak=off"]
    config = compose(["data=csv", "data.name=ids", f"data.path={log}", *columns])
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        _, files = ingested(config, folder)
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "peak": peak_bytes(), "rows_hash": files["vocab/user.parquet"]}))


if __name__ == "__main__":
    main()
