"""The training process of ``benchmarks.ssd``: builds a model on one tier, then takes steps as it is told.

It reads one JSON object a line and answers with one; its parent puts it under a memory limit before the first.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.checkpoint_model import ZipfIds, batches, config_of, plan_of, schema_of
from benchmarks.ssd_memory import AHEAD
from pipeline.embeddings.initial import initial_rows
from pipeline.embeddings.ssd import SsdStore, named, pss_bytes
from pipeline.records import DatasetSchema
from pipeline.training.batches import Batch
from pipeline.training.config_settings import select_model_settings
from pipeline.training.distributed import connect
from pipeline.training.memory import MemoryMeter, give_back_freed
from pipeline.training.step import StepExecutor

# Rows written at a time.
ROWS = 1 << 15
# Ids drawn at a time to age a log.
DRAWN = 1 << 16


def main() -> None:
    """Answer the parent until it hangs up."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    model: _Model | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        if model is None:
            base, meter = pss_bytes(), MemoryMeter(torch.device("cpu"))
            model = _Model(**asked)
            answer = {"pss_bytes": pss_bytes()}
        elif "age" in asked:
            answer = model.age(**asked)
        else:
            answer = model.run(**asked)
        answer["process_bytes"] = base + meter.peak()
        give_back_freed()  # what building and aging left behind is not training's
        print(json.dumps(answer), flush=True)
    if model is not None:
        model.close()


class DriftingIds(ZipfIds):
    """Zipf ids of which rows never seen before become the most popular ones: rank r is row r - shift, modulo the rows.

    ``drift``: rows a batch.
    """

    def __init__(self, rows: int, exponent: float, batch: int, drift: float, shift: float) -> None:
        super().__init__(rows, exponent)
        self._each, self.shift = drift / batch, shift

    def draw(self, rng: np.random.Generator, count: int, tables: int = 1) -> np.ndarray:
        """int32 [count] of ``tables`` tables."""
        self.shift += self._each * count / tables
        return (super().draw(rng, count) - np.int32(self.shift)) % np.int32(self._rows)


class _Draws:
    """``ids`` for all tables of a batch at once."""

    def __init__(self, ids: DriftingIds, tables: int) -> None:
        self._ids, self._tables = ids, tables

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """int32 [count]."""
        return self._ids.draw(rng, count, self._tables)


class _Reader:
    """Batches made and announced ahead by a thread, as the training's reader does."""

    def __init__(self, source: Iterator[Batch], names: list[str], ssd: SsdStore | None) -> None:
        self._source, self._names, self._ssd = source, names, ssd
        self._queue: queue.Queue[Batch] = queue.Queue(maxsize=AHEAD)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._make, daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self._queue.get()

    def close(self) -> None:
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.01)
            except queue.Empty:
                continue

    def _make(self) -> None:
        while not self._stop.is_set():
            batch = next(self._source)
            if self._ssd is not None:
                ids = batch.sparse.values().numpy().reshape(len(self._names), -1).astype(np.int64)
                self._ssd.prefetch(dict(zip(self._names, ids, strict=True)))
            self._queue.put(batch)


