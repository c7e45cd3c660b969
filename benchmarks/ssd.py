"""``make bench-ssd``: training with tables on SSD, several times larger than the memory, against all in memory.

One DLRM (26 equal tables, D 64, batch 4096) and the same ids for both; rows are numbered in falling frequency, as
ingestion does. The tables on SSD train in a memory cgroup (version 1 or 2) that the benchmark makes and removes; where
none can be made it says so, and the memory they used is measured by PSS. What a process takes beside its tables is
measured first, on this machine, and the hot rows get what the limit leaves. Every row that is not pinned lies on the
disk, written past the page cache, before the clock runs. For each limit a process of its own; the run in memory answers
in turn with it, and of at most three such pairs the one with the median ratio counts: this is a noisy kind of machine.

``ratio``: Zipf 1.2, tables 8 times the limit: samples/s on SSD / in memory. With ids of Zipf 1.05 the yardstick is the
bound min(rate in memory, random reads of 4 KiB a second / cold rows of a step x batch), whose reads the tool ``fio``
counts at the same depth, by the same engine; without fio there is no such figure, and a line says so.
``steady_ratio``: the same in a log that is cleaned, of ids that drift: before the clock runs, rows leave memory until
every log has turned over twice; ``write_amplification``: bytes written for each byte that left memory, of the second
time. All that is left of ``--minutes`` goes to rounds of this phase. ``--drift``: rows by which the popular rows move
in a step. ``--steps-only N`` trains on SSD alone in a sparse file (rows get values when first used) and prints the
peak of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import finish
from benchmarks.ssd_memory import STATE_BYTES, Tables, cache_rows
from pipeline.embeddings.ssd.aio import DEPTH, Aio, DiskQueue, Uring
from pipeline.launch.memory_cgroup import MemoryCgroup

GIB = 2**30
PROBE_ROWS, PROBE_STEPS = 512, 12


class Phase(NamedTuple):
    """What is timed: ids of an exponent, read ahead or not, from a fresh log or one that has to be cleaned."""

    zipf: float
    prefetch: bool
    steady: bool = False

    @property
    def name(self) -> str:
        """As in the JSON line."""
        return f"zipf{self.zipf}{'' if self.prefetch else '_no_prefetch'}{'_steady' if self.steady else ''}"


PHASES = (Phase(1.2, True), Phase(1.05, True), Phase(1.2, False), Phase(1.2, True, steady=True))
COLDEST = min(phase.zipf for phase in PHASES)


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--gib", type=float, default=12.0, help="tables: weights and Adagrad sums")
    options.add_argument("--times", type=int, nargs="*", default=[8, 4, 2], help="tables by memory limit")
    options.add_argument("--tables", type=int, default=26)
    options.add_argument("--dim", type=int, default=64)
    options.add_argument("--batch", type=int, default=4096)
    options.add_argument("--pinned", type=float, default=0.9, help="share of the memory for rows that hot ones get")
    options.add_argument("--steps", type=int, default=20, help="under the clock, a phase")
    options.add_argument("--rounds", type=int, default=3, help="times a phase is measured at most, in turn with memory")
    options.add_argument("--minutes", type=float, default=12.0, help="after which no further round begins")
    options.add_argument("--warm", type=float, default=8.0, help="seconds of training before the clock runs, a phase")
    options.add_argument("--aged", type=float, default=2.0, help="turns of the log before the last phase")
    options.add_argument("--aged-seconds", type=float, default=400.0, help="time for these turns at most")
    options.add_argument("--drift", type=float, default=0.5, help="rows a step by which ids move there")
    options.add_argument("--spare", type=float, default=0.2, help="as hardware.ssd_spare")
    options.add_argument("--only-steady", action="store_true", help="the last phase alone, of the first limit")
    options.add_argument("--steps-only", type=int, help="train so many steps on SSD within the first limit, no more")
    options.add_argument("--folder", help="where the tables lie; a temporary folder unless given")
    given = options.parse_args()
    rows = int(given.gib * GIB / (4 * given.dim + STATE_BYTES) / given.tables)
    tables = Tables(given.tables, rows, given.dim, given.batch)
    # A bench that is told to stop removes its cgroup and ends its children too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        bench = _Bench(given, tables, folder, _process_bytes(tables, folder))
        if given.steps_only:
            bench.train_only()
        else:
            bench.compare()


class _Child:
    """A training process and the cgroup around it. ``limit`` in bytes (0: none); ``limited``: whether it holds."""

    def __init__(
        self, tables: Tables, folder: str | None, kept: int = 0, limit: int = 0, lazy: bool = False, spare: float = 0.2
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ssd_child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.group = self._limit(limit) if limit else None
        self.ask(**asdict(tables), folder=folder, cache_rows=kept, lazy=lazy, spare=spare)

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
        line = ""
        with suppress(BrokenPipeError):  # it died since the last answer
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            killed = ", by its memory limit" if self.group is not None and self.group.killed() else ""
            sys.exit(f"the training process ended with {self._process.wait()}{killed}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the child and remove its cgroup."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self.group is not None:
            self.group.remove()


def _process_bytes(tables: Tables, folder: str) -> int:
    """What the process takes at most beside its tables, on this machine: the same model trains on tiny ones."""
    child = _Child(Tables(tables.count, PROBE_ROWS, tables.dim, tables.batch), folder, kept=PROBE_ROWS, lazy=True)
    try:
        asked = {"steps": PROBE_STEPS, "warm_seconds": 0.0, "zipf": 1.2, "prefetch": True, "seed": 1}
        taken = int(child.ask(**asked, max_seconds=60.0)["process_bytes"])
    finally:
        child.close()
    print(f"process: {taken / GIB:.2f} GiB beside its tables", flush=True)
    return taken


class _Bench:
    """The measurements, in turn on SSD and in memory. ``process``: bytes of a process beside its tables."""

    def __init__(self, given: argparse.Namespace, tables: Tables, folder: str, process: int) -> None:
        self.given, self.tables, self.folder, self.process = given, tables, folder, process
        self.began = time.perf_counter()
        self.phases = len(given.times) * 2 + 2  # not yet measured
        self.aged: dict[str, Any] = {}

    def _limited(self, times: int, lazy: bool = False) -> tuple[_Child, int]:
        """A child on SSD under a limit of the tables / ``times``, and the limit."""
        limit = int(self.given.gib * GIB / times)
        kept = cache_rows(self.tables, limit, self.process, COLDEST, self.given.pinned)
        return _Child(self.tables, self.folder, kept, limit, lazy, self.given.spare), limit

    def compare(self) -> None:
        """All limits, then the table of all and the JSON line."""
        iops, why = fio_reads(Path(self.folder))
        told = f"{iops:,.0f} reads of 4 KiB a second at depth {DEPTH} by fio" if iops else why
        print(f"disk: {told}", flush=True)
        rows, limited = [], True
        with ExitStack() as stack:
            memory = _Child(self.tables, None)
            stack.callback(memory.close)
            for times in self.given.times:
                found, held = self._at(memory, times, iops)
                rows += found
                limited &= held
        _print(rows)
        by_name = {f"{row['times']}x_{row['phase'].name}": row for row in rows}
        most = max(self.given.times)
        steady = by_name[f"{most}x_{PHASES[-1].name}"]
        main_row = by_name.get(f"{most}x_{PHASES[0].name}", steady)
        flat = {f"{name}_{key}": row[key] for name, row in by_name.items() for key in _KEPT if row[key] is not None}
        finish(
            "ssd",
            main_row["ratio"],
            steady_ratio=steady["ratio"],
            limited=limited,
            fio_iops=iops,
            without_fio=why,
            write_amplification=self.aged.get("write_amplification"),
            turns=self.aged.get("turns"),
            spare=self.given.spare,
            drift=self.given.drift,
            process_bytes=self.process,
            seconds_total=time.perf_counter() - self.began,
            **flat,
        )

    def _at(self, memory: _Child, times: int, iops: float | None) -> tuple[list[dict[str, Any]], bool]:
        """Both exponents; where memory is shortest also prefetch off, and the log in its steady state."""
        child, _ = self._limited(times)
        rows = []
        try:
            for number, phase in self._phases(times):
                if phase.steady:
                    asked = {
                        "zipf": phase.zipf,
                        "drift": self.given.drift,
                        "shift": 0.0,
                        "seconds": self.given.aged_seconds,
                    }
                    self.aged = child.ask(age=self.given.aged, seed=99, **asked)
                    print(f"aged: {_aged(self.aged)}", flush=True)
                row = self._measure(memory, child, phase, number) | {"times": times, "phase": phase}
                plain = row["in_memory"]
                cold = row["cold_share"] * self.given.batch * self.given.tables if row["cold_share"] else None
                bound = min(plain, iops / cold * self.given.batch) if cold and iops else None
                row |= {"cold": cold, "of_bound": row["samples_per_s"] / bound if bound else None}
                row["peak_bytes"] = child.group.peak() if child.group else row["pss_bytes"]
                rows.append(row)
                _print([row], head=len(rows) == 1 and times == self.given.times[0])
        finally:
            child.close()
        return rows, child.group is not None

    def _phases(self, times: int) -> list[tuple[int, Phase]]:
        here = PHASES if times == max(self.given.times) else PHASES[:2]
        return [each for each in enumerate(here) if each[1].steady or not self.given.only_steady]

    def _measure(self, memory: _Child, child: _Child, phase: Phase, number: int) -> dict[str, Any]:
        """The round with the median ratio: as many as there is time for, one at least."""
        asked = {"steps": self.given.steps, "zipf": phase.zipf, "prefetch": phase.prefetch, "max_seconds": 12.0}
        rounds: list[dict[str, Any]] = []
        left = max(0.0, 60 * self.given.minutes - (time.perf_counter() - self.began))
        left /= 1 if phase.steady else self.phases
        most = sys.maxsize if phase.steady else self.given.rounds
        if phase.steady:
            asked |= {"drift": self.given.drift, "shift": self.aged["shift"]}
        begun, last = time.perf_counter(), 0.0
        while not rounds or (len(rounds) < most and time.perf_counter() - begun + last < left):
            again = len(rounds)
            start = time.perf_counter()
            # Other ids every time: rows that left memory together lie together, and were read in long runs.
            asked["seed"] = 1 + number + len(PHASES) * again
            plain = memory.ask(warm_seconds=1.0 if again else 2.0, **asked)["samples_per_s"]
            row = child.ask(warm_seconds=1.0 if again else self.given.warm, **asked)
            if phase.steady:
                asked["shift"] = row["shift"]
            rounds.append(row | {"in_memory": plain, "ratio": row["samples_per_s"] / plain})
            last = time.perf_counter() - start
        self.phases -= 1
        return sorted(rounds, key=lambda row: float(row["ratio"]))[(len(rounds) - 1) // 2] | {"rounds": len(rounds)}

    def train_only(self) -> None:
        """Steps on SSD alone: lazy rows, Zipf 1.2, the first limit."""
        child, limit = self._limited(self.given.times[0], lazy=True)
        try:
            asked = {"steps": self.given.steps_only, "zipf": 1.2, "prefetch": True, "seed": 1, "max_seconds": 600.0}
            row = child.ask(warm_seconds=0.0, **asked)
            peak = child.group.peak() if child.group else row["pss_bytes"]
        finally:
            child.close()
        steps = self.given.steps_only
        print(f"{self.given.gib:g} GiB of tables, {steps} steps: peak {peak / GIB:.2f} of {limit / GIB:g} GiB")
        finish("ssd_steps", peak / limit, limited=child.group is not None, peak_bytes=peak, limit_bytes=limit, **row)


_KEPT = (
    "samples_per_s",
    "ratio",
    "of_bound",
    "peak_bytes",
    "rounds",
    "ssd_hit_rate",
    "ssd_write_amplification",
    "cold",
)


def fio_reads(folder: Path, seconds: int = 5) -> tuple[float | None, str]:
    """Random reads of 4 KiB a second that the tool fio gets from the disk of ``folder``, at the depth and by the engine
    of our own reads; None, and why, where it cannot tell."""
    if shutil.which("fio") is None:
        return None, "fio is not installed, so there is no bound to compare with (Debian: apt-get install fio)"
    queue = DiskQueue()
    queue.close()
    engine = {Uring.name: "io_uring", Aio.name: "libaio"}.get(queue.engine, "psync")
    job = [f"--directory={folder}", "--name=bound", "--size=1g", "--rw=randread", "--bs=4k", f"--iodepth={DEPTH}"]
    how = [f"--ioengine={engine}", "--direct=1", "--time_based", f"--runtime={seconds}", "--output-format=json"]
    done = subprocess.run(["fio", *job, *how], capture_output=True, text=True, timeout=120, check=False)
    for file in folder.glob("bound.*"):
        file.unlink()
    if done.returncode:
        return None, f"fio failed: {done.stderr.strip()[-200:]}"
    return float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["iops"]), ""


def _aged(answer: dict[str, Any]) -> str:
    written = answer["write_amplification"]
    if not written:
        return "no row left memory"
    turned = f"every log turned over {answer['turns']:.2f} times in {answer['seconds']:.0f} s"
    return f"{turned}, {answer['emptied']:,} segments emptied, {written:.2f} bytes written a byte of the second half"


def _print(rows: list[dict[str, Any]], head: bool = True) -> None:
    if head:
        print(
            "tables  zipf  ahead  log     samples/s  in memory  ratio  of bound  cold/step  faults  read/step  written"
            "  cleaned  amplified  hit"
        )
    for row in rows:
        cold, bound = (f"{row[key]:.{digits}f}" if row[key] else "-" for key, digits in (("cold", 0), ("of_bound", 2)))
        amplified = f"{row['ssd_write_amplification']:.2f}" if row["ssd_write_amplification"] else "-"
        phase, read, written = row["phase"], row["ssd_read_bytes"], row["ssd_written_bytes"]
        print(
            f"{row['times']:>5}x  {phase.zipf:>4}  {'yes' if phase.prefetch else 'no':>5}"
            f"  {'steady' if phase.steady else 'fresh':<6}  {row['samples_per_s']:>9,.0f}"
            f"  {row['in_memory']:>9,.0f}  {row['ratio']:>5.2f}  {bound:>8}  {cold:>9}  {row['ssd_faults']:>6.0f}"
            f"  {read / 1e6:>6.1f} MB  {written / 1e6:>4.0f} MB  {row['cleaned']:>7.1f}  {amplified:>9}"
            f"  {row['ssd_hit_rate']:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
