"""``make bench-checkpoint``: what checkpoints cost, against full float32 ones, ``dd`` and no checkpoints at all.

A DLRM with >= 2 GiB of tables (weights and row-wise Adagrad state) trains on Zipf ids. First in turn without and with
a checkpoint each ``--seconds``: ``throughput_share`` is samples/s with over samples/s without. Then in intervals in
which about a quarter of the rows change, and at whose end checkpoints are taken: with 4 bits behind the training, and
outside the clock in the fewest bytes (``quantise=mixed state=bf16``), with 8 bits and by
``torch.distributed.checkpoint`` (full, float32). Then: float32 write throughput against ``dd``, and the restore on two
ranks against ``dd``'s cold read. ``ratio`` and ``ratio_best``: bytes of full checkpoints by bytes with 4 bits, and in
the fewest bytes, over whole baseline cycles of the default policy. ``capacity_ratio``: of what lies on the disk, mean
over the run. ``coding_mb_s``: float32 that one thread codes in 4 bits, with the search that is chosen for the rows;
``coding_mb_s_torch``: without the compiled library.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.utils.benchmark import Timer

from benchmarks.harness import be_rank, finish, free_port, options, seconds_of, silent
from benchmarks.models_and_rows import ZipfIds, batches, config_of, schema_of, trainer_of
from pipeline.checkpoint.checkpointer import CheckpointedModel, Checkpointer, latest
from pipeline.checkpoint.index import BASELINE
from pipeline.checkpoint.quantise import choose_coding, encode
from pipeline.checkpoint.reader import RestoreTarget, restore
from pipeline.checkpoint.train_state import TrainState
from pipeline.config import CheckpointConfig
from pipeline.core.kernels import LOADED
from pipeline.embeddings.touched import TouchedRows, _Marker
from pipeline.store import Store
from pipeline.training.guards import check_layers
from pipeline.training.step import StepExecutor

TABLES, DIM, BATCH, ZIPF = 26, 64, 8192, 1.2
CHANGED = 0.25  # of the rows in an interval


def main() -> None:
    given = options(
        __doc__,
        gib=(2.05, "tables: weights and Adagrad sums"),
        intervals=(5, "5: one whole cycle of the default policy"),
        rounds=(5, "of the disk races; 0: none, and no restore"),
        seconds=(60.0, "from checkpoint to checkpoint for the share"),
        shares=(5, "checkpoints for the share, a whole cycle; 0: none"),
        folder=(None, "where to write; a temporary folder unless given"),
    )
    silent()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        bench = Bench(given, Path(folder))
        figures = bench.share() if given.shares else {}
        figures |= measure_coding(bench.trainer.rows.local_shards()[0].weight)
        if given.intervals:
            figures |= bench.intervals()
        if given.rounds:
            figures |= bench.race_dd()
            del bench.trainer, bench.batches  # other processes build theirs
            dist.destroy_process_group()
            figures |= measure_restore(folder, bench.rows, given.rounds)
    finish("checkpoint", figures.get("bytes_ratio_4bit"), **figures, seconds_total=time.perf_counter() - began)


def checkpointer(store: Store, name: str, trainer: StepExecutor, **settings: Any) -> Checkpointer:
    """A checkpointer of ``trainer`` with a directory and marks of its own."""
    touched, dense = TouchedRows(trainer.model), dict(trainer.dense)
    model = CheckpointedModel(trainer.rows, touched, dense, trainer.optimizers.dense)
    return Checkpointer(store, name, CheckpointConfig(**settings), model, "bench", {}, {})


def _trainer(rows: int, ranks: int = 1, threads: int | None = None) -> StepExecutor:
    return trainer_of(config_of(DIM, BATCH, ranks, threads), schema_of(TABLES, rows))


class Bench:
    """One model and its checkpointers."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.folder, self.store = given, folder, Store(str(folder))
        self.rows = int(given.gib * 2**30 / (4 * (DIM + 1)) / TABLES) + 1
        print(f"{TABLES} tables of {self.rows:,} rows x {DIM}: building ...", flush=True)
        self.trainer, ids = _trainer(self.rows), ZipfIds(self.rows, ZIPF)
        self.steps = -(-ids.lookups_for(CHANGED) // BATCH)
        self.batches = batches(schema_of(TABLES, self.rows), BATCH, 1, ids)
        self.train(3)

    def train(self, steps: int) -> None:
        """Take so many steps."""
        for _ in range(steps):
            self.trainer.step(self.batches)

    def saver(self, name: str, **settings: Any) -> Checkpointer:
        """See ``checkpointer``."""
        return checkpointer(self.store, name, self.trainer, **settings)

    def share(self) -> dict[str, Any]:
        """Samples/s with checkpoints over samples/s without, in turn.

        With: a checkpoint is taken at the beginning, as after the last of so many seconds, and what is still being
        written at their end is waited for. Without: nothing marks rows, either. The first checkpoint of a cycle is a
        baseline.
        """
        saver = self.saver("share", every_minutes=self.given.seconds / 60)
        self.train(3)
        alone, rates, stalls, waits = [], [], [], []
        for number in range(1, self.given.shares + 1):
            with mock.patch.object(_Marker, "__call__", lambda *_: None):
                alone.append(self._rate(lambda: None, lambda: None)[0])
            state = TrainState(step=number)
            rate, stall, wait = self._rate(lambda state=state: saver.save(state), saver.close)
            print(f"{number}: {rate / alone[-1]:.4f} of the samples/s", flush=True)
            rates.append(rate)
            stalls.append(round(1000 * stall))
            waits.append(round(1000 * wait))
        saver.model.touched.detach()
        shutil.rmtree(self.folder / "share")
        return {
            "throughput_share": statistics.fmean(rates) / statistics.fmean(alone),
            "throughput_share_each": [round(a / b, 4) for a, b in zip(rates, alone, strict=True)],
            "throughput_interval_seconds": self.given.seconds,
            "throughput_stall_ms": stalls,
            "throughput_wait_ms": waits,
            "threads": torch.get_num_threads(),
        }

    def _rate(self, begin: Callable[[], object], end: Callable[[], object]) -> tuple[float, float, float]:
        """Steps a second over ``--seconds`` from ``begin`` to ``end``, and the seconds of these two."""
        began, steps = time.perf_counter(), 0
        stall = seconds_of(begin)
        while time.perf_counter() - began < self.given.seconds:
            self.train(1)
            steps += 1
        wait = seconds_of(end)
        return steps / (time.perf_counter() - began), stall, wait

    def intervals(self) -> dict[str, Any]:
        """Train and checkpoint; bytes, stalls, capacity."""
        savers = {
            "four": self.saver("four", quantise="4", every_steps=self.steps),
            "eight": self.saver("eight", quantise="8"),
            "best": self.saver("best", quantise="mixed", state="bf16"),
        }
        four, best = savers["four"], savers["best"]
        trained, stalls, waits, full = [], [], [], []
        newest_best: list[tuple[str, int]] = []  # type and bytes of each checkpoint in the fewest bytes
        held: dict[str, list[int]] = {"four": [], "eight": [], "best": [], "dcp": []}  # bytes on the disk
        for number in range(1, self.given.intervals + 1):
            state = TrainState(step=number)
            trained.append(seconds_of(lambda: self.train(self.steps)))
            waits.append(seconds_of(four.close))
            if number > 1:
                self._weigh(held)
            for name in ("eight", "best"):
                savers[name].save(state, wait=True)
            newest_best.append((best._entries[-1].type, best._entries[-1].bytes))
            full.append(self._save_full(number))
            os.sync()
            stalls.append(seconds_of(lambda state=state: self._save_guarded(four, state)))
            print(f"interval {number}: {trained[-1]:.1f} s of training", flush=True)
        four.close()
        self._weigh(held)
        for saver in savers.values():
            saver.model.touched.detach()
        # Whole cycles only: without what a last, begun cycle has.
        baselines = [i for i, (kind, _) in enumerate(newest_best) if kind == BASELINE]
        whole, mean = baselines[-1] or len(full), {name: statistics.fmean(sizes) for name, sizes in held.items()}
        return {
            "steps_per_interval": self.steps,
            "bytes_full": sum(full),
            "bytes_4bit": four.figures.bytes_written,
            "bytes_8bit": savers["eight"].figures.bytes_written,
            "bytes_best": best.figures.bytes_written,
            "ratio_best": sum(full[:whole]) / sum(size for _, size in newest_best[:whole]),
            "bytes_ratio_4bit": sum(full) / four.figures.bytes_written,
            "bytes_ratio_8bit": sum(full) / savers["eight"].figures.bytes_written,
            "capacity_ratio_4bit": mean["dcp"] / mean["four"],
            "capacity_ratio_8bit": mean["dcp"] / mean["eight"],
            "capacity_ratio_best": mean["dcp"] / mean["best"],
            "stall_ms": [round(1000 * stall) for stall in stalls],
            "waited_ms": [round(1000 * wait) for wait in waits],
            "stall_share": (sum(stalls) + sum(waits)) / (sum(stalls) + sum(waits) + sum(trained)),
        }

    def _weigh(self, held: dict[str, list[int]]) -> None:
        for name, sizes in held.items():
            sizes.append(_bytes_under(self.folder / name))

    def _save_full(self, number: int) -> int:
        """Bytes of a checkpoint by PyTorch, in float32, of which the newest two stay."""
        tables = {shard.table: {"weight": shard.weight, **shard.state} for shard in self.trainer.rows.local_shards()}
        dense, optimizers = self.trainer.dense, self.trainer.optimizers
        place = self.folder / "dcp" / str(number)
        state = {"tables": tables, "dense": dense, "optimizer": optimizers.dense.state_dict()}
        dcp.save(state, checkpoint_id=str(place))
        shutil.rmtree(self.folder / "dcp" / str(number - 2), ignore_errors=True)
        return _bytes_under(place)

    def _save_guarded(self, saver: Checkpointer, state: TrainState) -> None:
        check_layers(self.trainer.dense, self.trainer.optimizers.dense, state.step, config_of().train)
        saver.save(state)

    def race_dd(self) -> dict[str, float]:
        """Full float32 checkpoints against dd of as many bytes."""
        saver, target = self.saver("fp32", keep_last=1), self.folder / "dd"
        ours, theirs = [], []
        for number in range(1, self.given.rounds + 1):
            written, writing = saver.figures.bytes_written, saver.figures.writing
            saver.save(TrainState(step=number), wait=True, final=True)
            size = saver.figures.bytes_written - written
            os.sync()
            ours.append(size / (saver.figures.writing - writing))
            target.unlink(missing_ok=True)
            os.sync()
            theirs.append(_dd(f"if=/dev/zero of={target} bs=16M count={size >> 24} conv=fdatasync"))
            print(f"fp32 write {number}: ours {ours[-1] / 1e6:.0f} MB/s, dd {theirs[-1] / 1e6:.0f}", flush=True)
        return _against_dd("write", ours, theirs)


def measure_coding(rows: torch.Tensor) -> dict[str, float]:
    """MB/s of float32 that one thread codes, by the compiled library if it is installed, and without it."""
    coding = choose_coding(rows[:: max(1, len(rows) // 4096)][:4096], 4)

    def speed(part: torch.Tensor) -> float:
        timer = Timer("encode(part, coding)", globals={"encode": encode, "part": part, "coding": coding})
        return part.nbytes / 1e6 / timer.blocked_autorange(min_run_time=1).median

    compiled = speed(rows)
    with mock.patch.dict(LOADED, rowcodes=None):
        return {"coding_mb_s": compiled, "coding_mb_s_torch": speed(rows[: len(rows) // 8])}


def measure_restore(folder: str, rows: int, rounds: int) -> dict[str, Any]:
    """Restore the newest float32 checkpoint on two ranks, cold, in turn with dd's cold read of one file."""
    mp.spawn(_rank, args=(folder, rows, rounds, free_port()), nprocs=2)
    pairs = [map(float, line.split()) for line in Path(folder, "restore.txt").read_text().splitlines()]
    return {**_against_dd("restore", *zip(*pairs, strict=True)), "caches_dropped": _drop_caches()}


def _rank(rank: int, folder: str, rows: int, rounds: int, port: int) -> None:
    be_rank(rank, 2, port)
    trainer, store = _trainer(rows, ranks=2, threads=1), Store(folder)
    artifact = latest(store, "fp32")
    if artifact is None:
        sys.exit(f"no checkpoint in {folder}/fp32")
    size = sum(entry.bytes for entry in artifact.files.values())
    target = RestoreTarget(trainer.rows, dict(trainer.dense), trainer.optimizers.dense)

    def restore_together() -> None:
        restore(store, artifact, target)
        dist.barrier()

    for number in range(rounds):
        if rank == 0:
            _drop_caches()
            read = _dd(f"if={folder}/dd of=/dev/null bs=16M")
            _drop_caches()
        dist.barrier()
        speed = size / seconds_of(restore_together)
        if rank == 0:
            print(f"restore {number + 1}: {speed / 1e6:.0f} MB/s, dd read {read / 1e6:.0f}", flush=True)
            with Path(folder, "restore.txt").open("a") as sink:
                sink.write(f"{speed} {read}\n")
    dist.destroy_process_group()


def _against_dd(what: str, ours: Any, theirs: Any) -> dict[str, float]:
    mine, other = statistics.median(ours), statistics.median(theirs)
    dd = "write" if what == "write" else "read"
    return {f"{what}_mb_s": mine / 1e6, f"dd_{dd}_mb_s": other / 1e6, f"{what}_against_dd": mine / other}


def _dd(arguments: str) -> float:
    """Bytes a second as dd itself says it."""
    said = subprocess.run(["dd", *arguments.split()], capture_output=True, text=True, check=True).stderr
    copied = re.search(r"(\d+) bytes.*copied, ([\d.e-]+) s", said)
    if copied is None:
        sys.exit(f"dd said something unexpected: {said}")
    return int(copied[1]) / float(copied[2])


def _drop_caches() -> bool:
    """Make the next read cold; False where this user may not."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        return False
    return True


def _bytes_under(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


if __name__ == "__main__":
    main()