class _Model:
    """A DLRM with its tables in memory, or on SSD in ``folder``."""

    def __init__(
        self,
        count: int,
        rows: int,
        dim: int,
        batch: int,
        folder: str | None,
        cache_rows: int,
        lazy: bool,
        spare: float,
    ) -> None:
        self.batch, self._kept = batch, cache_rows
        self.schema: DatasetSchema = schema_of(count, rows)
        config = config_of(dim, batch)
        device = connect(config.hardware, config.train.threads_per_rank)
        plan = plan_of(self.schema, config, "ssd" if folder else "ddr", cache_rows)
        self.ssd = SsdStore(plan, [folder], rank=0, spare=spare) if folder else None
        self.trainer = StepExecutor(select_model_settings(config), self.schema, plan, device, ssd=self.ssd)
        if self.ssd is not None and not lazy:
            self._write_rows()

    def _write_rows(self) -> None:
        """Every row lies in its file, which goes past the page cache, and none has its initial value still to come."""
        for shard in self.trainer.rows.local_shards():
            weight = initial_rows(0, self.trainer.rows.tables[shard.table], 0, min(ROWS, shard.rows))
            for start in range(0, shard.rows, ROWS):
                places = slice(start, min(start + ROWS, shard.rows))
                count = places.stop - start
                shard.put(places, weight[:count], {"adagrad_sum": torch.zeros(count)})

    def age(self, age: float, zipf: float, seed: int, drift: float, shift: float, seconds: float) -> dict[str, Any]:
        """Let rows leave memory as training does, until every log has moved ``age`` times its rows, or time is over.

        The figures are of the second half, or of the whole where time was over before.
        """
        assert self.ssd is not None
        began, shards = time.perf_counter(), self.trainer.rows.local_shards()
        rng, rows = np.random.default_rng(seed), shards[0].rows
        ids = DriftingIds(rows, zipf, self.batch, drift, shift)
        weight = initial_rows(0, self.trainer.rows.tables[shards[0].table], 0, min(DRAWN, rows))
        logs = [self.ssd.shard(shard.table).log for shard in shards]
        first, turns, half = sum(log.added for log in logs), 0.0, False
        while self._kept < rows and turns < age and time.perf_counter() - began < seconds:
            places = np.unique(ids.draw(rng, DRAWN))
            for shard in shards:
                kept = self.ssd.shard(shard.table)
                popular = (places + int(ids.shift)) % rows < kept.recent  # these stay in memory, as the pinned ones do
                cold = places[~popular & (places >= kept.pinned)].astype(np.int64)
                shard.put(torch.from_numpy(cold), weight[: len(cold)], {"adagrad_sum": torch.zeros(len(cold))})
            turns = (sum(log.added for log in logs) - first) / (rows * len(logs))
            if not half and turns >= age / 2:
                half, _ = True, self.ssd.figures.take()
        figures = named(self.ssd.figures.take(), 1)
        return {
            "turns": turns,
            "emptied": sum(log.emptied for log in logs),
            "seconds": time.perf_counter() - began,
            "write_amplification": figures["ssd_write_amplification"],
            "shift": ids.shift,
        }

    def _emptied(self) -> int:
        ssd = self.ssd
        return 0 if ssd is None else sum(ssd.shard(name).log.emptied for name in ssd.tables)

    def run(
        self,
        steps: int,
        warm_seconds: float,
        zipf: float,
        prefetch: bool,
        seed: int,
        max_seconds: float,
        drift: float = 0.0,
        shift: float = 0.0,
    ) -> dict[str, Any]:
        """Train ``warm_seconds``, then ``steps`` by the clock (at most ``max_seconds``), ids of exponent ``zipf``."""
        names = [column.name for column in self.schema.sparse]
        ids = DriftingIds(self.schema.sparse[0].rows, zipf, self.batch, drift, shift)
        source = batches(self.schema, self.batch, seed, _Draws(ids, len(names)))
        reader = _Reader(source, names, self.ssd if prefetch else None)
        warmed, until = 0, time.perf_counter() + warm_seconds
        while time.perf_counter() < until:
            self.trainer.step(reader)
            warmed += 1
        if self.ssd is not None:
            self.ssd.figures.take()
        began, spent, emptied = time.perf_counter(), time.process_time(), self._emptied()
        taken = 0
        while taken < steps and (taken < 4 or time.perf_counter() < began + max_seconds):
            self.trainer.step(reader)
            taken += 1
        seconds = time.perf_counter() - began
        answer: dict[str, Any] = {
            "samples_per_s": taken * self.batch / seconds,
            "step_ms": 1000 * seconds / taken,
            "cpu_ms": 1000 * (time.process_time() - spent) / taken,
            "steps": taken,
            "warm_steps": warmed,
            "shift": ids.shift,
        }
        if self.ssd is not None:
            sums = self.ssd.figures.take()
            answer |= named(sums, taken)
            answer["cold_share"] = 1 - sums[3] / sums[2] if sums[2] else None
            answer |= {"pss_bytes": pss_bytes(), "cleaned": (self._emptied() - emptied) / taken}
        reader.close()
        return answer

    def close(self) -> None:
        if self.ssd is not None:
            self.ssd.close()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
