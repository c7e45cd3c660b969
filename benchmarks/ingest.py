"""``make bench-ingest``: rows per second of ingestion against a plain Polars script and per-column NumPy.

All read the same generated Criteo TSV (13 counts, 26 ids of 8 hex digits, Zipf popularity), turn by turn, each in a
process of its own; ``ratio`` is against the plain Polars script, the median over rounds, and ``ratio_cpu`` that of
seconds of processor time, which other work on the machine moves less. That is a script as one writes it with the log in
memory: parse, hash the ids, rank those seen often enough by count, map, log1p, standardise, write Parquet. NumPy is the
preprocessing in use around DLRM and TorchRec: rows parsed one by one into arrays, then ids counted and made contiguous
column by column, by dictionaries or, the faster way to write it, by ``np.unique``. It gets a log of a tenth of the
rows: its time grows with the rows at best. No split, quarantine, profile, checks or bounded memory in any of them. Then
ours on ``--times`` times the rows: whether time grows with the rows and memory does not.

With ``--columns 1024``: peak memory of the ingestion of that many numbers a row instead, as CSV and as Parquet in row
groups of 8,192 rows, with 1, 2 and 4 threads, and of the CSV again with ``--times`` times the rows (``ratio``: of its
two peaks). ``same``: threads change no checksum.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq

from benchmarks.harness import child, finish, median_ratio, options, peak_bytes, show
from pipeline.config import Config, DataConfig, DenseFeature, SparseFeature, SyntheticConfig
from pipeline.config.compose import compose
from pipeline.ingest.engines import LocalEngine
from pipeline.store import Store

INTEGERS = [f"I{i}" for i in range(1, 14)]
CATEGORIES = [f"C{i}" for i in range(1, 27)]
MIN_COUNT, MOST_ROWS = 2, 100_000
FIRST_ROW = 2  # of an id: 0: missing, 1: too rare
IDS = 200_000  # of the largest feature
THREADS = (1, 2, 4)


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
    for path, count in ((small, rows), (large, rows * times), (part, max(rows // 10, 1))):
        write_criteo(path, count)
    figures: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for number in range(rounds):  # the plain script and ours in turn, NumPy on its part of the log, twice at most
        for name in CONTENDERS if number < 2 else CONTENDERS[:2]:
            figures[name].append(_run(name, small if name in CONTENDERS[:2] else part))
    big = _run("nightjar", large)
    by_name = {
        what: {name: [one[what] for one in runs] for name, runs in figures.items()}
        for what in ("rows_per_s", "seconds", "cpu_seconds", "peak")
    }
    seconds, spent, rates = by_name["seconds"], by_name["cpu_seconds"], by_name["rows_per_s"]
    ours, peak = statistics.median(rates["nightjar"]), max(by_name["peak"]["nightjar"])
    numpy, unique = max(rates["per_column_numpy"]), max(rates["per_column_unique"])
    finish(
        "ingest",
        median_ratio(seconds["plain_polars"], seconds["nightjar"]),
        rows=int(figures["nightjar"][0]["rows"]),
        rows_per_s=ours,
        ratio_cpu=median_ratio(spent["plain_polars"], spent["nightjar"]),
        plain_polars_rows_per_s=statistics.median(rates["plain_polars"]),
        numpy_rows_per_s=numpy,
        ratio_numpy=ours / numpy,
        unique_rows_per_s=unique,
        ratio_unique=ours / unique,
        peak_bytes=peak,
        plain_polars_peak_bytes=max(by_name["peak"]["plain_polars"]),
        times=times,
        time_growth=big["seconds"] / statistics.median(seconds["nightjar"]) / times,
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
    draw = np.random.default_rng(0)
    label_and_id = {"label": draw.integers(0, 2, rows), "user": draw.integers(0, 9999, rows)}
    numbers = {f"x{at}": draw.normal(size=rows).astype(np.float32) for at in range(columns)}
    frame = pl.DataFrame({**label_and_id, **numbers})
    if path.endswith(".csv"):
        frame.write_csv(path, float_precision=5)
    else:
        pq.write_table(frame.to_arrow(), path, row_group_size=8192)


def _run(name: str, log: str, columns: int | None = None, threads: int | None = None) -> dict[str, Any]:
    more = ["--columns", str(columns)] if columns else []
    more += ["--threads", str(threads)] if threads else []
    limits = {"POLARS_MAX_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)} if threads else {}
    one = child("benchmarks.ingest", "--one", name, "--log", log, *more, **limits)
    show(f"{name} {Path(log).name}", one, ",.1f")
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
            return {"rows": RIVALS[name](log, folder)}, {}

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


def plain_polars(tsv: str, out: str) -> int:
    """Write ``out``/train.parquet and a vocabulary per category; returns the rows."""
    import polars_hash as plh

    types = {"label": pl.Float32(), **dict.fromkeys(INTEGERS, pl.Float64()), **dict.fromkeys(CATEGORIES, pl.String())}
    log = pl.read_csv(tsv, separator="\t", has_header=False, schema=types, quote_char=None)
    hashed = [
        pl.when(pl.col(name) != "").then(plh.col(name).nchash.xxhash64(seed=seed))  # type: ignore[attr-defined]
        for seed, name in enumerate(CATEGORIES)
    ]
    value = pl.col(INTEGERS)
    logs = value.sign() * value.abs().log1p()
    dense = ((logs - logs.mean()) / logs.std()).fill_null(0.0).cast(pl.Float32)
    log = log.select("label", dense, *(column.alias(name) for name, column in zip(CATEGORIES, hashed, strict=True)))
    for name in CATEGORIES:
        counts = log[name].drop_nulls().value_counts().filter(pl.col("count") >= MIN_COUNT)
        ranked = counts.sort(["count", name], descending=[True, False]).head(MOST_ROWS - FIRST_ROW)
        vocab = ranked.with_row_index("row", offset=FIRST_ROW)
        vocab.write_parquet(f"{out}/{name}.parquet", compression="zstd")
        rows = log.select(name).join(vocab, on=name, how="left", maintain_order="left")
        row = pl.when(pl.col(name).is_null()).then(0).otherwise(pl.col("row").fill_null(1)).cast(pl.Int32)
        log = log.with_columns(rows.select(row.alias(name))[name])
    log.write_parquet(f"{out}/train.parquet", compression="lz4", row_group_size=65_536)
    return log.height


def per_column(rows_of: Callable[[np.ndarray], np.ndarray], tsv: str, out: str) -> int:
    """Write ``out``/dense.npy, labels.npy, sparse.npy (one column after the other); returns the rows."""
    parts = []
    with Path(tsv).open() as lines:
        for line in lines:
            fields = line.rstrip("\n").split("\t")
            numbers = [int(field) if field else np.nan for field in fields[1:14]]
            parts.append((int(fields[0]), numbers, [int(field, 16) if field else -1 for field in fields[14:]]))
    labels, integers, ids = zip(*parts, strict=True)
    dense, sparse = np.array(integers, np.float64), np.array(ids, np.int64)
    logs = np.sign(dense) * np.log1p(np.abs(dense))
    means, deviations = np.nanmean(logs, axis=0), np.nanstd(logs, axis=0)
    np.save(f"{out}/dense.npy", np.nan_to_num((logs - means) / deviations).astype(np.float32))
    np.save(f"{out}/labels.npy", np.array(labels, np.float32))
    np.save(f"{out}/sparse.npy", np.stack([rows_of(sparse[:, column]) for column in range(sparse.shape[1])]))
    return len(labels)


def rows_by_dictionary(ids: np.ndarray) -> np.ndarray:
    """The rows of a column of ids (-1: missing), value by value."""
    counts: dict[int, int] = {}
    for value in ids:
        counts[value] = counts.get(value, 0) + 1
    frequent = [value for value, count in counts.items() if count >= MIN_COUNT and value >= 0]
    kept = sorted(frequent, key=counts.__getitem__, reverse=True)[: MOST_ROWS - FIRST_ROW]
    rows = {value: row for row, value in enumerate(kept, start=FIRST_ROW)}
    rows[-1] = 0
    return np.array([rows.get(value, 1) for value in ids], np.int32)


def rows_by_unique(ids: np.ndarray) -> np.ndarray:
    """The same, sorted, counted and numbered by ``np.unique``."""
    values, places, counts = np.unique(ids, return_inverse=True, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    order = order[(counts[order] >= MIN_COUNT) & (values[order] >= 0)][: MOST_ROWS - FIRST_ROW]
    rows = np.ones(len(values), np.int32)
    rows[order] = np.arange(FIRST_ROW, FIRST_ROW + len(order))
    rows[values < 0] = 0
    found: np.ndarray = rows[places]
    return found


RIVALS: dict[str, Callable[[str, str], int]] = {
    "plain_polars": plain_polars,
    "per_column_numpy": partial(per_column, rows_by_dictionary),
    "per_column_unique": partial(per_column, rows_by_unique),
}
CONTENDERS = ("nightjar", *RIVALS)


if __name__ == "__main__":
    main()
