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
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import Worker, finish, options, show, words
from pipeline.embeddings.ssd.aio import DEPTH, Aio, DiskQueue, Uring
from pipeline.launch.memory_cgroup import MemoryCgroup
from pipeline.planning.candidates import BATCHES_MOVING, NUMBER_BYTES, ROW_BYTES

GIB = 2**30
PROBE_ROWS, PROBE_STEPS = 512, 12
STATE_BYTES = 4  # a row
AHEAD = 4  # batches read ahead, as ``train.prefetch_batches``
FIGURES = words("samples_per_s ratio of_bound peak_bytes rounds ssd_hit_rate ssd_write_amplification cold")
SHOWN = words("""samples_per_s in_memory ratio of_bound cold ssd_faults ssd_read_bytes ssd_written_bytes cleaned
    ssd_write_amplification ssd_hit_rate""")


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


@dataclass(frozen=True)
class Tables:
    """``count`` equal tables of ``rows`` rows of ``dim`` values; ``batch`` ids of each are looked up in a step."""

    count: int
    rows: int
    dim: int
    batch: int

    @property
    def row_bytes(self) -> int:
        """A row and its optimizer state."""
        return 4 * self.dim + STATE_BYTES


def cold_rows(tables: Tables, exponent: float, kept: int) -> float:
    """Distinct rows beyond the first ``kept`` that a batch is expected to look up in one table, of Zipf ids."""
    weights = np.arange(1, tables.rows + 1, dtype=np.float64) ** -exponent
    chance = weights[kept:] / weights.sum()
    return float(-np.expm1(tables.batch * np.log1p(-chance)).sum())


def cache_rows(tables: Tables, limit: int, process: int, exponent: float, share: float) -> int:
    """Rows of a table for ``share`` of what ``limit`` bytes leave beside the process, places and rows on their way."""
    free = limit - process - ROW_BYTES * tables.rows * tables.count
    kept = 0
    for _ in range(8):  # more rows kept, fewer on their way
        moving = (AHEAD + BATCHES_MOVING) * cold_rows(tables, exponent, kept) * (4 * tables.dim + 4 + NUMBER_BYTES)
        kept = min(tables.rows, int(share * max(0.0, free / tables.count - moving) / tables.row_bytes))
    return kept


def main() -> None:
    given = options(
        __doc__,
        gib=(12.0, "tables: weights and Adagrad sums"),
        times=([8, 4, 2], "tables by memory limit"),
        tables=26,
        dim=64,
        batch=4096,
        pinned=(0.9, "share of the memory for rows that hot ones get"),
        steps=(20, "under the clock, a phase"),
        rounds=(3, "times a phase is measured at most, in turn with memory"),
        minutes=(12.0, "after which no further round begins"),
        warm=(8.0, "seconds of training before the clock runs, a phase"),
        aged=(2.0, "turns of the log before the last phase"),
        aged_seconds=(400.0, "time for these turns at most"),
        drift=(0.5, "rows a step by which ids move there"),
        spare=(0.2, "as hardware.ssd_spare"),
        only_steady=(False, "the last phase alone, of the first limit"),
        steps_only=(None, "train so many steps on SSD within the first limit, no more", {"type": int}),
        folder=(None, "where the tables lie; a temporary folder unless given"),
    )
    rows = int(given.gib * GIB / (4 * given.dim + STATE_BYTES) / given.tables)
    tables = Tables(given.tables, rows, given.dim, given.batch)
    # A bench that is told to stop removes its cgroup and ends its children too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        # What the process takes at most beside its tables, on this machine: the same model trains on tiny ones.
        tiny = Tables(tables.count, PROBE_ROWS, tables.dim, tables.batch)
        with closing(Child(tiny, folder, kept=PROBE_ROWS, lazy=True)) as child:
            asked = {"steps": PROBE_STEPS, "warm_seconds": 0.0, "zipf": 1.2, "prefetch": True, "seed": 1}
            process = int(child.ask(**asked, max_seconds=60.0)["process_bytes"])
        print(f"process: {process / GIB:.2f} GiB beside its tables", flush=True)
        bench = Bench(given, tables, folder, process)
        if given.steps_only:
            bench.train_only()
        else:
            bench.compare()


class Child(Worker):
    """A training process and the cgroup around it. ``limit`` in bytes (0: none)."""

    def __init__(
        self, tables: Tables, folder: str | None, kept: int = 0, limit: int = 0, lazy: bool = False, spare: float = 0.2
    ) -> None:
        super().__init__([sys.executable, "-m", "benchmarks.ssd_child"])
        self.group: MemoryCgroup | None = None
        if limit:
            try:
                self.group = MemoryCgroup(f"nightjar-bench-{os.getpid()}-{self.process.pid}", limit)
                self.group.add(self.process.pid)
            except OSError as error:
                print(f"no memory cgroup can be made ({error}): memory is measured by PSS, not limited", flush=True)
        self.ask(**asdict(tables), folder=folder, cache_rows=kept, lazy=lazy, spare=spare)

    def ask(self, **what: Any) -> dict[str, Any]:
        """The child's answer; it stops the benchmark where the child dies."""
        self.send(**what)
        answer = self.answer()
        if answer is None:
            killed = ", by its memory limit" if self.group is not None and self.group.killed() else ""
            sys.exit(f"the training process ended with {self.process.wait()}{killed}")
        return answer

    def peak(self, row: dict[str, Any]) -> int:
        """Bytes at the peak by the cgroup, or by the PSS of ``row``."""
        return self.group.peak() if self.group else row["pss_bytes"]

    def close(self, seconds: float = 60) -> None:
        """End the child and remove its cgroup."""
        super().close(seconds)
        if self.group is not None:
            self.group.remove()


