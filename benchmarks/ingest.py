"""``make bench-ingest``: rows per second of ingestion against a plain Polars script and per-column NumPy.

All read the same generated Criteo TSV (13 counts, 26 ids of 8 hex digits, Zipf popularity), turn by turn, each in a
process of its own; ``ratio`` is against the plain Polars script, the median over rounds. NumPy, by dictionaries and by
``np.unique``, gets a log of a tenth of the rows: its time grows with the rows at best. Then ours on ``--times`` times
the rows: whether time grows with the rows and memory does not. With ``--columns 1024``: peak memory of the ingestion of
a CSV of that many numbers a row instead, and again with ``--times`` times the rows (``ratio``: of the two peaks).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.common import finish
from benchmarks.ingest_rivals import per_column_numpy, per_column_unique, plain_polars
from pipeline.compose import compose
from pipeline.config import DataConfig, DenseFeature, SparseFeature, SyntheticConfig
from pipeline.store import Store

Work = Callable[[str, int, int], int]  # (folder, min count, most rows of a table) -> rows

RIVALS = {
    "plain_polars": plain_polars, "per_column_numpy": per_column_numpy, "per_column_unique": per_column_unique
}  # fmt: skip
CONTENDERS = ("nightjar", *RIVALS)
MIN_COUNT, MOST_ROWS = 2, 100_000
IDS = 200_000  # of the largest feature


def main() -> None:
    """Run the benchmark and print its JSON line; with a contender's name: that one alone, as a child does."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=2_000_000)
    options.add_argument("--times", type=int, default=4, help="rows of the second log, in multiples of the first's")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--columns", type=int, help="measure memory with so many columns of numbers instead")
    options.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    options.add_argument("--log", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.one:
        _child(given.one, given.log, given.columns)
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
    peaks = []
    for count in (rows, rows * times):
        with tempfile.TemporaryDirectory() as folder:
            _write_numbers(f"{folder}/wide.csv", count, columns)
            peaks.append(_run("nightjar", f"{folder}/wide.csv", columns))
    small, large = peaks
    finish("ingest_columns", large["peak"] / small["peak"], columns=columns, rows=rows, peak_bytes=small["peak"],
           peak_bytes_large=large["peak"], values_per_s=large["rows_per_s"] * columns, times=times)  # fmt: skip


def _write_numbers(path: str, rows: int, columns: int) -> None:
    """A CSV of ``columns`` normal numbers a row, behind a label and an id."""
    with Path(path).open("wb") as log:
        for start in range(0, rows, 4096):
            draw = np.random.default_rng(start)
            count = min(4096, rows - start)
            numbers = {f"x{at}": draw.normal(size=count).astype(np.float32) for at in range(columns)}
            frame = pl.DataFrame(
                {"label": draw.integers(0, 2, count), "user": draw.integers(0, 9999, count), **numbers}
            )
            frame.write_csv(log, include_header=not start, float_precision=5)


def _generate(path: str, rows: int) -> None:
    from pipeline.ingest.synthetic import write_tsv

    synthetic = SyntheticConfig(rows=rows, ids_per_feature=IDS)
    write_tsv(synthetic, 2026, path)


def _rounds(small: str, part: str, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Every contender's figures: the plain script and ours in turn, NumPy on its part of the log, twice at most."""
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for number in range(rounds):
        for name in CONTENDERS if number < 2 else CONTENDERS[:2]:
            figures[name].append(_run(name, small if name in CONTENDERS[:2] else part))
    return figures


def _run(name: str, log: str, columns: int | None = None) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.ingest", "--one", name, "--log", log]
    command += ["--columns", str(columns)] if columns else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    one: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}: {one['rows']:,} rows, {one['rows_per_s']:,.0f} rows/s, peak {one['peak'] / 2**20:,.0f} MiB")
    return one


def _child(name: str, log: str, columns: int | None) -> None:
    work = _nightjar(log, columns) if name == "nightjar" else partial(RIVALS[name], log)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        rows = work(folder, MIN_COUNT, MOST_ROWS)
        seconds = time.perf_counter() - began
    print(json.dumps({"rows": rows, "seconds": seconds, "rows_per_s": rows / seconds, "peak": peak_bytes()}))


def _nightjar(log: str, columns: int | None) -> Work:
    """Ingestion of ``log`` as the command runs it, ready to start: imports and the configuration are not timed."""
    from pipeline.ingest.stage import ingest

    def work(out: str, min_count: int, most_rows: int) -> int:
        with Store(out).draft("datasets/bench/k", kind="dataset", key="k", config={}, inputs={}) as draft:
            summary = ingest(config.data, config.ingest, config.seed, draft)
            draft.commit(summary)
        return int(summary["rows"])

    defaults = f"data.sparse_defaults.min_count={MIN_COUNT}", f"data.sparse_defaults.rows={MOST_ROWS}"
    config = compose(["data=criteo", f"data.path={log}", *defaults])
    if columns:
        numbers = {f"x{at}": DenseFeature() for at in range(columns)}
        sparse = {"user": SparseFeature()}
        config = replace(config, data=DataConfig(name="wide", format="csv", path=log, dense=numbers, sparse=sparse))
    return work


def peak_bytes() -> int:
    """Bytes: the largest resident set of this process since it was started."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _report(figures: dict[str, list[dict[str, float]]], big: dict[str, float], times: int) -> None:
    ours, plain = figures["nightjar"], figures["plain_polars"]
    numpy, unique = (max(one["rows_per_s"] for one in figures[name]) for name in CONTENDERS[2:])
    ratio = statistics.median(b["seconds"] / a["seconds"] for a, b in zip(ours, plain, strict=True))
    rows_per_s = statistics.median(one["rows_per_s"] for one in ours)
    peak = max(one["peak"] for one in ours)
    finish(
        "ingest", ratio, rows=int(ours[0]["rows"]), rows_per_s=rows_per_s,
        plain_polars_rows_per_s=statistics.median(one["rows_per_s"] for one in plain),
        numpy_rows_per_s=numpy, ratio_numpy=rows_per_s / numpy, unique_rows_per_s=unique,
        ratio_unique=rows_per_s / unique, peak_bytes=peak,
        plain_polars_peak_bytes=max(one["peak"] for one in plain), times=times,
        time_growth=big["seconds"] / statistics.median(one["seconds"] for one in ours) / times,
        peak_growth=big["peak"] / peak, peak_bytes_large=big["peak"],
    )  # fmt: skip


if __name__ == "__main__":
    main()
