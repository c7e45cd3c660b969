"""``python -m benchmarks.ingest_ids``: peak memory of counting a feature whose ids never end, exactly, for ``vocab``.

A CSV with one feature, every other row an id of its own; ingested twice, each time in a process of its own: as it is,
where counts beyond two million ids go to disk, and with all of them in memory. ``ratio``: peak of the first to that
of the second. The two must write the same rows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.common import finish
from benchmarks.ingest import peak_bytes
from pipeline.config.compose import compose
from pipeline.store import Store

CHUNK = 1_000_000


def main() -> None:
    """Run the benchmark and print its JSON line; with ``--held`` or ``--spilled``: one ingestion, as a child does."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--ids", type=int, default=30_000_000, help="distinct ids; twice as many rows")
    options.add_argument("--one", choices=("spilled", "held"), help=argparse.SUPPRESS)
    options.add_argument("--log", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.one:
        print(json.dumps(_ingested(given.log, held=given.one == "held")))
        return
    with tempfile.TemporaryDirectory() as folder:
        log = f"{folder}/log.csv"
        _generate(log, given.ids)
        found = {name: _child(name, log) for name in ("spilled", "held")}
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


def _child(name: str, log: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.ingest_ids", "--one", name, "--log", log]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: exit code {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}: {found['seconds']:.1f} s, peak {found['peak'] / 2**20:,.0f} MiB", flush=True)
    return found


def _ingested(log: str, *, held: bool) -> dict[str, Any]:
    from pipeline.ingest import counts
    from pipeline.ingest.stage import ingest

    if held:
        counts.IDS_IN_MEMORY = counts.IDS_OF_A_FEATURE = 1 << 40
    overrides = ["+data.dense.x={}", "+data.sparse.user={rows: 500000, min_count: 1}", "data.checks.leak=off"]
    config = compose(["data=csv", "data.name=ids", f"data.path={log}", *overrides])
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        with Store(folder).draft("datasets/ids/k", kind="dataset", key="k", config={}, inputs={}) as draft:
            draft.commit(ingest(config.data, config.ingest, config.seed, draft))
        rows = Path(folder, "datasets/ids/k/vocab/user.parquet").read_bytes()
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "peak": peak_bytes(), "rows_hash": hashlib.sha256(rows).hexdigest()}


if __name__ == "__main__":
    main()