class Bench:
    """The measurements, in turn on SSD and in memory. ``process``: bytes of a process beside its tables."""

    def __init__(self, given: argparse.Namespace, tables: Tables, folder: str, process: int) -> None:
        self.given, self.tables, self.folder, self.process = given, tables, folder, process
        self.began = time.perf_counter()
        self.phases = len(given.times) * 2 + 2  # not yet measured
        self.aged: dict[str, Any] = {}

    def _limited(self, times: int, lazy: bool = False) -> tuple[Child, int]:
        """A child on SSD under a limit of the tables / ``times``, and the limit."""
        limit = int(self.given.gib * GIB / times)
        kept = cache_rows(self.tables, limit, self.process, COLDEST, self.given.pinned)
        return Child(self.tables, self.folder, kept, limit, lazy, self.given.spare), limit

    def compare(self) -> None:
        """All limits, then the table of all and the JSON line."""
        iops, why = fio_reads(Path(self.folder))
        shown = f"{iops:,.0f} reads of 4 KiB a second at depth {DEPTH} by fio" if iops else why
        print(f"disk: {shown}", flush=True)
        rows: dict[str, dict[str, Any]] = {}
        limited, most = True, max(self.given.times)
        with closing(Child(self.tables, None)) as memory:
            for times in self.given.times:
                child, _ = self._limited(times)
                with closing(child):
                    for number, phase in enumerate(PHASES if times == most else PHASES[:2]):
                        if phase.steady or not self.given.only_steady:
                            rows[f"{times}x_{phase.name}"] = self._phase(memory, child, phase, number, iops)
                            show(
                                f"{times}x {phase.name}", {name: rows[f"{times}x_{phase.name}"][name] for name in SHOWN}
                            )
                    limited &= child.group is not None
        steady = rows[f"{most}x_{PHASES[-1].name}"]
        first = rows.get(f"{most}x_{PHASES[0].name}", steady)
        flat = {f"{name}_{key}": row[key] for name, row in rows.items() for key in FIGURES if row[key] is not None}
        finish(
            "ssd",
            first["ratio"],
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

    def _phase(self, memory: Child, child: Child, phase: Phase, number: int, iops: float | None) -> dict[str, Any]:
        """The figures of a phase, its log aged before if it is steady."""
        given = self.given
        if phase.steady:
            asked = {"zipf": phase.zipf, "drift": given.drift, "shift": 0.0, "seconds": given.aged_seconds}
            self.aged = child.ask(age=given.aged, seed=99, **asked)
            show("aged", self.aged, ".2f")
        row = self._measure(memory, child, phase, number)
        cold = row["cold_share"] * given.batch * given.tables if row["cold_share"] else None
        bound = min(row["in_memory"], iops / cold * given.batch) if cold and iops else None
        of_bound = row["samples_per_s"] / bound if bound else None
        return row | {"cold": cold, "of_bound": of_bound, "peak_bytes": child.peak(row)}

    def _measure(self, memory: Child, child: Child, phase: Phase, number: int) -> dict[str, Any]:
        """The round with the median ratio: as many as there is time for, one at least."""
        asked = {"steps": self.given.steps, "zipf": phase.zipf, "prefetch": phase.prefetch, "max_seconds": 12.0}
        left = max(0.0, 60 * self.given.minutes - (time.perf_counter() - self.began))
        most = self.given.rounds
        if phase.steady:
            asked |= {"drift": self.given.drift, "shift": self.aged["shift"]}
            most = sys.maxsize
        else:
            left /= self.phases
        rounds: list[dict[str, Any]] = []
        begun, last = time.perf_counter(), 0.0
        while not rounds or (len(rounds) < most and time.perf_counter() - begun + last < left):
            again, start = len(rounds), time.perf_counter()
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
        steps = self.given.steps_only
        child, limit = self._limited(self.given.times[0], lazy=True)
        with closing(child):
            asked = {"steps": steps, "zipf": 1.2, "prefetch": True, "seed": 1, "max_seconds": 600.0}
            row = child.ask(warm_seconds=0.0, **asked)
            peak = child.peak(row)
        print(f"{self.given.gib:g} GiB of tables, {steps} steps: peak {peak / GIB:.2f} of {limit / GIB:g} GiB")
        finish("ssd_steps", peak / limit, limited=child.group is not None, peak_bytes=peak, limit_bytes=limit, **row)


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


if __name__ == "__main__":
    main()
