"""``make bench-ingest``: rows per second of ingestion against a plain Polars script and per-column NumPy.

All read the same generated Criteo TSV (13 counts, 26 ids of 8 hex digits, Zipf popularity), turn by turn, each in a
process of its own; ``ratio`` is against the plain Polars script, the median over rounds, and ``ratio_cpu`` that of
seconds of processor time, which other work on the machine moves less. NumPy, by dictionaries and by ``np.unique``, gets
a log of a tenth of the rows: its time grows with the rows at best. Then ours on ``--times`` times the rows: whether
time grows with the rows and memory does not. With ``--columns 1024``: peak memory of the ingestion of that many numbers
a row instead, as CSV and as Parquet in row groups of 8,192 rows, with 1, 2 and 4 threads, and of the CSV again with
``--times`` times the rows (``ratio``: of its two peaks). ``same``: threads change no checksum.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq

from benchmarks.harness import finish, options
from benchmarks.ingest_rivals import per_column_numpy, per_column_unique, plain_polars
from pipeline.config import DataConfig, DenseFeature, SparseFeature, SyntheticConfig
from pipeline.config.compose import compose
from pipeline.ingest.engines import LocalEngine
from pipeline.store import Store

Work = Callable[[str, int, int], int]  # (folder, min count, most rows of a table) -> rows

RIVALS = {"plain_polars": plain_polars, "per_column_numpy": per_column_numpy, "per_column_unique": per_column_unique}
CONTENDERS = ("nightjar", *RIVALS)
MIN_COUNT, MOST_ROWS = 2, 100_000
IDS = 200_000  # of the largest feature
THREADS = (1, 2, 4)
DATASET = "datasets/bench/k"
_GROUP = 8192  # rows of a row group


def main() -> None:
    """Run the benchmark and print its JSON line; with a contender's name: that one alone, as a child does."""
    given = options(
        __doc__,
        rows=2_000_000,
        times=(4, "rows of the second log, in multiples of the first's"),
        rounds=3,
        columns=(None, "measure memory with so many columns of numbers instead", {"type": int}),
        one=(None, argparse.SUPPRESS, {"choices": CONTENDERS}),
        threads=(None, argparse.SUPPRESS, {"type": int}),
        log=(None, argparse.SUPPRESS),
    )
    if given.one:
        _child(given.one, given.log, given.columns, given.threads)
        return
    if given.columns:
        _wide(given.columns, max(given.rows // given.columns, 1), given.times)
        return
    with tempfile.TemporaryDirectory() as folder:
        small, large, part = (f"{folder}/{name}.tsv" for name in ("small", "large", "part"))
        print(f"generating {given.rows:,} and {given.rows * given.times:,} rows ...", flush=True)
        _generate(small, given.rows)
        _generate(large, given.rows * given.times)
        _generate(part, max(given.rows // 10, 1))
        figures = _rounds(small, part, given.rounds)
        big = _run("nightjar", large)
    _report(figures, big, given.times)


def _wide(columns: int, rows: int, times: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        csv, long, parquet = (f"{folder}/{name}" for name in ("wide.csv", "long.csv", "wide.parquet"))
        _write_numbers(csv, rows, columns)
        _write_numbers(long, rows * times, columns)
        _write_numbers(parquet, rows, columns)
        runs = {log: {count: _run("nightjar", log, columns, count) for count in THREADS} for log in (csv, parquet)}
        small, large = _run("nightjar", csv, columns), _run("nightjar", long, columns)
    finish(
        "ingest_columns",
        large["peak"] / small["peak"],
        columns=columns,
        rows=rows,
        times=times,
        peak_bytes=small["peak"],
        peak_bytes_large=large["peak"],
        values_per_s=large["rows_per_s"] * columns,
        peak_bytes_by_threads={
            Path(log).suffix[1:]: {count: run["peak"] for count, run in by.items()} for log, by in runs.items()
        },
        same=all(len({run["checksum"] for run in by.values()}) == 1 for by in runs.values()),
    )


def _write_numbers(path: str, rows: int, columns: int) -> None:
    """``columns`` normal numbers a row, behind a label and an id, as CSV or as Parquet."""
    with ExitStack() as stack:
        log = stack.enter_context(Path(path).open("wb"))
        writer: pq.ParquetWriter | None = None
        for start in range(0, rows, _GROUP):
            draw = np.random.default_rng(start)
            count = min(_GROUP, rows - start)
            numbers = {f"x{at}": draw.normal(size=count).astype(np.float32) for at in range(columns)}
            frame = pl.DataFrame(
                {"label": draw.integers(0, 2, count), "user": draw.integers(0, 9999, count), **numbers}
            )
            if path.endswith(".csv"):
                frame.write_csv(log, include_header=not start, float_precision=5)
                continue
            table = frame.to_arrow()
            writer = writer or stack.enter_context(pq.ParquetWriter(log, table.schema))
            writer.write_table(table, row_group_size=_GROUP)


def _generate(path: str, rows: int) -> None:
    from pipeline.ingest.synthetic import write_tsv

    synthetic = SyntheticConfig(rows=rows, ids_per_feature=IDS)
    write_tsv(synthetic, 2026, path)


def _rounds(small: str, part: str, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Every contender's figures: the plain script and ours in turn, NumPy on its part of the log, twice at most."""
    figures: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for number in range(rounds):
        for name in CONTENDERS if number < 2 else CONTENDERS[:2]:
            figures[name].append(_run(name, small if name in CONTENDERS[:2] else part))
    return figures


def _run(name: str, log: str, columns: int | None = None, threads: int | None = None) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.ingest", "--one", name, "--log", log]
    command += ["--columns", str(columns)] if columns else []
    command += ["--threads", str(threads)] if threads else []
    own = {"POLARS_MAX_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)} if threads else {}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | own)
    if done.returncode:
        raise SystemExit(done.stderr)
    one: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    of = f" of {Path(log).suffix[1:]}, {threads} threads" if threads else ""
    print(
        f"{name}: {one['rows']:,} rows{of}, {one['rows_per_s']:,.0f} rows/s, {one['cpu_seconds']:.1f} s of processor "
        f"time, peak {one['peak'] / 2**20:,.0f} MiB",
        flush=True,
    )
    return one


def _child(name: str, log: str, columns: int | None, threads: int | None) -> None:
    work = _nightjar(log, columns, threads) if name == "nightjar" else partial(RIVALS[name], log)
    with tempfile.TemporaryDirectory() as folder:
        began, spent = time.perf_counter(), time.process_time()
        rows = work(folder, MIN_COUNT, MOST_ROWS)
        seconds, spent = time.perf_counter() - began, time.process_time() - spent
        manifest = Path(folder, DATASET, "manifest.json")
        files = json.loads(manifest.read_text())["files"] if manifest.exists() else {}
    checksum = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    print(
        json.dumps(
            {
                "rows": rows,
                "seconds": seconds,
                "rows_per_s": rows / seconds,
                "cpu_seconds": spent,
                "peak": peak_bytes(),
                "checksum": checksum,
            }
        )
    )


def _nightjar(log: str, columns: int | None, threads: int | None) -> Work:
    """Ingestion of ``log`` as the command runs it, ready to start: imports and the configuration are not timed."""
    from pipeline.ingest import stage

    if threads:
        stage.engine_of = lambda _: LocalEngine(threads)

    def work(out: str, min_count: int, most_rows: int) -> int:
        with Store(out).draft(DATASET, kind="dataset", key="k", config={}, inputs={}) as draft:
            summary = stage.ingest(config.data, config.ingest, config.seed, draft)
            draft.commit(summary)
        return int(summary["rows"])

    defaults = f"data.sparse_defaults.min_count={MIN_COUNT}", f"data.sparse_defaults.rows={MOST_ROWS}"
    config = compose(["data=criteo", f"data.path={log}", *defaults])
    if columns:
        numbers = {f"x{at}": DenseFeature() for at in range(columns)}
        sparse = {"user": SparseFeature()}
        config = replace(
            config, data=DataConfig(name="wide", format=Path(log).suffix[1:], path=log, dense=numbers, sparse=sparse)
        )
    return work


def peak_bytes() -> int:
    """Bytes: the largest resident set of this process since it was started."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _report(figures: dict[str, list[dict[str, Any]]], big: dict[str, Any], times: int) -> None:
    ours, plain = figures["nightjar"], figures["plain_polars"]
    numpy, unique = (max(one["rows_per_s"] for one in figures[name]) for name in CONTENDERS[2:])
    ratio = statistics.median(b["seconds"] / a["seconds"] for a, b in zip(ours, plain, strict=True))
    ratio_cpu = statistics.median(b["cpu_seconds"] / a["cpu_seconds"] for a, b in zip(ours, plain, strict=True))
    rows_per_s = statistics.median(one["rows_per_s"] for one in ours)
    peak = max(one["peak"] for one in ours)
    finish(
        "ingest",
        ratio,
        rows=int(ours[0]["rows"]),
        rows_per_s=rows_per_s,
        ratio_cpu=ratio_cpu,
        plain_polars_rows_per_s=statistics.median(one["rows_per_s"] for one in plain),
        numpy_rows_per_s=numpy,
        ratio_numpy=rows_per_s / numpy,
        unique_rows_per_s=unique,
        ratio_unique=rows_per_s / unique,
        peak_bytes=peak,
        plain_polars_peak_bytes=max(one["peak"] for one in plain),
        times=times,
        time_growth=big["seconds"] / statistics.median(one["seconds"] for one in ours) / times,
        peak_growth=big["peak"] / peak,
        peak_bytes_large=big["peak"],
    )


if __name__ == "__main__":
    main()
