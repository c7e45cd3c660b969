"""``make bench-ssd``: training with tables on SSD, several times larger than the memory, against all in memory.

One DLRM (26 equal tables, D 64, batch 4096) and the same ids for both; rows are numbered in falling frequency, as
ingestion does. The tables on SSD train in a memory cgroup (version 1 or 2) that the benchmark makes and removes; where
none can be made it says so, and the memory they used is measured by PSS. Every row that is not pinned lies on the disk,
written past the page cache, before the clock runs. For each limit a process of its own; the run in memory answers in
turn with it, and of three such pairs the one with the median ratio counts: this is a noisy kind of machine.

``ratio``: Zipf 1.2, tables 8 times the limit: samples/s on SSD / in memory. With ids of Zipf 1.05 the yardstick is the
bound min(rate in memory, random reads of 4 KiB a second at depth 32 / cold rows of a step x batch), both measured here.
``--steps-only N`` trains on SSD alone in a sparse file (rows get values when first used) and prints the peak of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import finish
from pipeline.launch.memory import MemoryCgroup
from pipeline.planning.probes import time_disk

GIB = 2**30
STATE_BYTES = 4  # a row
PROCESS = int(0.62 * GIB)  # Python, torch, activations, and the rows of the batches on their way
PLACE_BYTES = 4  # a row on SSD, in memory: where it is
PHASES = ((1.2, True), (1.05, True), (1.2, False))  # exponent, prefetch


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--gib", type=float, default=12.0, help="tables: weights and Adagrad sums")
    options.add_argument("--times", type=int, nargs="*", default=[8, 4, 2], help="tables by memory limit")
    options.add_argument("--tables", type=int, default=26)
    options.add_argument("--dim", type=int, default=64)
    options.add_argument("--batch", type=int, default=4096)
    options.add_argument("--pinned", type=float, default=0.95, help="share of the memory for rows that hot ones get")
    options.add_argument("--steps", type=int, default=20, help="under the clock, a phase")
    options.add_argument("--rounds", type=int, default=3, help="times a phase is measured, in turn with memory: median")
    options.add_argument("--warm", type=float, default=8.0, help="seconds of training before the clock runs, a phase")
    options.add_argument("--steps-only", type=int, help="train so many steps on SSD within the first limit, no more")
    options.add_argument("--folder", help="where the tables lie; a temporary folder unless given")
    given = options.parse_args()
    # A bench that is told to stop removes its cgroup and ends its children too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        if given.steps_only:
            _train_only(given, folder)
        else:
            _compare(given, folder)


class _Child:
    """A training process and the cgroup around it. ``limit`` in bytes (0: none); ``limited``: whether it holds."""

    def __init__(self, given: argparse.Namespace, folder: str | None, limit: int = 0, lazy: bool = False) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ssd_child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.group = self._limit(limit) if limit else None
        row_bytes = 4 * given.dim + STATE_BYTES
        self._batch = given.batch
        self.ask(
            tables=given.tables, rows=int(given.gib * GIB / row_bytes / given.tables), dim=given.dim, batch=given.batch,
            folder=folder, cache_rows=_cache_rows(given, limit), lazy=lazy,
        )  # fmt: skip

    def _limit(self, limit: int) -> MemoryCgroup | None:
        try:
            group = MemoryCgroup(f"nightjar-bench-{os.getpid()}-{self._process.pid}", limit)
        except OSError as error:
            print(f"no memory cgroup can be made ({error}): memory is measured by PSS, not limited", flush=True)
            return None
        group.add(self._process.pid)
        return group

    def ask(self, **what: Any) -> dict[str, Any]:
        """The child's answer; it stops the benchmark where the child dies."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"the training process ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the child and remove its cgroup."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self.group is not None:
            self.group.remove()


def _cache_rows(given: argparse.Namespace, limit: int) -> int:
    """Rows of a table that ``limit`` bytes of memory have room for, beside the process and the places of all rows."""
    row_bytes = 4 * given.dim + STATE_BYTES
    rows = given.gib * GIB / row_bytes
    return int(given.pinned * max(0.0, limit - PROCESS - PLACE_BYTES * rows) / row_bytes / given.tables)


