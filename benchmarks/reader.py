"""``python -m benchmarks.reader``: rows per second of the training reader alone, 13 dense features and 26 ids a row.

Shuffled batches of 8192 as training takes them, by the default two decoding threads. ``ratio`` is against reading the
same row groups by ``pyarrow.parquet`` into a table, which makes no batch and shuffles nothing. Then one epoch of the
training that a run does (``data_wait_share``: of its time, waiting for batches), at full speed on the same rows.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow.parquet as pq

from benchmarks.clicks import config_of, generate, plan_of
from benchmarks.common import finish
from pipeline.store import Store
from pipeline.training.batches import BatchReader
from pipeline.training.config_settings import select_training_settings
from pipeline.training.parquet import SplitReader
from pipeline.training.sampler import Order
from pipeline.training.trainer import train

BATCH = 8192


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=2_000_000)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--steps", type=int, default=200, help="of training; 0: none")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        print(f"generating {given.rows:,} rows ...", flush=True)
        split = SplitReader(store, generate(store, given.rows, 1), "train")
        ours, tables = [], []
        for number in range(given.rounds + 1):  # the first one warms up
            seconds = _timed(lambda epoch=number: _batches(split, epoch)), _timed(lambda: _tables(store, split))
            if number:
                ours.append(seconds[0])
                tables.append(seconds[1])
                print(
                    f"reader {given.rows / seconds[0]:,.0f} rows/s, tables {given.rows / seconds[1]:,.0f}", flush=True
                )
        trained = _trained(store, split, given.steps) if given.steps else {}
    finish(
        "reader",
        statistics.median(b / a for a, b in zip(ours, tables, strict=True)),
        rows_per_s=given.rows / statistics.median(ours),
        table_rows_per_s=given.rows / statistics.median(tables),
        rows=given.rows,
        **trained,
    )


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _batches(split: SplitReader, epoch: int) -> None:
    order = Order(key=split.dataset.key, seed=1, global_batch=BATCH)
    with BatchReader(split, order, epochs=epoch + 1, start=(epoch, 0)) as reader:
        rows = sum(len(batch.labels) for batch in reader)
    assert rows >= split.rows


def _tables(store: Store, split: SplitReader) -> None:
    for file in sorted({group.file for group in split.groups}):
        with store.open(f"{split.dataset.path}/{file}") as source:
            pq.ParquetFile(source).read(use_threads=True)


def _trained(store: Store, split: SplitReader, steps: int) -> dict[str, Any]:
    """Figures of ``steps`` steps of batch 8192 as the train stage takes them, one rank, every core."""
    logging.disable(logging.WARNING)
    config = config_of()
    config = replace(config, train=replace(config.train, max_steps=steps, log_every_steps=50))
    settings = select_training_settings(config)
    done = train(settings, store, split.dataset, plan_of(split.schema), "runs/r/checkpoints/bench", "bench", _show)
    return {name: done["train"][name] for name in ("data_wait_share", "samples_per_s")}


def _show(record: dict[str, Any]) -> None:
    print(f"training {record['samples_per_s']:,.0f} samples/s, waits {record['data_wait_share']:.2%}", flush=True)


if __name__ == "__main__":
    main()
