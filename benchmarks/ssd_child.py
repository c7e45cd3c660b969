"""The training process of ``benchmarks.ssd``: builds a model on one tier, then takes steps as it is told.

It reads one JSON object a line and answers with one; its parent puts it under a memory limit before the first.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.harness import serve, silent
from benchmarks.models_and_rows import ZipfIds, batches, config_of, plan_of, schema_of
from benchmarks.ssd import AHEAD
from pipeline.embeddings.initial import initial_rows
from pipeline.embeddings.ssd import SsdStore, named, pss_bytes
from pipeline.training.batches import Batch
from pipeline.training.config_settings import select_model_settings
from pipeline.training.distributed import connect
from pipeline.training.memory import MemoryMeter, give_back_freed
from pipeline.training.step import StepExecutor

ROWS = 1 << 15  # written at a time
DRAWN = 1 << 16  # ids at a time to age a log


def main() -> None:
    silent()
    child = _Child()
    serve(child.answer)
    if child.model is not None:
        child.model.close()


class _Child:
    def __init__(self) -> None:
        self.model: _Model | None = None

    def answer(self, **asked: Any) -> dict[str, Any]:
        """The first question builds the model, every other one ages its log or trains it."""
        if self.model is None:
            self.base, self.meter = pss_bytes(), MemoryMeter(torch.device("cpu"))
            self.model = _Model(**asked)
            answer = {"pss_bytes": pss_bytes()}
        else:
            answer = self.model.age(**asked) if "age" in asked else self.model.run(**asked)
        answer["process_bytes"] = self.base + self.meter.peak()
        give_back_freed()  # what building and aging left behind is not training's
        return answer


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
        self.batch, self.rows, self._kept = batch, rows, cache_rows
        schema, config = schema_of(count, rows), config_of(dim, batch)
        self.schema, self.names = schema, [column.name for column in schema.sparse]
        device = connect(config.hardware, config.train.threads_per_rank)
        plan = plan_of(schema, config, tier="ssd" if folder else "ddr", cache_rows=cache_rows)
        self.ssd = SsdStore(plan, [folder], rank=0, spare=spare) if folder else None
        self.trainer = StepExecutor(select_model_settings(config), schema, plan, device, row_store=self.ssd)
        self.shards = self.trainer.rows.local_shards()
        self.logs = [self.ssd.shard(name).log for name in self.ssd.tables] if self.ssd is not None else []
        # Every row lies in its file, which goes past the page cache, and none has its initial value still to come.
        for shard in self.shards if self.ssd is not None and not lazy else ():
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
        began, rng, rows = time.perf_counter(), np.random.default_rng(seed), self.rows
        ids = DriftingIds(rows, zipf, self.batch, drift, shift)
        weight = initial_rows(0, self.trainer.rows.tables[self.shards[0].table], 0, min(DRAWN, rows))
        first, turns, half = sum(log.added for log in self.logs), 0.0, False
        while self._kept < rows and turns < age and time.perf_counter() - began < seconds:
            places = np.unique(ids.draw(rng, DRAWN))
            for shard in self.shards:
                kept = self.ssd.shard(shard.table)
                popular = (places + int(ids.shift)) % rows < kept.recent  # these stay in memory, as the pinned ones do
                cold = places[~popular & (places >= kept.pinned)].astype(np.int64)
                shard.put(torch.from_numpy(cold), weight[: len(cold)], {"adagrad_sum": torch.zeros(len(cold))})
            turns = (sum(log.added for log in self.logs) - first) / (rows * len(self.logs))
            if not half and turns >= age / 2:
                half, _ = True, self.ssd.figures.take()
        return {
            "turns": turns,
            "emptied": sum(log.emptied for log in self.logs),
            "seconds": time.perf_counter() - began,
            "write_amplification": named(self.ssd.figures.take(), 1)["ssd_write_amplification"],
            "shift": ids.shift,
        }

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
        ids = DriftingIds(self.rows, zipf, self.batch, drift, shift, len(self.names))
        reader = _Reader(batches(self.schema, self.batch, seed, ids), self.names, self.ssd if prefetch else None)
        warmed, taken, until = 0, 0, time.perf_counter() + warm_seconds
        while time.perf_counter() < until:
            self.trainer.step(reader)
            warmed += 1
        if self.ssd is not None:
            self.ssd.figures.take()
        began, spent, emptied = time.perf_counter(), time.process_time(), sum(log.emptied for log in self.logs)
        for taken in itertools.count():
            if taken >= steps or (taken >= 4 and time.perf_counter() >= began + max_seconds):
                break
            self.trainer.step(reader)
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
            cleaned = (sum(log.emptied for log in self.logs) - emptied) / taken
            answer |= {"pss_bytes": pss_bytes(), "cleaned": cleaned}
        reader.close()
        return answer

    def close(self) -> None:
        if self.ssd is not None:
            self.ssd.close()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
