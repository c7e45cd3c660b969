"""``make bench-ingest-scale``: ingestion by Ray with 1, 2 and 4 workers, everything on as many cores.

Ray, its workers and the driver share the first 1, 2 or 4 cores. On a machine with fewer, cgroups make cores of it that
are as much slower: on two, each process gets 0.4 of a CPU (``share``), the driver too, and all of a run together as
much for each worker; a fifth of the CPUs is left for the kernel, which writes the files. ``ratio``: rows per second of
4 workers over 4 times those of one, medians over rounds, starts of processes not timed; ``ratio_2``: of 2;
``ratio_busy``: what ``ratio`` were if a row took equal processor time on both, which shares of CPUs move: how busy 4
workers keep their cores over how busy one does; ``machine_ratio``: as ``ratio``, of 4 independent processes on a core
each, which share nothing but the machine. Without cgroups there, and beside other work, ``ratio`` says nothing (None),
and seconds of processor time stand in: ``ratio_cpu`` is that of one worker, driver and Ray over that of 4, per row;
``driver_cpu_share`` what of the latter is the driver's, all of it one after the other. ``told_share``: pickled bytes of
all that the driver gets over the bytes of the log. ``same``: the dataset has the checksums that the local engine gives.
``driver_growth``: the driver's peak memory at ``--times`` times the rows over that at one time.
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
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cgroup import awake, equal_share, shares
from benchmarks.harness import finish, options, peak_bytes
from benchmarks.ingest import ingested, write_criteo
from pipeline.config.compose import compose
from pipeline.core.cpus import available_cpus

WORKERS = (1, 2, 4)
MILLION = 1_000_000
LOCAL = 0  # workers of a run without Ray


def main() -> None:
    """Run the benchmark and print its JSON line; with ``--one``: a single ingestion, as a child does."""
    given = options(
        __doc__,
        rows=2 * MILLION,
        times=(8, "rows of the second log, in multiples of the first's"),
        rounds=2,
        one=(None, "one ingestion of --log by so many workers (0: local)", {"type": int}),
        cpus=(1.0, "that all of it has together, by a quota"),
        share=(1.0, "that each of its processes has"),
        write=(None, argparse.SUPPRESS, {"type": int}),
        log=(None, "folder of logs, for --one; file, for --write"),
    )
    if given.write is not None:
        write_criteo(given.log, given.rows, 2026 + given.write)
    elif given.one is not None:
        _child(given.one, given.log, given.cpus, given.share)
    else:
        _bench(given.rows, given.times, given.rounds)


def _bench(rows: int, times: int, rounds: int) -> None:
    most = WORKERS[-1]
    with tempfile.TemporaryDirectory() as folder:
        small, large = f"{folder}/small", f"{folder}/large"
        print(f"generating {rows:,} and {rows * times:,} rows ...", flush=True)
        _generate(small, rows, 1)
        _generate(large, rows, times)
        with awake() if equal_share(WORKERS[-1]) < 1 else nullcontext():
            local = _run(LOCAL, small, most)
            figures = {count: [_run(count, small, count) for _ in range(rounds)] for count in WORKERS}
            share = figures[1][0]["share"]
            shown = share == equal_share(WORKERS[-1])  # 1 where no cgroups can be made
            ceiling = _independent(small, most) if shown else None
            big = _run(most, large, most)
    rates, spent, drivers = (
        {count: statistics.median(each[figure] for each in runs) for count, runs in figures.items()}
        for figure in ("rows_per_s", "cpu_seconds", "driver_cpu_seconds")
    )
    every = [each for runs in figures.values() for each in runs]
    finish(
        "ingest_scale",
        rates[most] / (most * rates[1]) if shown else None,
        rows=rows,
        machine_ratio=ceiling,
        ratio_busy=rates[most] * spent[most] / (most * rates[1] * spent[1]) if shown else None,
        ratio_2=rates[2] / (2 * rates[1]) if shown else None,
        share=share,
        cores=available_cpus(),
        ratio_cpu=spent[1] / spent[most],
        driver_cpu_share=drivers[most] / spent[most],
        local_cpu_seconds=local["cpu_seconds"],
        **{f"cpu_seconds_{count}": seconds for count, seconds in spent.items()},
        **{f"rows_per_s_{count}": rate for count, rate in rates.items()},
        told_share=max(each["told"] / each["bytes"] for each in every),
        told_share_large=big["told"] / big["bytes"],
        same=all(each["files"] == local["files"] for each in every),
        driver_peak_bytes=max(each["peak"] for each in figures[most]),
        driver_peak_bytes_large=big["peak"],
        driver_growth=big["peak"] / max(each["peak"] for each in figures[most]),
        times=times,
        rows_per_s_large=big["rows_per_s"],
        cpu_seconds_large=big["cpu_seconds"],
        driver_cpu_seconds_large=big["driver_cpu_seconds"],
        local_rows_per_s=local["rows_per_s"],
    )


def _generate(folder: str, rows: int, files: int) -> None:
    """``files`` files of ``rows`` rows each, drawn by as many processes as there are CPUs."""
    Path(folder).mkdir()

    def one(number: int) -> None:
        command = [sys.executable, "-m", "benchmarks.ingest_scale", "--write", str(number), "--rows", str(rows)]
        subprocess.run([*command, "--log", f"{folder}/{number:03d}.tsv"], check=True)

    with ThreadPoolExecutor(available_cpus()) as pool:
        list(pool.map(one, range(files)))


def _independent(log: str, most: int) -> float:
    """Rows per second of ``most`` processes at once, a core and a thread each, over ``most`` times those of one."""
    alone = _run(LOCAL, log, 1)["rows_per_s"]
    with ThreadPoolExecutor(most) as pool:
        together = sum(one["rows_per_s"] for one in pool.map(lambda core: _run(LOCAL, log, 1, core), range(most)))
    return together / (most * alone)


def _run(workers: int, log: str, cores: int, first: int = 0) -> dict[str, Any]:
    """One ingestion on ``cores`` cores from the ``first`` on, which are shares of CPUs where there are fewer."""
    usable, share = sorted(os.sched_getaffinity(0)), equal_share(WORKERS[-1])
    own = {str(usable[core % len(usable)]) for core in range(first, first + cores)}
    command = ["taskset", "-c", ",".join(own), sys.executable, "-m", "benchmarks.ingest_scale", "--log", log]
    command += ["--one", str(workers)]
    if share < 1 and (workers or cores < WORKERS[-1]):
        command += ["--cpus", str(cores * share), "--share", str(share if workers else cores * share)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    one: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    name = f"ray with {workers} workers" if workers else f"local on {cores} cores"
    print(
        f"{name}: {one['rows']:,} rows, {one['rows_per_s']:,.0f} rows/s, driver {one['peak'] / 2**20:,.0f} MiB, "
        f"{one['cpu_seconds']:.1f} s of processor time, {one['driver_cpu_seconds']:.1f} of them the driver's, "
        f"told {one['told'] / 2**20:.1f} MiB of {one['bytes'] / 2**20:,.0f}",
        flush=True,
    )
    return one


def _child(workers: int, log: str, cpus: float, share: float) -> None:
    told, ended = _started(workers)
    engine = "ray" if workers else "local"
    settings = ["data=criteo", f"ingest.engine={engine}", "ingest.block_mib=4", "ingest.groups_per_file=2"]
    settings += ["data.sparse_defaults.min_count=2", "data.sparse_defaults.rows=100000"]
    with tempfile.TemporaryDirectory() as folder:
        _warm_up(settings, folder)
        told.clear()
        ended.clear()
        config = compose([*settings, f"data.path={log}"])
        with shares(_processes(), share, together=cpus) as share:
            began, own, others = time.perf_counter(), time.process_time(), _children_seconds()
            summary, files = ingested(config, f"{folder}/store")
            seconds, own = time.perf_counter() - began, time.process_time() - own
            others = (ended[-1] if ended else _children_seconds()) - others
    rows = int(summary["rows"])
    print(
        json.dumps(
            {
                "rows": rows,
                "rows_per_s": rows / seconds,
                "peak": peak_bytes(),
                "told": sum(told),
                "files": files,
                "cpu_seconds": own + others,
                "driver_cpu_seconds": own,
                "bytes": int(summary["bytes_in"]),
                "share": share,
            }
        )
    )


def _processes() -> list[int]:
    """This process and its descendants: the driver, Ray and its workers."""
    own = psutil.Process()
    return [each.pid for each in (own, *own.children(recursive=True))]


def _children_seconds() -> float:
    """Processor time of this process's descendants so far: Ray and its workers."""
    times = [each.cpu_times() for each in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


def _started(workers: int) -> tuple[list[int], list[float]]:
    """Start Ray with ``workers`` workers, if any.

    Returns where the bytes that the driver gets will be listed, and the processor time of its descendants as an engine
    ends, whose mergers end with it.
    """
    told, ended = list[int](), list[float]()
    if not workers:
        return told, ended
    import ray

    from pipeline.plugins.ray.engine import RayEngine, start_local_ray

    start_local_ray(ray, num_cpus=workers)
    get = RayEngine._get

    def counted(self: RayEngine, refs: Any) -> Any:
        value = get(self, refs)
        told.append(len(pickle.dumps(value, protocol=5)))
        return value

    def left(self: RayEngine, *error: Any) -> Any:
        ended.append(_children_seconds())
        return leave(self, *error)

    leave = RayEngine.__exit__
    RayEngine._get = counted  # type: ignore[method-assign]
    RayEngine.__exit__ = left  # type: ignore[assignment, method-assign]
    return told, ended


def _warm_up(settings: list[str], folder: str) -> None:
    """Ingest a little, so that every process has imported what it needs."""
    log = f"{folder}/warm.tsv"
    write_criteo(log, 100_000, 2025)
    ingested(compose([*settings, "ingest.block_mib=1", f"data.path={log}"]), f"{folder}/warm")


if __name__ == "__main__":
    main()
