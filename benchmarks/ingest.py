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
import statistics
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

from benchmarks.harness import child, finish, median_ratio, options, peak_bytes
from benchmarks.ingest_rivals import per_column_numpy, per_column_unique, plain_polars
from pipeline.config import Config, DataConfig, DenseFeature, SparseFeature, SyntheticConfig
from pipeline.config.compose import compose
from pipeline.ingest.engines import LocalEngine
from pipeline.store import Store

RIVALS = {"plain_polars": plain_polars, "per_column_numpy": per_column_numpy, "per_column_unique": per_column_unique}
CONTENDERS = ("nightjar", *RIVALS)
MIN_COUNT, MOST_ROWS = 2, 100_000
IDS = 200_000  # of the largest feature
THREADS = (1, 2, 4)
_GROUP = 8192  # rows of a row group


def main() -> None:
    hidden = argparse.SUPPRESS  # options of the child that is one contender
    given = options(
        __doc__,
        rows=2_000_000,
        times=(4, "rows of the second log, in multiples of the first's"),
        rounds=3,
        columns=(None, "measure memory with so many columns of numbers instead", {"type": int}),
        one=(None, hidden, {"choices": CONTENDERS}),
        threads=(None, hidden, {"type": int}),
        log=(None, hidden),
    )
    if given.one:
        _one(given.one, given.log, given.columns, given.threads)
        return
    with tempfile.TemporaryDirectory() as folder:
        if given.columns:
            _wide(folder, given.columns, max(given.rows // given.columns, 1), given.times)
        else:
            _criteo(folder, given.rows, given.times, given.rounds)


def _criteo(folder: str, rows: int, times: int, rounds: int) -> None:
    small, large, part = (f"{folder}/{name}.tsv" for name in ("small", "large", "part"))
    print(f"generating {rows:,} and {rows * times:,} rows ...", flush=True)
    for path, count in ((small, rows), (large, rows * times), (part, max(rows // 10, 1))):
        write_criteo(path, count)
    figures: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for number in range(rounds):  # the plain script and ours in turn, NumPy on its part of the log, twice at most
        for name in CONTENDERS if number < 2 else CONTENDERS[:2]:
            figures[name].append(_run(name, small if name in CONTENDERS[:2] else part))
    big = _run("nightjar", large)
    ours, plain = figures["nightjar"], figures["plain_polars"]
    numpy, unique = (max(one["rows_per_s"] for one in figures[name]) for name in CONTENDERS[2:])

    def column(runs: list[dict[str, Any]], name: str) -> list[float]:
        return [one[name] for one in runs]

    rows_per_s, peak = statistics.median(column(ours, "rows_per_s")), max(one["peak"] for one in ours)
    finish(
        "ingest",
        median_ratio(column(plain, "seconds"), column(ours, "seconds")),
        rows=int(ours[0]["rows"]),
        rows_per_s=rows_per_s,
        ratio_cpu=median_ratio(column(plain, "cpu_seconds"), column(ours, "cpu_seconds")),
        plain_polars_rows_per_s=statistics.median(column(plain, "rows_per_s")),
        numpy_rows_per_s=numpy,
        ratio_numpy=rows_per_s / numpy,
        unique_rows_per_s=unique,
        ratio_unique=rows_per_s / unique,
        peak_bytes=peak,
        plain_polars_peak_bytes=max(one["peak"] for one in plain),
        times=times,
        time_growth=big["seconds"] / statistics.median(column(ours, "seconds")) / times,
        peak_growth=big["peak"] / peak,
        peak_bytes_large=big["peak"],
    )


def _wide(folder: str, columns: int, rows: int, times: int) -> None:
    csv, long, parquet = (f"{folder}/{name}" for name in ("wide.csv", "long.csv", "wide.parquet"))
    for path, count in ((csv, rows), (long, rows * times), (parquet, rows)):
        _write_numbers(path, count, columns)
    runs = {log: {count: _run("nightjar", log, columns, count) for count in THREADS} for log in (csv, parquet)}
    small, large = _run("nightjar", csv, columns), _run("nightjar", long, columns)
    by_threads = {Path(log).suffix[1:]: {n: run["peak"] for n, run in by.items()} for log, by in runs.items()}
    finish(
        "ingest_columns",
        large["peak"] / small["peak"],
        columns=columns,
        rows=rows,
        times=times,
        peak_bytes=small["peak"],
        peak_bytes_large=large["peak"],
        values_per_s=large["rows_per_s"] * columns,
        peak_bytes_by_threads=by_threads,
        same=all(len({run["checksum"] for run in by.values()}) == 1 for by in runs.values()),
    )


def write_criteo(path: str, rows: int, seed: int = 2026) -> None:
    """A log as that of Criteo."""
    from pipeline.ingest.synthetic import write_tsv

    write_tsv(SyntheticConfig(rows=rows, ids_per_feature=IDS), seed, path)


def _write_numbers(path: str, rows: int, columns: int) -> None:
    """``columns`` normal numbers a row, behind a label and an id, as CSV or as Parquet."""
    with ExitStack() as stack:
        log = stack.enter_context(Path(path).open("wb"))
        writer: pq.ParquetWriter | None = None
        for start in range(0, rows, _GROUP):
            draw = np.random.default_rng(start)
            count = min(_GROUP, rows - start)
            numbers = {f"x{at}": draw.normal(size=count).astype(np.float32) for at in range(columns)}
            label_and_id = {"label": draw.integers(0, 2, count), "user": draw.integers(0, 9999, count)}
            frame = pl.DataFrame({**label_and_id, **numbers})
            if path.endswith(".csv"):
                frame.write_csv(log, include_header=not start, float_precision=5)
                continue
            table = frame.to_arrow()
            writer = writer or stack.enter_context(pq.ParquetWriter(log, table.schema))
            writer.write_table(table, row_group_size=_GROUP)


def _run(name: str, log: str, columns: int | None = None, threads: int | None = None) -> dict[str, Any]:
    more = ["--columns", str(columns)] if columns else []
    more += ["--threads", str(threads)] if threads else []
    limits = {"POLARS_MAX_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)} if threads else {}
    one = child("benchmarks.ingest", "--one", name, "--log", log, *more, **limits)
    what = f" of {Path(log).suffix[1:]}, {threads} threads" if threads else ""
    print(
        f"{name}: {one['rows']:,} rows{what}, {one['rows_per_s']:,.0f} rows/s, {one['cpu_seconds']:.1f} s of processor "
        f"time, peak {one['peak'] / 2**20:,.0f} MiB",
        flush=True,
    )
    return one


def _one(name: str, log: str, columns: int | None, threads: int | None) -> None:
    """Ingest by one contender and print its figures; imports and the configuration are not timed."""
    work: Callable[[str], tuple[dict[str, Any], dict[str, str]]]
    if name == "nightjar":
        from pipeline.ingest import stage

        if threads:
            stage.engine_of = lambda _: LocalEngine(threads)
        table = [f"data.sparse_defaults.min_count={MIN_COUNT}", f"data.sparse_defaults.rows={MOST_ROWS}"]
        config = compose(["data=criteo", f"data.path={log}", *table])
        if columns:
            numbers, sparse = {f"x{at}": DenseFeature() for at in range(columns)}, {"user": SparseFeature()}
            kind = Path(log).suffix[1:]
            config = replace(config, data=DataConfig(name="wide", format=kind, path=log, dense=numbers, sparse=sparse))
        work = partial(ingested, config)
    else:

        def work(folder: str) -> tuple[dict[str, Any], dict[str, str]]:
            return {"rows": RIVALS[name](log, folder, MIN_COUNT, MOST_ROWS)}, {}

    with tempfile.TemporaryDirectory() as folder:
        began, spent = time.perf_counter(), time.process_time()
        summary, files = work(folder)
        seconds, spent = time.perf_counter() - began, time.process_time() - spent
    rows = int(summary["rows"])
    rates = {"rows": rows, "seconds": seconds, "rows_per_s": rows / seconds, "cpu_seconds": spent, "peak": peak_bytes()}
    print(json.dumps({**rates, "checksum": hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()}))


def ingested(config: Config, store: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Ingest as the command does into ``store``; the summary, and the checksums of the files by name."""
    from pipeline.ingest.stage import ingest

    with Store(store).draft("datasets/bench/k", kind="dataset", key="k", config={}, inputs={}) as draft:
        summary = ingest(config.data, config.ingest, config.seed, draft)
        artifact = draft.commit(summary)
    return summary, {name: entry.checksum for name, entry in artifact.files.items()}


if __name__ == "__main__":
    main()