def _compare(given: argparse.Namespace, folder: str) -> None:
    began = time.perf_counter()
    iops = time_disk(Path(folder), size=1 << 30)["ssd_read_iops"]
    print(f"disk: {iops:,.0f} random reads of 4 KiB a second at depth 32; {given.gib:g} GiB of tables", flush=True)
    rows, limited = [], True
    with ExitStack() as stack:
        memory = _Child(given, None)
        stack.callback(memory.close)
        for times in given.times:
            found, held = _at(given, folder, memory, times, iops)
            rows += found
            limited &= held
    _print(rows)
    by_name = {f"{row['times']}x_zipf{row['zipf']}{'' if row['prefetch'] else '_no_prefetch'}": row for row in rows}
    main_row = by_name.get(f"{max(given.times)}x_zipf1.2", rows[0])
    flat = {f"{name}_{key}": row[key] for name, row in by_name.items() for key in _KEPT if row[key] is not None}
    seconds = time.perf_counter() - began
    finish("ssd", main_row["ratio"], limited=limited, read_iops=iops, seconds_total=seconds, **flat)


_KEPT = ("samples_per_s", "ratio", "of_bound", "peak_bytes")


def _at(
    given: argparse.Namespace, folder: str, memory: _Child, times: int, iops: float
) -> tuple[list[dict[str, Any]], bool]:
    """Both exponents, and prefetch off where memory is shortest, with tables ``times`` the limit."""
    child = _Child(given, folder, int(given.gib * GIB / times))
    rows = []
    try:
        for number, (zipf, prefetch) in enumerate(PHASES if times == max(given.times) else PHASES[:2]):
            asked = {"steps": given.steps, "zipf": zipf, "prefetch": prefetch, "max_seconds": 12.0}
            rounds = []
            for again in range(given.rounds):
                # Other ids every time: rows that left memory together lie together, and were read in long runs.
                asked["seed"] = 1 + number + len(PHASES) * again
                plain = memory.ask(warm_seconds=1.0 if again else 2.0, **asked)["samples_per_s"]
                row = child.ask(warm_seconds=1.0 if again else given.warm, **asked)
                rounds.append(row | {"in_memory": plain, "ratio": row["samples_per_s"] / plain})
            row = sorted(rounds, key=lambda row: row["ratio"])[given.rounds // 2]
            plain = row["in_memory"]
            cold = None if row["cold_share"] is None else row["cold_share"] * given.batch * given.tables
            row |= {"times": times, "zipf": zipf, "prefetch": prefetch, "cold": cold}
            bound = min(plain, iops / cold * given.batch) if cold else None
            row["of_bound"] = row["samples_per_s"] / bound if bound else None
            row["peak_bytes"] = child.group.peak() if child.group else row["pss_bytes"]
            rows.append(row)
            _print([row], head=len(rows) == 1 and times == given.times[0])
    finally:
        child.close()
    return rows, child.group is not None


def _print(rows: list[dict[str, Any]], head: bool = True) -> None:
    if head:
        print("tables  zipf  ahead  samples/s  in memory  ratio  of bound  cold/step  faults  read/step  written  hit")
    for row in rows:
        cold, bound = (f"{row[key]:.{digits}f}" if row[key] else "-" for key, digits in (("cold", 0), ("of_bound", 2)))
        ahead, read, written = "yes" if row["prefetch"] else "no", row["ssd_read_bytes"], row["ssd_written_bytes"]
        print(
            f"{row['times']:>5}x  {row['zipf']:>4}  {ahead:>5}  {row['samples_per_s']:>9,.0f}"
            f"  {row['in_memory']:>9,.0f}  {row['ratio']:>5.2f}  {bound:>8}  {cold:>9}  {row['ssd_faults']:>6.0f}"
            f"  {read / 1e6:>6.1f} MB  {written / 1e6:>4.0f} MB  {row['ssd_hit_rate']:.3f}",
            flush=True,
        )


def _train_only(given: argparse.Namespace, folder: str) -> None:
    """Steps on SSD alone: lazy rows, Zipf 1.2, the first limit."""
    limit = int(given.gib * GIB / given.times[0])
    child = _Child(given, folder, limit, lazy=True)
    try:
        row = child.ask(steps=given.steps_only, warm_seconds=0.0, zipf=1.2, prefetch=True, seed=1, max_seconds=600.0)
        peak = child.group.peak() if child.group else row["pss_bytes"]
    finally:
        child.close()
    print(f"{given.gib:g} GiB of tables, {given.steps_only} steps: peak {peak / GIB:.2f} of {limit / GIB:g} GiB")
    finish("ssd_steps", peak / limit, limited=child.group is not None, peak_bytes=peak, limit_bytes=limit, **row)


if __name__ == "__main__":
    main()
