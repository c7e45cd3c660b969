"""``make bench-ingest-scale``: ingestion by Ray with 1, 2 and 4 workers, everything on as many cores.

Ray, its workers and the driver share the first 1, 2 or 4 cores. ``ratio``: rows per second of 4 workers over 4 times
those of one, medians over rounds, starts of processes not timed; ``machine_ratio``: the same of independent processes
on a core each, which share nothing but the machine. Where there are fewer cores than workers, and beside other work,
``ratio`` says nothing (None), and seconds of processor time stand in: ``ratio_cpu`` is that of one worker, driver and
Ray over that of 4, per row; ``driver_cpu_share`` what of the latter is the driver's, all of it one after the other.
``told_share``: pickled bytes of all that the driver gets over the
bytes of the log. ``same``: the dataset has the checksums that the local engine gives. ``driver_growth``: the driver's
peak memory at ``--times`` times the rows over that at one time.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import finish
from benchmarks.ingest import IDS, peak_bytes
from pipeline.compose import compose
from pipeline.config import Config, SyntheticConfig
from pipeline.cpus import available_cpus
from pipeline.store import Store

WORKERS = (1, 2, 4)
MILLION = 1_000_000
LOCAL = 0  # workers of a run without Ray


def main() -> None:
    """Run the benchmark and print its JSON line; with ``--one``: a single ingestion, as a child does."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=2 * MILLION)
    options.add_argument("--times", type=int, default=8, help="rows of the second log, in multiples of the first's")
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options.add_argument("--write", type=int, help=argparse.SUPPRESS)
    options.add_argument("--log", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.write is not None:
        _write(given.log, given.write, given.rows)
    elif given.one is not None:
        _child(given.one, given.log)
    else:
        _bench(given.rows, given.times, given.rounds)


def _bench(rows: int, times: int, rounds: int) -> None:
    cores, most = available_cpus(), WORKERS[-1]
    with tempfile.TemporaryDirectory() as folder:
        small, large = f"{folder}/small", f"{folder}/large"
        print(f"generating {rows:,} and {rows * times:,} rows ...", flush=True)
        _generate(small, rows, 1)
        local = _run(LOCAL, small, range(min(most, cores)))
        figures = {count: [_run(count, small, range(min(count, cores))) for _ in range(rounds)] for count in WORKERS}
        ceiling = _independent(small, most) if most <= cores else None
        _generate(large, rows, times)
        big = _run(most, large, range(min(most, cores)))
    rates, spent, drivers = (
        {count: statistics.median(each[figure] for each in runs) for count, runs in figures.items()}
        for figure in ("rows_per_s", "cpu_seconds", "driver_cpu_seconds")
    )
    every = [each for runs in figures.values() for each in runs]
    finish(
        "ingest_scale", rates[most] / (most * rates[1]) if most <= cores else None, rows=rows, machine_ratio=ceiling,
        cores=cores, ratio_cpu=spent[1] / spent[most], driver_cpu_share=drivers[most] / spent[most],
        local_cpu_seconds=local["cpu_seconds"], **{f"cpu_seconds_{count}": seconds for count, seconds in spent.items()},
        **{f"rows_per_s_{count}": rate for count, rate in rates.items()},
        told_share=max(each["told"] / each["bytes"] for each in every), told_share_large=big["told"] / big["bytes"],
        same=all(each["files"] == local["files"] for each in every),
        driver_peak_bytes=max(each["peak"] for each in figures[most]), driver_peak_bytes_large=big["peak"],
        driver_growth=big["peak"] / max(each["peak"] for each in figures[most]), times=times,
        rows_per_s_large=big["rows_per_s"], cpu_seconds_large=big["cpu_seconds"],
        driver_cpu_seconds_large=big["driver_cpu_seconds"], local_rows_per_s=local["rows_per_s"],
    )  # fmt: skip


def _generate(folder: str, rows: int, files: int) -> None:
    """``files`` files of ``rows`` rows each, drawn by as many processes as there are CPUs."""
    Path(folder).mkdir()

    def one(number: int) -> None:
        command = [sys.executable, "-m", "benchmarks.ingest_scale", "--write", str(number), "--rows", str(rows)]
        subprocess.run([*command, "--log", f"{folder}/{number:03d}.tsv"], check=True)

    with ThreadPoolExecutor(available_cpus()) as pool:
        list(pool.map(one, range(files)))


def _write(path: str, number: int, rows: int) -> None:
    from pipeline.ingest.synthetic import write_tsv

    write_tsv(SyntheticConfig(rows=rows, ids_per_feature=IDS), 2026 + number, path)


def _independent(log: str, most: int) -> float:
    """Rows per second of ``most`` processes at once, a core and a thread each, over ``most`` times those of one."""
    alone = _run(LOCAL, log, range(1))["rows_per_s"]
    with ThreadPoolExecutor(most) as pool:
        together = sum(one["rows_per_s"] for one in pool.map(lambda core: _run(LOCAL, log, [core]), range(most)))
    return together / (most * alone)


def _run(workers: int, log: str, cores: Any) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.ingest_scale", "--one", str(workers), "--log", log]
    usable = sorted(os.sched_getaffinity(0))
    pinned = ["taskset", "-c", ",".join(str(usable[core]) for core in cores)]
    done = subprocess.run([*pinned, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    one: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    name = f"ray with {workers} workers" if workers else f"local on {len(list(cores))} cores"
    print(f"{name}: {one['rows']:,} rows, {one['rows_per_s']:,.0f} rows/s, driver {one['peak'] / 2**20:,.0f} MiB, "
          f"{one['cpu_seconds']:.1f} s of processor time, {one['driver_cpu_seconds']:.1f} of them the driver's, "
          f"told {one['told'] / 2**20:.1f} MiB of {one['bytes'] / 2**20:,.0f}", flush=True)  # fmt: skip
    return one


def _child(workers: int, log: str) -> None:
    told = _started(workers)
    engine = "ray" if workers else "local"
    settings = ["data=criteo", f"ingest.engine={engine}", "ingest.block_mib=4", "ingest.groups_per_file=2"]
    settings += ["data.sparse_defaults.min_count=2", "data.sparse_defaults.rows=100000"]
    with tempfile.TemporaryDirectory() as folder:
        _warm_up(settings, folder)
        told.clear()
        config = compose([*settings, f"data.path={log}"])
        began, own, others = time.perf_counter(), time.process_time(), _children_seconds()
        summary, files = _ingest(config, f"{folder}/store")
        seconds, own, others = time.perf_counter() - began, time.process_time() - own, _children_seconds() - others
    rows = int(summary["rows"])
    print(json.dumps({
        "rows": rows, "rows_per_s": rows / seconds, "peak": peak_bytes(), "told": sum(told), "files": files,
        "cpu_seconds": own + others, "driver_cpu_seconds": own,
        "bytes": int(summary["bytes_in"]),
    }))  # fmt: skip


def _children_seconds() -> float:
    """Processor time of this process's descendants so far: Ray and its workers."""
    times = [each.cpu_times() for each in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


def _started(workers: int) -> list[int]:
    """Start Ray with ``workers`` workers, if any; returns where the bytes that the driver gets will be listed."""
    told: list[int] = []
    if not workers:
        return told
    import ray

    from pipeline.ingest.ray_engine import RayEngine, init_options

    ray.init(address="local", num_cpus=workers, **init_options())
    get = RayEngine._get

    def counted(self: RayEngine, refs: Any) -> Any:
        value = get(self, refs)
        told.append(len(pickle.dumps(value, protocol=5)))
        return value

    RayEngine._get = counted  # type: ignore[method-assign]
    return told


def _warm_up(settings: list[str], folder: str) -> None:
    """Ingest a little, so that every process has imported what it needs."""
    log = f"{folder}/warm.tsv"
    _write(log, -1, 100_000)
    _ingest(compose([*settings, "ingest.block_mib=1", f"data.path={log}"]), f"{folder}/warm")


def _ingest(config: Config, store: str) -> tuple[dict[str, Any], dict[str, str]]:
    from pipeline.ingest.stage import ingest

    with Store(store).draft("datasets/bench/k", kind="dataset", key="k", config={}, inputs={}) as draft:
        summary = ingest(config.data, config.ingest, config.seed, draft)
        artifact = draft.commit(summary)
    return summary, {name: entry.checksum for name, entry in artifact.files.items()}


if __name__ == "__main__":
    main()
