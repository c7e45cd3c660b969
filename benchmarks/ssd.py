"""``make bench-ssd``: training with tables on SSD, several times larger than the memory, against all in memory.

One DLRM (26 equal tables, D 64, batch 4096) and the same ids for both; rows are numbered in falling frequency, as
ingestion does. The tables on SSD train in a memory cgroup (version 1 or 2) that the benchmark makes and removes; where
none can be made it says so, and the memory they used is measured by PSS. What a process takes beside its tables is
measured first, on this machine, and the hot rows get what the limit leaves. Every row that is not pinned lies on the
disk, written past the page cache, before the clock runs. For each limit a process of its own; the run in memory answers
in turn with it, and of three such pairs the one with the median ratio counts: this is a noisy kind of machine.

``ratio``: Zipf 1.2, tables 8 times the limit: samples/s on SSD / in memory. With ids of Zipf 1.05 the yardstick is the
bound min(rate in memory, random reads of 4 KiB a second / cold rows of a step x batch), whose reads the tool ``fio``
counts at the same depth, by the same engine; without fio there is no such figure, and a line says so.
``steady_ratio``: the same in a log that is cleaned, of ids that drift by half a row a step: before the clock runs, rows
leave memory until every log has turned over twice; ``write_amplification``: bytes written for each byte that left
memory, of the second time. ``--steps-only N`` trains on SSD alone in a sparse file (rows get values when first used)
and prints the peak of memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.harness import finish, options, processes, show, silent, words
from benchmarks.models_and_rows import ZipfIds, batches, config_of, plan_of, schema_of, trainer_of
from pipeline.embeddings.initial import initial_rows
from pipeline.embeddings.ssd import SsdStore, named, pss_bytes
from pipeline.embeddings.ssd.aio import DEPTH, Aio, DiskQueue, Uring
from pipeline.launch.memory_cgroup import MemoryCgroup
from pipeline.planning.candidates import BATCHES_MOVING, NUMBER_BYTES, ROW_BYTES
from pipeline.training.batches import Batch
from pipeline.training.memory import MemoryMeter, give_back_freed

GIB = 2**30
COUNT, DIM, BATCH = 26, 64, 4096
STATE_BYTES = 4  # a row
AHEAD = 4  # batches read ahead, as ``train.prefetch_batches``
PROBE_ROWS, PROBE_STEPS = 512, 12
WRITTEN, DRAWN = 1 << 15, 1 << 16  # rows written at a time; ids drawn at a time to age a log
TURNS, DRIFT = 2, 0.5  # of the log before the last phase; rows a step by which ids move there
FIGURES = words("samples_per_s ratio of_bound peak_bytes ssd_hit_rate ssd_write_amplification cold")


class Phase(NamedTuple):
    """What is timed: ids of an exponent, from a fresh log or one that has to be cleaned."""

    zipf: float
    steady: bool = False

    def __str__(self) -> str:
        return f"zipf{self.zipf}{'_steady' if self.steady else ''}"


PHASES = (Phase(1.2), Phase(1.05), Phase(1.2, steady=True))
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
        pinned=(0.9, "share of the memory for rows that hot ones get"),
        steps=(20, "under the clock, a phase"),
        rounds=(3, "times a phase is measured, in turn with memory"),
        warm=(8.0, "seconds of training before the clock runs, a phase"),
        aged_seconds=(400.0, "time at most for turning the log over"),
        steps_only=(None, "train so many steps on SSD within the first limit, no more", {"type": int}),
        folder=(None, "where the tables lie; a temporary folder unless given"),
    )
    # A bench that is told to stop removes its cgroup and ends its children too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        bench = Bench(given, folder)
        if given.steps_only:
            bench.train_only()
        else:
            bench.compare()


class Child:
    """A training process and the cgroup around it. ``limit`` in bytes (0: none)."""

    def __init__(self, tables: Tables, folder: str | None, kept: int = 0, limit: int = 0, lazy: bool = False) -> None:
        others = set(multiprocessing.active_children())
        self._pool = processes(1)
        self._pool.submit(os.getpid)  # starts the process
        self.group: MemoryCgroup | None = None
        if limit:
            # In its cgroup before it imports much.
            pid = (set(multiprocessing.active_children()) - others).pop().pid
            try:
                self.group = MemoryCgroup(f"nightjar-bench-{os.getpid()}-{pid}", limit)
                self.group.add(pid)
            except OSError as error:
                print(f"no memory cgroup can be made ({error}): memory is measured by PSS, not limited", flush=True)
        self._ask(_Model.build, tables, folder, kept, lazy)

    def _ask(self, what: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        try:
            return self._pool.submit(what, *arguments, **named).result()
        except BrokenProcessPool:
            killed = ", by its memory limit" if self.group is not None and self.group.killed() else ""
            sys.exit(f"the training process ended{killed}")

    def train(self, **how: Any) -> dict[str, Any]:
        """See ``_Model.train``; ``peak_bytes``: by the cgroup, or PSS."""
        row: dict[str, Any] = self._ask(_Model.answer, "train", **how)
        return row | {"peak_bytes": self.group.peak() if self.group else row["pss_bytes"]}

    def age(self, zipf: float, seconds: float) -> dict[str, Any]:
        """See ``_Model.age``."""
        aged: dict[str, Any] = self._ask(_Model.answer, "age", zipf=zipf, seconds=seconds)
        return aged

    def close(self) -> None:
        """End the child and remove its cgroup."""
        try:
            with self._pool:
                self._ask(_Model.close)
        finally:
            if self.group is not None:
                self.group.remove()


class Bench:
    """The measurements, in turn on SSD and in memory."""

    def __init__(self, given: argparse.Namespace, folder: str) -> None:
        self.given, self.folder, self.began = given, folder, time.perf_counter()
        self.tables = Tables(COUNT, int(given.gib * GIB / (4 * DIM + STATE_BYTES) / COUNT), DIM, BATCH)
        # What the process takes at most beside its tables, on this machine: the same model trains on tiny ones.
        with closing(Child(Tables(COUNT, PROBE_ROWS, DIM, BATCH), folder, kept=PROBE_ROWS, lazy=True)) as child:
            self.process = child.train(steps=PROBE_STEPS, zipf=1.2)["process_bytes"]
        print(f"process: {self.process / GIB:.2f} GiB beside its tables", flush=True)

    def _limited(self, times: int, lazy: bool = False) -> tuple[Child, int]:
        """A child on SSD under a limit of the tables / ``times``, and the limit."""
        limit = int(self.given.gib * GIB / times)
        kept = cache_rows(self.tables, limit, self.process, COLDEST, self.given.pinned)
        return Child(self.tables, self.folder, kept, limit, lazy), limit

    def compare(self) -> None:
        """All limits and the JSON line."""
        iops, why = fio_reads(Path(self.folder))
        rows: dict[str, dict[str, Any]] = {}
        limited, most = True, max(self.given.times)
        with closing(Child(self.tables, None)) as memory:
            for times in self.given.times:
                child, _ = self._limited(times)
                with closing(child):
                    for phase in PHASES if times == most else PHASES[:2]:
                        name = f"{times}x_{phase}"
                        rows[name] = self._measure(memory, child, phase, iops)
                        show(name, rows[name])
                limited &= child.group is not None
        steady = rows[f"{most}x_{PHASES[-1]}"]
        flat = {f"{name}_{key}": row[key] for name, row in rows.items() for key in FIGURES if row[key] is not None}
        finish(
            "ssd",
            rows[f"{most}x_{PHASES[0]}"]["ratio"],
            steady_ratio=steady["ratio"],
            limited=limited,
            fio_iops=iops,
            without_fio=why,
            write_amplification=steady["write_amplification"],
            turns=steady["turns"],
            process_bytes=self.process,
            seconds_total=time.perf_counter() - self.began,
            **flat,
        )

    def _measure(self, memory: Child, child: Child, phase: Phase, iops: float | None) -> dict[str, Any]:
        """The round with the median ratio, of a log that is aged before if the phase is steady."""
        given = self.given
        aged = child.age(phase.zipf, given.aged_seconds) if phase.steady else {}
        asked = {"steps": given.steps, "zipf": phase.zipf, "most_seconds": 12.0, "drift": DRIFT * phase.steady}
        asked["shift"] = aged.get("shift", 0.0)
        rounds: list[dict[str, Any]] = []
        for number in range(given.rounds):
            # Other ids every time: rows that left memory together lie together, and were read in long runs.
            asked["seed"] = 1 + PHASES.index(phase) + len(PHASES) * number
            plain = memory.train(warm_seconds=1.0 if number else 2.0, **asked)["samples_per_s"]
            row = child.train(warm_seconds=1.0 if number else given.warm, **asked)
            asked["shift"] = row["shift"] if phase.steady else 0.0
            rounds.append(row | {"in_memory": plain, "ratio": row["samples_per_s"] / plain})
        row = sorted(rounds, key=lambda row: float(row["ratio"]))[(len(rounds) - 1) // 2]
        cold = row["cold_share"] * BATCH * COUNT if row["cold_share"] else None
        bound = min(row["in_memory"], iops / cold * BATCH) if cold and iops else None
        of_bound = row["samples_per_s"] / bound if bound else None
        return aged | row | {"cold": cold, "of_bound": of_bound}

    def train_only(self) -> None:
        """Steps on SSD alone: lazy rows, Zipf 1.2, the first limit."""
        child, limit = self._limited(self.given.times[0], lazy=True)
        with closing(child):
            row = child.train(steps=self.given.steps_only, zipf=1.2, most_seconds=600.0)
        finish("ssd_steps", row["peak_bytes"] / limit, limited=child.group is not None, limit_bytes=limit, **row)


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


class DriftingIds(ZipfIds):
    """Zipf ids of which rows never seen before become the most popular ones: rank r is row r - shift, modulo the rows.

    ``drift``: rows a batch, of ``tables`` tables, whose ids are drawn at once.
    """

    def __init__(self, rows: int, exponent: float, batch: int, drift: float, shift: float, tables: int = 1) -> None:
        super().__init__(rows, exponent)
        self._each, self.shift, self._tables = drift / batch, shift, tables

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """int32 [count]."""
        self.shift += self._each * count / self._tables
        return (super().draw(rng, count) - np.int32(self.shift)) % np.int32(self._rows)


class _Model:
    """In the training process: a DLRM with its tables in memory, or on SSD in ``folder``."""

    here: _Model  # the one of this process

    def __init__(self, tables: Tables, folder: str | None, kept: int, lazy: bool) -> None:
        self.base, self.meter = pss_bytes(), MemoryMeter(torch.device("cpu"))
        self.tables, self.kept = tables, kept
        self.schema, config = schema_of(tables.count, tables.rows), config_of(tables.dim, tables.batch)
        self.names = [column.name for column in self.schema.sparse]
        plan = plan_of(self.schema, config, tier="ssd" if folder else "ddr", cache_rows=kept)
        self.ssd = SsdStore(plan, [folder], rank=0) if folder else None
        self.trainer = trainer_of(config, self.schema, plan, row_store=self.ssd)
        self.shards = self.trainer.rows.local_shards()
        self.logs = [self.ssd.shard(name).log for name in self.ssd.tables] if self.ssd is not None else []
        # Every row lies in its file, which goes past the page cache, and none has its initial value still to come.
        for shard in self.shards if folder and not lazy else ():
            weight = initial_rows(0, self.trainer.rows.tables[shard.table], 0, min(WRITTEN, shard.rows))
            for start in range(0, shard.rows, WRITTEN):
                count = min(WRITTEN, shard.rows - start)
                shard.put(slice(start, start + count), weight[:count], {"adagrad_sum": torch.zeros(count)})

    @staticmethod
    def build(*arguments: Any) -> None:
        """Build the model of this process."""
        silent()
        _Model.here = _Model(*arguments)
        give_back_freed()

    @staticmethod
    def answer(what: str, **how: Any) -> dict[str, Any]:
        """Train the model or age its log; what that leaves behind is not the next question's."""
        here = _Model.here
        figures: dict[str, Any] = getattr(here, what)(**how)
        figures["process_bytes"] = here.base + here.meter.peak()
        give_back_freed()
        return figures

    @staticmethod
    def close() -> None:
        """End the model's threads."""
        if _Model.here.ssd is not None:
            _Model.here.ssd.close()
        torch.distributed.destroy_process_group()

    def age(self, zipf: float, seconds: float) -> dict[str, Any]:
        """Let rows leave memory as training does, until every log has moved ``TURNS`` times its rows, or time is over.

        The figures are of the second half, or of the whole where time was over before.
        """
        assert self.ssd is not None
        began, rng, rows = time.perf_counter(), np.random.default_rng(99), self.tables.rows
        ids = DriftingIds(rows, zipf, self.tables.batch, DRIFT, 0.0)
        weight = initial_rows(0, self.trainer.rows.tables[self.shards[0].table], 0, min(DRAWN, rows))
        first, turns, half = sum(log.added for log in self.logs), 0.0, False
        while self.kept < rows and turns < TURNS and time.perf_counter() - began < seconds:
            places = np.unique(ids.draw(rng, DRAWN))
            for shard in self.shards:
                kept = self.ssd.shard(shard.table)
                popular = (places + int(ids.shift)) % rows < kept.recent  # these stay in memory, as the pinned ones do
                cold = places[~popular & (places >= kept.pinned)].astype(np.int64)
                shard.put(torch.from_numpy(cold), weight[: len(cold)], {"adagrad_sum": torch.zeros(len(cold))})
            turns = (sum(log.added for log in self.logs) - first) / (rows * len(self.logs))
            if not half and turns >= TURNS / 2:
                half, _ = True, self.ssd.figures.take()
        written = named(self.ssd.figures.take(), 1)["ssd_write_amplification"]
        return {"turns": turns, "write_amplification": written, "shift": ids.shift}

    def train(
        self,
        steps: int,
        zipf: float,
        warm_seconds: float = 0.0,
        seed: int = 1,
        most_seconds: float = 60.0,
        drift: float = 0.0,
        shift: float = 0.0,
    ) -> dict[str, Any]:
        """Train ``warm_seconds``, then ``steps`` by the clock (at most ``most_seconds``), ids of exponent ``zipf``."""
        batch, ssd = self.tables.batch, self.ssd
        ids = DriftingIds(self.tables.rows, zipf, batch, drift, shift, len(self.names))
        reader, until = self._read_ahead(batches(self.schema, batch, seed, ids)), time.perf_counter() + warm_seconds
        while time.perf_counter() < until:
            self.trainer.step(reader)
        if ssd is not None:
            ssd.figures.take()
        began, taken = time.perf_counter(), 0
        while taken < steps and (taken < 4 or time.perf_counter() < began + most_seconds):
            self.trainer.step(reader)
            taken += 1
        seconds = time.perf_counter() - began
        figures: dict[str, Any] = {"samples_per_s": taken * batch / seconds, "shift": ids.shift}
        figures["step_ms"] = 1000 * seconds / taken
        if ssd is not None:
            sums = ssd.figures.take()
            figures |= named(sums, taken)
            figures["cold_share"] = 1 - sums[3] / sums[2] if sums[2] else None
        reader.close()
        figures["pss_bytes"] = pss_bytes()
        return figures

    def _read_ahead(self, source: Iterator[Batch]) -> Generator[Batch, None, None]:
        """Batches made and announced ahead by a thread, as the training's reader does."""

        def make() -> Batch:
            batch = next(source)
            if self.ssd is not None:
                ids = batch.sparse.values().numpy().reshape(len(self.names), -1).astype(np.int64)
                self.ssd.prefetch(dict(zip(self.names, ids, strict=True)))
            return batch

        thread = ThreadPoolExecutor(1)
        made = deque(thread.submit(make) for _ in range(AHEAD + 1))
        try:
            while True:
                made.append(thread.submit(make))
                yield made.popleft().result()
        finally:
            thread.shutdown(cancel_futures=True)


if __name__ == "__main__":
    main()
