"""``python -m benchmarks.reader``: rows per second of the training reader alone, 13 dense features and 26 ids a row.

Shuffled batches of 8192 as training takes them, by the default two decoding threads. ``ratio`` is against reading the
same row groups by ``pyarrow.parquet`` into a table, which makes no batch and shuffles nothing. Then one epoch of the
training that a run does (``data_wait_share``: of its time, waiting for batches), at full speed on the same rows.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile

import pyarrow.parquet as pq

from benchmarks.harness import finish, in_turns, median_ratio, options, seconds_of, show, silent
from benchmarks.models_and_rows import BATCH, config_of, generate, plan_of
from pipeline.store import Store
from pipeline.training.batches import BatchReader
from pipeline.training.config_settings import select_training_settings
from pipeline.training.parquet import SplitReader
from pipeline.training.sampler import Order
from pipeline.training.trainer import train


def main() -> None:
    given = options(__doc__, rows=2_000_000, rounds=5, steps=(200, "of training; 0: none"))
    silent()
    epochs, trained = itertools.count(), {}
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        print(f"generating {given.rows:,} rows ...", flush=True)
        split = SplitReader(store, generate(store, given.rows, 1), "train")
        order = Order(key=split.dataset.key, seed=1, global_batch=BATCH)

        def read_batches() -> None:
            epoch = next(epochs)
            with BatchReader(split, order, epochs=epoch + 1, start=(epoch, 0)) as reader:
                rows = sum(len(batch.labels) for batch in reader)
            assert rows >= split.rows

        def read_tables() -> None:
            for file in sorted({group.file for group in split.groups}):
                with store.open(f"{split.dataset.path}/{file}") as source:
                    pq.ParquetFile(source).read(use_threads=True)

        works = {"reader": lambda: seconds_of(read_batches), "tables": lambda: seconds_of(read_tables)}
        seconds = in_turns(works, given.rounds, warm_up=1)
        rates = {name: given.rows / statistics.median(rounds) for name, rounds in seconds.items()}
        show("rows/s", rates, ",.0f")
        if given.steps:
            # As the train stage takes them: one rank, every core.
            config = config_of(max_steps=given.steps, log_every_steps=50)
            settings, plan = select_training_settings(config), plan_of(split.schema, config)
            place = "runs/r/checkpoints/bench"
            done = train(settings, store, split.dataset, plan, place, "bench", lambda _: None)
            trained = {name: done["train"][name] for name in ("data_wait_share", "samples_per_s")}
    finish(
        "reader",
        median_ratio(seconds["tables"], seconds["reader"]),
        rows_per_s=rates["reader"],
        table_rows_per_s=rates["tables"],
        rows=given.rows,
        **trained,
    )


if __name__ == "__main__":
    main()
