"""``make bench-checkpoint``: what checkpoints cost, against full float32 ones, ``dd`` and no checkpoints at all.

A DLRM with >= 2 GiB of tables (weights and row-wise Adagrad state) trains on Zipf ids. First in turn without and with
a checkpoint each ``--seconds``: ``throughput_share`` is samples/s with over samples/s without. Then in intervals in
which about a quarter of the rows change, and at whose end checkpoints are taken: with 4 bits behind the training, and
outside the clock in the fewest bytes (``quantise=mixed state=bf16``), with 8 bits and by
``torch.distributed.checkpoint`` (full, float32). Then: float32 write throughput against ``dd``, and the restore on two
ranks against ``dd``'s cold read. ``ratio`` and ``ratio_best``: bytes of full checkpoints by bytes with 4 bits, and in
the fewest bytes, over whole baseline cycles of the default policy.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.checkpoint_disk import measure_restore, race_dd
from benchmarks.checkpoint_model import ZipfIds, batches, config_of, plan_of, schema_of
from benchmarks.checkpoint_share import measure_coding, measure_share
from benchmarks.common import finish
from pipeline.checkpoint.checkpointer import CheckpointedModel, Checkpointer
from pipeline.checkpoint.index import BASELINE, committed
from pipeline.checkpoint.train_state import TrainState
from pipeline.config import CheckpointConfig
from pipeline.embeddings.touched import TouchedRows, _Marker
from pipeline.records import DatasetSchema
from pipeline.store import Store
from pipeline.training.batches import Batch
from pipeline.training.config_settings import select_model_settings
from pipeline.training.distributed import connect
from pipeline.training.guards import check_layers
from pipeline.training.step import StepExecutor


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--gib", type=float, default=2.05, help="tables: weights and Adagrad sums")
    options.add_argument("--tables", type=int, default=26)
    options.add_argument("--dim", type=int, default=64)
    options.add_argument("--batch", type=int, default=8192)
    options.add_argument("--intervals", type=int, default=5, help="5: one whole cycle of the default policy")
    options.add_argument("--share", type=float, default=0.25, help="of rows that change in an interval")
    options.add_argument("--zipf", type=float, default=1.2, help="exponent of the ids: less skew, shorter intervals")
    options.add_argument("--state", default="fp32", help="coding of the Adagrad sums: fp32 | bf16")
    options.add_argument("--rounds", type=int, default=5, help="of the disk races; 0: none, and no restore")
    options.add_argument("--seconds", type=float, default=60.0, help="from checkpoint to checkpoint for the share")
    options.add_argument("--shares", type=int, default=5, help="checkpoints for the share, a whole cycle; 0: none")
    options.add_argument("--folder", help="where to write; a temporary folder unless given")
    given = options.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        bench = _Bench(given, Path(folder))
        figures = bench.share() if given.shares else {}
        figures |= measure_coding(bench.trainer.rows.local_shards()[0].weight)
        if given.intervals:
            figures |= bench.marks()
            figures |= bench.intervals()
        if given.rounds:
            figures |= race_dd(bench.write_fp32, Path(folder), given.rounds)
            shape = (given.tables, bench.rows, given.dim, given.batch)
            bench.release()
            figures |= measure_restore(str(folder), "fp32", shape, given.rounds)
    finish("checkpoint", figures.get("bytes_ratio_4bit"), **figures, seconds_total=time.perf_counter() - began)


@dataclass
class _Intervals:
    """What happened between checkpoints, in seconds and bytes, one entry an interval."""

    seconds: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    dcp_bytes: list[int] = field(default_factory=list)
    dcp_seconds: list[float] = field(default_factory=list)
    held: dict[str, list[int]] = field(default_factory=lambda: {"4": [], "8": [], "best": [], "dcp": []})
    best: list[tuple[str, int]] = field(default_factory=list)  # type and bytes of each checkpoint in the fewest bytes
    steps: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})


class _Bench:
    """One model and its checkpointers."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.folder = given, folder
        self.rows = int(given.gib * 2**30 / (4 * (given.dim + 1)) / given.tables) + 1
        self.schema: DatasetSchema = schema_of(given.tables, self.rows)
        config = config_of(given.dim, given.batch)
        device = connect(config.hardware, config.train.threads_per_rank)
        _say(f"{given.tables} tables of {self.rows:,} rows x {given.dim}: building ...")
        self.trainer = StepExecutor(select_model_settings(config), self.schema, plan_of(self.schema, config), device)
        ids = ZipfIds(self.rows, given.zipf)
        self.steps = -(-ids.lookups_for(given.share) // given.batch)
        self.batches: Iterator[Batch] = batches(self.schema, given.batch, 1, ids)
        self.store = Store(str(folder))
        for _ in range(3):
            self.trainer.step(self.batches)

    def saver(self, name: str, **settings: Any) -> Checkpointer:
        """A checkpointer of its own directory and marks."""
        touched = TouchedRows(self.trainer.model)
        model = CheckpointedModel(self.trainer.rows, touched, dict(self.trainer.dense), self.trainer.optimizers.dense)
        return Checkpointer(self.store, name, CheckpointConfig(**settings), model, "bench", {}, {})

    def marks(self, rounds: int = 8, steps: int = 3) -> dict[str, float]:
        """Cost of the touched marks: time inside the hook, and steps with against steps without it, in turn."""
        inside, call = [0.0], _Marker.__call__

        def timed(*args: Any) -> None:
            began = time.perf_counter()
            call(*args)
            inside[0] += time.perf_counter() - began

        ratios, shares = [], []
        for _ in range(rounds):
            off = self._train(steps)
            touched = TouchedRows(self.trainer.model)
            on = self._train(steps)
            _Marker.__call__ = timed  # type: ignore[assignment,method-assign]
            inside[0] = 0.0
            seconds = self._train(steps)
            shares.append(inside[0] / seconds)
            _Marker.__call__ = call  # type: ignore[method-assign]
            touched.detach()
            ratios.append(on / off - 1)
        return {"marks_share": statistics.median(shares), "marks_step_change": statistics.median(ratios)}

    def _train(self, steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            self.trainer.step(self.batches)
        return time.perf_counter() - began

    def share(self) -> dict[str, Any]:
        """Samples/s with checkpoints over samples/s without."""
        saver = self.saver("share", every_minutes=self.given.seconds / 60)
        figures = measure_share(self._train, saver, self.given.seconds, self.given.shares)
        saver.model.touched.detach()
        shutil.rmtree(self.folder / "share")
        return figures

    def intervals(self) -> dict[str, Any]:
        """Train and checkpoint; bytes, stalls, capacity."""
        four = self.saver("four", quantise="4", state=self.given.state, every_steps=self.steps)
        others = {
            "8": self.saver("eight", quantise="8", state=self.given.state),
            "best": self.saver("best", quantise="mixed", state="bf16"),
        }
        seen = _Intervals()
        for number in range(1, self.given.intervals + 1):
            self._interval(four, others, number, seen)
        self._settle(four, seen)
        for saver in (four, *others.values()):
            saver.model.touched.detach()
        return self._figures(four, others, seen)

    def _interval(self, four: Checkpointer, others: dict[str, Checkpointer], number: int, seen: _Intervals) -> None:
        trained = 0.0
        for _ in range(self.steps):
            flying = four._flight._writer.busy
            seconds = self._train(1)
            trained += seconds
            # A step in which the writer ended counts as neither.
            if flying == four._flight._writer.busy:
                seen.steps[flying].append(seconds)
        waited = self._settle(four, seen)
        seen.shares.append(_share(four))
        for saver in others.values():
            saver.save(TrainState(step=number), wait=True)
        newest = others["best"]._entries[-1]
        seen.best.append((newest.type, newest.bytes))
        self._full(number, seen)
        os.sync()
        began = time.perf_counter()
        check_layers(
            self.trainer.dense, self.trainer.optimizers.dense, number, config_of(self.given.dim, self.given.batch).train
        )
        checked = time.perf_counter() - began
        four.save(TrainState(step=number))
        stall = time.perf_counter() - began
        seen.seconds.append(trained + waited + stall)
        seen.stalls.append(stall)
        seen.waits.append(waited)
        _say(
            f"interval {number}: {trained:.1f} s of training, {seen.shares[-1]:.1%} of rows in the marks, stopped "
            f"{1000 * stall:.0f} ms (guard {1000 * checked:.0f}) + {1000 * waited:.0f} ms waiting"
        )

    def _settle(self, four: Checkpointer, seen: _Intervals) -> float:
        """Wait for the write in flight (time the next save would wait) and note what lies on the disk."""
        began = time.perf_counter()
        four.close()
        waited = time.perf_counter() - began
        if seen.shares:
            for name, path in (("4", "four"), ("8", "eight"), ("best", "best"), ("dcp", "dcp")):
                seen.held[name].append(_bytes_under(self.folder / path))
        return waited

    def _full(self, number: int, seen: _Intervals) -> None:
        """The same state as a full float32 checkpoint by torch.distributed.checkpoint; the newest two stay."""
        tables = {s.table: {"weight": s.weight, **s.state} for s in self.trainer.rows.local_shards()}
        state = {"tables": tables, "dense": self.trainer.dense, "optimizer": self.trainer.optimizers.dense.state_dict()}
        path = self.folder / "dcp" / str(number)
        began = time.perf_counter()
        dcp.save(state, checkpoint_id=str(path))
        seen.dcp_seconds.append(time.perf_counter() - began)
        seen.dcp_bytes.append(_bytes_under(path))
        shutil.rmtree(self.folder / "dcp" / str(number - 2), ignore_errors=True)

    def _figures(self, four: Checkpointer, others: dict[str, Checkpointer], seen: _Intervals) -> dict[str, Any]:
        full = sum(seen.dcp_bytes)
        mean = {name: statistics.fmean(sizes) for name, sizes in seen.held.items()}
        on, off = seen.steps[True], seen.steps[False]
        eight, best = others["8"].figures.bytes_written, others["best"].figures.bytes_written
        return {
            "tables_bytes": self.given.tables * self.rows * 4 * (self.given.dim + 1),
            "steps_per_interval": self.steps,
            "rows_share_marked": [round(share, 4) for share in seen.shares],
            "types": [artifact.summary["type"][0] for artifact in committed(self.store, "four")],
            "bytes_full": full,
            "bytes_4bit": four.figures.bytes_written,
            "bytes_8bit": eight,
            "bytes_best": best,
            "best_each": seen.best,
            "ratio_best": _cycle_ratio(seen.dcp_bytes, seen.best),
            "bytes_ratio_4bit": full / four.figures.bytes_written,
            "bytes_ratio_8bit": full / eight,
            "capacity_ratio_4bit": mean["dcp"] / mean["4"],
            "capacity_ratio_8bit": mean["dcp"] / mean["8"],
            "capacity_ratio_best": mean["dcp"] / mean["best"],
            "capacity_ratio_4bit_least": min(d / f for d, f in zip(seen.held["dcp"], seen.held["4"], strict=True)),
            "interval_seconds": [round(seconds, 2) for seconds in seen.seconds],
            "stall_ms": [round(1000 * stall) for stall in seen.stalls],
            "waited_ms": [round(1000 * wait) for wait in seen.waits],
            "stall_share": (sum(seen.stalls) + sum(seen.waits)) / sum(seen.seconds),
            "write_seconds_4bit": four.figures.writing,
            "step_ms_in_flight": 1000 * statistics.median(on) if on else 0.0,
            "step_ms_quiet": 1000 * statistics.median(off) if off else 0.0,
            "slowdown_share": _slowdown(on, off),
            "dcp_seconds": statistics.median(seen.dcp_seconds),
        }

    def write_fp32(self) -> tuple[int, float, float]:
        """Write a full float32 checkpoint: its bytes, seconds of the writer, and of the whole call."""
        saver = self.__dict__.setdefault("_fp32", None) or self.saver("fp32", keep_last=1)
        self._fp32 = saver
        bytes_, writing = saver.figures.bytes_written, saver.figures.writing
        began = time.perf_counter()
        saver.save(TrainState(step=saver.figures.count + 1), wait=True, final=True)
        whole = time.perf_counter() - began
        return saver.figures.bytes_written - bytes_, saver.figures.writing - writing, whole

    def release(self) -> None:
        """Free the model before other processes build theirs."""
        for name in ("trainer", "_fp32", "batches"):
            self.__dict__.pop(name, None)
        torch.distributed.destroy_process_group()


def _share(saver: Checkpointer) -> float:
    """Share of all rows that the marks of ``saver`` name."""
    masks = [saver.model.touched.mask(key) for key in saver.model.touched.shards()]
    return sum(int(mask.sum()) for mask in masks) / sum(len(mask) for mask in masks)


def _cycle_ratio(full: list[int], written: list[tuple[str, int]]) -> float:
    """Bytes of full checkpoints by bytes written, over whole cycles: without what a last, begun cycle has."""
    baselines = [i for i, (kind, _) in enumerate(written) if kind == BASELINE]
    whole = baselines[-1] or len(written)
    return sum(full[:whole]) / sum(size for _, size in written[:whole])


def _slowdown(on: list[float], off: list[float]) -> float:
    """Share of the training time that steps beside the writer took longer than others: the cores are shared."""
    if not on or not off:
        return 0.0
    return 1 - statistics.median(off) * (len(on) + len(off)) / (sum(on) + sum(off))


def _bytes_under(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
