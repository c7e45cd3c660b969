"""``make bench-checkpoint``: what checkpoints cost, against full float32 ones, ``dd`` and no checkpoints at all.

A DLRM with >= 2 GiB of tables (weights and row-wise Adagrad state) trains on Zipf ids. First in turn without and with
a checkpoint each ``--seconds``: ``throughput_share`` is samples/s with over samples/s without. Then in intervals in
which about a quarter of the rows change, and at whose end checkpoints are taken: with 4 bits behind the training, and
outside the clock in the fewest bytes (``quantise=mixed state=bf16``), with 8 bits and by
``torch.distributed.checkpoint`` (full, float32). Then: float32 write throughput against ``dd``, and the restore on two
ranks against ``dd``'s cold read. ``ratio`` and ``ratio_best``: bytes of full checkpoints by bytes with 4 bits, and in
the fewest bytes, over whole baseline cycles of the default policy. ``coding_mb_s``: float32 that one thread codes in 4
bits, with the search that is chosen for the rows; ``coding_mb_s_torch``: without the compiled library.
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

from benchmarks.harness import finish, options, seconds_of, silent
from benchmarks.models_and_rows import ZipfIds, batches, config_of, plan_of, schema_of
from pipeline.checkpoint.checkpointer import CheckpointedModel, Checkpointer, latest
from pipeline.checkpoint.index import BASELINE, committed
from pipeline.checkpoint.quantise import choose_coding, encode
from pipeline.checkpoint.reader import RestoreTarget, restore
from pipeline.checkpoint.train_state import TrainState
from pipeline.config import CheckpointConfig
from pipeline.core.kernels import LOADED, load_kernels
from pipeline.embeddings.touched import TouchedRows, _Marker
from pipeline.store import Store
from pipeline.training.config_settings import select_model_settings
from pipeline.training.distributed import connect
from pipeline.training.guards import check_layers
from pipeline.training.step import StepExecutor

_CACHES = Path("/proc/sys/vm/drop_caches")


def main() -> None:
    given = options(
        __doc__,
        gib=(2.05, "tables: weights and Adagrad sums"),
        tables=26,
        dim=64,
        batch=8192,
        intervals=(5, "5: one whole cycle of the default policy"),
        share=(0.25, "of rows that change in an interval"),
        zipf=(1.2, "exponent of the ids: less skew, shorter intervals"),
        state=("fp32", "coding of the Adagrad sums: fp32 | bf16"),
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
            figures |= bench.marks()
            figures |= bench.intervals()
        if given.rounds:
            figures |= bench.race_dd(given.rounds)
            shape = (given.tables, bench.rows, given.dim, given.batch)
            del bench.trainer, bench.batches  # other processes build theirs
            dist.destroy_process_group()
            figures |= measure_restore(folder, "fp32", shape, given.rounds)
    finish("checkpoint", figures.get("bytes_ratio_4bit"), **figures, seconds_total=time.perf_counter() - began)


class Bench:
    """One model and its checkpointers."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.folder, self.store = given, folder, Store(str(folder))
        self.rows = int(given.gib * 2**30 / (4 * (given.dim + 1)) / given.tables) + 1
        self.config, schema = config_of(given.dim, given.batch), schema_of(given.tables, self.rows)
        device = connect(self.config.hardware, self.config.train.threads_per_rank)
        print(f"{given.tables} tables of {self.rows:,} rows x {given.dim}: building ...", flush=True)
        plan = plan_of(schema, self.config)
        self.trainer = StepExecutor(select_model_settings(self.config), schema, plan, device)
        ids = ZipfIds(self.rows, given.zipf)
        self.steps = -(-ids.lookups_for(given.share) // given.batch)
        self.batches = batches(schema, given.batch, 1, ids)
        self.train(3)

    def train(self, steps: int) -> float:
        """Seconds of so many steps."""
        began = time.perf_counter()
        for _ in range(steps):
            self.trainer.step(self.batches)
        return time.perf_counter() - began

    def saver(self, name: str, **settings: Any) -> Checkpointer:
        """A checkpointer of its own directory and marks."""
        touched, trainer = TouchedRows(self.trainer.model), self.trainer
        model = CheckpointedModel(trainer.rows, touched, dict(trainer.dense), trainer.optimizers.dense)
        return Checkpointer(self.store, name, CheckpointConfig(**settings), model, "bench", {}, {})

    def share(self) -> dict[str, Any]:
        """Samples/s with checkpoints over samples/s without, in turn.

        With: a checkpoint is taken at the beginning, as after the last of so many seconds, and what is still being
        written at their end is waited for. Without: nothing marks rows, either. The first checkpoint of a cycle is a
        baseline.
        """
        interval = self.given.seconds
        saver = self.saver("share", every_minutes=interval / 60)
        self.train(3)
        rates, alone, stalls, waits, writing = [], [], [], [], []
        for number in range(1, self.given.shares + 1):
            with _marking(lambda *_: None):
                began, steps = time.perf_counter(), 0
                while time.perf_counter() - began < interval:
                    self.train(1)
                    steps += 1
                alone.append(steps / (time.perf_counter() - began))
            began, written, steps = time.perf_counter(), saver.figures.writing, 0
            saver.save(TrainState(step=number))
            stalls.append(time.perf_counter() - began)
            while time.perf_counter() - began < interval:
                self.train(1)
                steps += 1
            waits.append(seconds_of(saver.close))
            rates.append(steps / (time.perf_counter() - began))
            writing.append(saver.figures.writing - written)
            print(
                f"{number}: {rates[-1] / alone[-1]:.4f} of the samples/s, stopped {1000 * stalls[-1]:.0f} ms, "
                f"written in {writing[-1]:.1f} s, waited {1000 * waits[-1]:.0f} ms",
                flush=True,
            )
        saver.model.touched.detach()
        shutil.rmtree(self.folder / "share")
        return {
            "throughput_share": statistics.fmean(rates) / statistics.fmean(alone),
            "throughput_share_each": [round(a / b, 4) for a, b in zip(rates, alone, strict=True)],
            "throughput_interval_seconds": interval,
            "throughput_stall_ms": [round(1000 * stall) for stall in stalls],
            "throughput_wait_ms": [round(1000 * wait) for wait in waits],
            "throughput_write_seconds": [round(seconds, 2) for seconds in writing],
            "threads": torch.get_num_threads(),
        }

    def marks(self, rounds: int = 8, steps: int = 3) -> dict[str, float]:
        """Cost of the touched marks: time inside the hook, and steps with against steps without it, in turn."""
        inside, call = [0.0], _Marker.__call__

        def timed(*args: Any) -> None:
            inside[0] += seconds_of(lambda: call(*args))

        ratios, shares = [], []
        for _ in range(rounds):
            off = self.train(steps)
            touched = TouchedRows(self.trainer.model)
            on = self.train(steps)
            inside[0] = 0.0
            with _marking(timed):
                seconds = self.train(steps)
            shares.append(inside[0] / seconds)
            touched.detach()
            ratios.append(on / off - 1)
        return {"marks_share": statistics.median(shares), "marks_step_change": statistics.median(ratios)}

    def intervals(self) -> dict[str, Any]:
        """Train and checkpoint; bytes, stalls, capacity."""
        given = self.given
        four = self.saver("four", quantise="4", state=given.state, every_steps=self.steps)
        eight = self.saver("eight", quantise="8", state=given.state)
        best = self.saver("best", quantise="mixed", state="bf16")
        seconds, stalls, waits, shares, full_bytes, full_seconds = [], [], [], [], [], []
        newest_best: list[tuple[str, int]] = []  # type and bytes of each checkpoint in the fewest bytes
        flying: dict[bool, list[float]] = {True: [], False: []}  # seconds of steps beside the writer, and of others
        held: dict[str, list[int]] = {"four": [], "eight": [], "best": [], "dcp": []}  # bytes on the disk

        def settle() -> float:
            """Wait for the write in flight (time the next save would wait) and note what lies on the disk."""
            waited = seconds_of(four.close)
            if shares:
                for name, sizes in held.items():
                    sizes.append(_bytes_under(self.folder / name))
            return waited

        for number in range(1, given.intervals + 1):
            trained = 0.0
            for _ in range(self.steps):
                busy = four._async_save._writer.busy
                took = self.train(1)
                trained += took
                # A step in which the writer ended counts as neither.
                if busy == four._async_save._writer.busy:
                    flying[busy].append(took)
            waits.append(settle())
            masks = [four.model.touched.mask(key) for key in four.model.touched.shards()]
            shares.append(sum(int(mask.sum()) for mask in masks) / sum(len(mask) for mask in masks))
            for saver in (eight, best):
                saver.save(TrainState(step=number), wait=True)
            newest_best.append((best._entries[-1].type, best._entries[-1].bytes))
            path = self.folder / "dcp" / str(number)
            full_seconds.append(seconds_of(lambda path=path: dcp.save(self._state(), checkpoint_id=str(path))))
            full_bytes.append(_bytes_under(path))
            shutil.rmtree(self.folder / "dcp" / str(number - 2), ignore_errors=True)  # the newest two stay
            os.sync()
            began = time.perf_counter()
            check_layers(self.trainer.dense, self.trainer.optimizers.dense, number, self.config.train)
            checked = time.perf_counter() - began
            four.save(TrainState(step=number))
            stalls.append(time.perf_counter() - began)
            seconds.append(trained + waits[-1] + stalls[-1])
            print(
                f"interval {number}: {trained:.1f} s of training, {shares[-1]:.1%} of rows in the marks, stopped "
                f"{1000 * stalls[-1]:.0f} ms (guard {1000 * checked:.0f}) + {1000 * waits[-1]:.0f} ms waiting",
                flush=True,
            )
        settle()
        for saver in (four, eight, best):
            saver.model.touched.detach()
        # Whole cycles only: without what a last, begun cycle has.
        baselines = [i for i, (kind, _) in enumerate(newest_best) if kind == BASELINE]
        whole = baselines[-1] or len(newest_best)
        on, off, slowdown = flying[True], flying[False], 0.0
        if on and off:  # share of the training time that steps beside the writer took longer: the cores are shared
            slowdown = 1 - statistics.median(off) * (len(on) + len(off)) / (sum(on) + sum(off))
        full, mean = sum(full_bytes), {name: statistics.fmean(sizes) for name, sizes in held.items()}
        return {
            "tables_bytes": given.tables * self.rows * 4 * (given.dim + 1),
            "steps_per_interval": self.steps,
            "rows_share_marked": [round(share, 4) for share in shares],
            "types": [artifact.summary["type"][0] for artifact in committed(self.store, "four")],
            "bytes_full": full,
            "bytes_4bit": four.figures.bytes_written,
            "bytes_8bit": eight.figures.bytes_written,
            "bytes_best": best.figures.bytes_written,
            "best_each": newest_best,
            "ratio_best": sum(full_bytes[:whole]) / sum(size for _, size in newest_best[:whole]),
            "bytes_ratio_4bit": full / four.figures.bytes_written,
            "bytes_ratio_8bit": full / eight.figures.bytes_written,
            "capacity_ratio_4bit": mean["dcp"] / mean["four"],
            "capacity_ratio_8bit": mean["dcp"] / mean["eight"],
            "capacity_ratio_best": mean["dcp"] / mean["best"],
            "capacity_ratio_4bit_least": min(d / f for d, f in zip(held["dcp"], held["four"], strict=True)),
            "interval_seconds": [round(each, 2) for each in seconds],
            "stall_ms": [round(1000 * stall) for stall in stalls],
            "waited_ms": [round(1000 * wait) for wait in waits],
            "stall_share": (sum(stalls) + sum(waits)) / sum(seconds),
            "write_seconds_4bit": four.figures.writing,
            "step_ms_in_flight": 1000 * statistics.median(on) if on else 0.0,
            "step_ms_quiet": 1000 * statistics.median(off) if off else 0.0,
            "slowdown_share": slowdown,
            "dcp_seconds": statistics.median(full_seconds),
        }

    def _state(self) -> dict[str, Any]:
        tables = {shard.table: {"weight": shard.weight, **shard.state} for shard in self.trainer.rows.local_shards()}
        dense, optimizers = self.trainer.dense, self.trainer.optimizers
        return {"tables": tables, "dense": dense, "optimizer": optimizers.dense.state_dict()}

    def race_dd(self, rounds: int) -> dict[str, Any]:
        """Full float32 checkpoints against dd of as many bytes."""
        saver, target = self.saver("fp32", keep_last=1), self.folder / "dd"
        ours, calls, synced, direct = [], [], [], []
        for number in range(1, rounds + 1):
            written, writing = saver.figures.bytes_written, saver.figures.writing
            state = TrainState(step=saver.figures.count + 1)
            whole = seconds_of(lambda state=state: saver.save(state, wait=True, final=True))
            size = saver.figures.bytes_written - written
            os.sync()
            ours.append(size / (saver.figures.writing - writing))
            calls.append(size / whole)
            for rates, flag in ((synced, "conv=fdatasync"), (direct, "oflag=direct")):
                target.unlink(missing_ok=True)
                os.sync()
                rates.append(_dd(f"if=/dev/zero of={target} bs=16M count={size >> 24} {flag}"))
            print(
                f"fp32 write {number}: ours {ours[-1] / 1e6:.0f} MB/s, dd fdatasync {synced[-1] / 1e6:.0f}, "
                f"direct {direct[-1] / 1e6:.0f}",
                flush=True,
            )
        return {
            "write_mb_s": statistics.median(ours) / 1e6,
            "write_mb_s_with_snapshot": statistics.median(calls) / 1e6,
            "dd_write_mb_s": statistics.median(synced) / 1e6,
            "dd_write_direct_mb_s": statistics.median(direct) / 1e6,
            "write_against_dd": statistics.median(ours) / statistics.median(synced),
        }


@contextmanager
def _marking(call: Callable[..., None]) -> Any:
    """Lookups mark rows by ``call``."""
    usual = _Marker.__call__
    _Marker.__call__ = call  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        _Marker.__call__ = usual  # type: ignore[method-assign]


def measure_coding(rows: torch.Tensor) -> dict[str, Any]:
    """MB/s of float32 that one thread codes, by the compiled library if it is installed, and without it."""
    coding = choose_coding(rows[:: max(1, len(rows) // 4096)][:4096], 4)
    threads, compiled = torch.get_num_threads(), load_kernels("rowcodes")

    def speed(part: torch.Tensor) -> float:
        return part.nbytes / 1e6 / statistics.median(seconds_of(lambda: encode(part, coding)) for _ in range(5))

    torch.set_num_threads(1)
    figures = {
        "coding_mb_s": speed(rows),
        "coding_search": [coding.steps, coding.shrink, coding.fits],
        "coding_compiled": compiled is not None,
    }
    LOADED["rowcodes"] = None
    figures["coding_mb_s_torch"] = speed(rows[: len(rows) // 8])
    LOADED["rowcodes"] = compiled
    torch.set_num_threads(threads)
    return figures


def measure_restore(folder: str, directory: str, shape: tuple[int, int, int, int], rounds: int) -> dict[str, Any]:
    """Restore the newest checkpoint of ``directory`` on two ranks, cold, in turn with dd's cold read of one file."""
    mp.spawn(_rank, args=(folder, directory, shape, rounds), nprocs=2)
    pairs = [map(float, line.split()) for line in Path(folder, "restore.txt").read_text().splitlines()]
    ours, read = map(statistics.median, zip(*pairs, strict=True))
    figures = {"restore_mb_s": ours / 1e6, "dd_read_mb_s": read / 1e6, "restore_against_dd": ours / read}
    return {**figures, "caches_dropped": _drop_caches()}


def _rank(rank: int, folder: str, directory: str, shape: tuple[int, int, int, int], rounds: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    tables, rows, dim, batch = shape
    schema, config = schema_of(tables, rows), config_of(dim, batch, ranks=2, threads=1)
    device = connect(config.hardware, config.train.threads_per_rank)
    trainer = StepExecutor(select_model_settings(config), schema, plan_of(schema, config), device)
    store = Store(folder)
    artifact = latest(store, directory)
    if artifact is None:
        sys.exit(f"no checkpoint in {folder}/{directory}")
    size = sum(entry.bytes for entry in artifact.files.values())
    target = RestoreTarget(trainer.rows, dict(trainer.dense), trainer.optimizers.dense)
    lines = []
    for number in range(rounds):
        if rank == 0:
            _drop_caches()
            read = _dd(f"if={folder}/dd of=/dev/null bs=16M")
            _drop_caches()
        dist.barrier()
        began = time.perf_counter()
        restore(store, artifact, target)
        dist.barrier()
        speed = size / (time.perf_counter() - began)
        if rank == 0:
            lines.append(f"{speed} {read}")
            print(f"restore {number + 1}: {speed / 1e6:.0f} MB/s, dd read {read / 1e6:.0f}", flush=True)
    if rank == 0:
        Path(folder, "restore.txt").write_text("\n".join(lines))
    dist.destroy_process_group()


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
        _CACHES.write_text("3\n")
    except OSError:
        return False
    return True


def _bytes_under(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


if __name__ == "__main__":
    main()
