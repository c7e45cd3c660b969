"""``make bench-sequences-step``: a whole training step where histories are of unlike lengths.

The step of our training loop on one rank: lookups of user, item, category and of every event's item, category and age,
the sequence's block, a DLRM, backward pass and both optimizers. Batches of equal rows take turns on one model, and the
fewest seconds of the CPU count, so that other work on the machine tells little: histories of 1 to ``--longest`` events,
``--mean`` on average (``uneven``), against histories of the mean length (``even``), which are as many events.
``hstu/2`` has two layers.

``ratio``: the uneven step over the even one, the largest of the blocks. ``peak_mib``: what a step allocates at its
peak, for these two, for histories of twice the mean (``twice``), and for one row of the longest beside rows of the mean
(``one_long``): it grows with the events, not with rows times the longest.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import finish, in_turns, options, show, silent
from benchmarks.models_and_rows import config_of, trainer_of
from benchmarks.sequences_speed import OPTIONS, uneven_lengths
from pipeline.config.sequences import SequenceModel, SequenceOptions
from pipeline.records import DatasetSchema, SequenceColumn, SequenceGroup, SparseColumn
from pipeline.store import Store
from pipeline.training.batches import Batch, BatchReader
from pipeline.training.parquet import SplitReader
from pipeline.training.sampler import Order

ROWS = {"user": 50_000, "item": 50_000, "category": 500}
EVENTS = {"item": ROWS["item"], "category": ROWS["category"], "age": 66}
DENSE, BATCHES = tuple(f"I{number}" for number in range(4)), 3


def main() -> None:
    given = options(__doc__, **(OPTIONS | {"rounds": 12}))
    silent()
    even = torch.full((given.samples,), given.mean)
    uneven = uneven_lengths(given.samples, given.mean, given.longest)
    one_long = torch.cat([torch.tensor([given.longest]), even[1:]])
    cases = {"uneven": uneven, "even": even, "twice": 2 * even, "one_long": one_long}
    schema, seconds, peaks = schema_of(given.samples, given.longest), {}, {}
    batches = {name: batches_of(schema, lengths.numpy()) for name, lengths in cases.items()}
    for block in given.blocks:
        steps = Steps(block, schema, given.dim, given.samples, given.threads)
        seconds[block] = steps.fastest({name: batches[name] for name in ("uneven", "even")}, given.rounds)
        peaks[block] = {name: round(steps.peak(each[0]) / 2**20, 1) for name, each in batches.items()}
        show(f"{block}, seconds", seconds[block])
    uneven_to_even = {name: each["uneven"] / each["even"] for name, each in seconds.items()}
    finish(
        "sequences_step",
        max(uneven_to_even.values()),
        samples=given.samples,
        events=int(uneven.sum()),
        longest=int(uneven.max()),
        threads=given.threads,
        uneven_to_even={name: round(each, 3) for name, each in uneven_to_even.items()},
        step_ms={name: {case: round(1e3 * each, 1) for case, each in cases.items()} for name, cases in seconds.items()},
        peak_mib=peaks,
    )


def schema_of(samples: int, longest: int) -> DatasetSchema:
    """``BATCHES`` row groups of a batch each, in one file."""
    events = tuple(
        SequenceColumn(name=f"history__{event}", rows=size, table=event if event in ROWS else "")
        for event, size in EVENTS.items()
    )
    return DatasetSchema(
        dense=DENSE,
        sparse=tuple(SparseColumn(name=name, rows=size) for name, size in ROWS.items()),
        rows={"train": BATCHES * samples, "test": 0},
        files={"train": ["train/part-00000.parquet"], "test": []},
        groups={"train": [[samples] * BATCHES], "test": []},
        sequences=(SequenceGroup(name="history", max_length=longest, columns=events),),
    )


def batches_of(schema: DatasetSchema, lengths: np.ndarray) -> list[Batch]:
    """Batches with histories of these ``lengths`` each, in another order, as training reads them from a dataset."""
    rng, rows = np.random.default_rng(3), schema.rows["train"]
    shuffled = np.concatenate([rng.permutation(lengths) for _ in range(BATCHES)])
    offsets = pa.array(np.concatenate([[0], np.cumsum(shuffled)]).astype(np.int32))
    columns = {"label": rng.integers(0, 2, rows).astype(np.float32)}
    columns |= {name: rng.normal(size=rows).astype(np.float32) for name in DENSE}
    columns |= {name: rng.integers(0, size, rows).astype(np.int32) for name, size in ROWS.items()}
    for event, size in EVENTS.items():
        values = pa.array(rng.integers(0, size, int(shuffled.sum())).astype(np.int32))
        columns[f"history__{event}"] = pa.ListArray.from_arrays(offsets, values)
    order = Order(key="steps", seed=1, global_batch=len(lengths), shuffle=False)
    with tempfile.TemporaryDirectory() as folder:
        store: Store = Store(folder)
        with store.draft("data", kind="dataset", key="steps", config={}, inputs={}) as draft:
            with draft.open(schema.files["train"][0]) as sink:
                pq.write_table(pa.table(columns), sink, row_group_size=len(lengths))
            draft.write_json("schema.json", schema.to_json())
            split = SplitReader(store, draft.commit({}), "train")
        with BatchReader(split, order) as reader:
            return list(itertools.islice(reader, BATCHES))


class Steps:
    """Steps of a DLRM with ``block`` (its name and layers), whose pipeline has the next batch in hand before a step."""

    def __init__(self, block: str, schema: DatasetSchema, dim: int, samples: int, threads: int) -> None:
        name, _, layers = block.partition("/")
        chosen = SequenceModel(block=name, options=SequenceOptions(layers=int(layers) if layers else None))
        config = config_of(dim, samples, threads=threads, warmup_steps=1, precision="fp32")
        config = replace(config, model=replace(config.model, sequences={"history": chosen}))
        self._trainer, self._batches = trainer_of(config, schema), deque[Batch]()
        self._source = iter(self._batches.popleft, None)

    def _prepare(self, batch: Batch) -> None:
        # Steps on the batch take the memory that batches before it gave back.
        self._batches.clear()
        self._batches.extend([batch] * 4)
        for _ in range(2):
            self._trainer.step(self._source)

    def fastest(self, batches: dict[str, list[Batch]], rounds: int) -> dict[str, float]:
        """CPU seconds of the fastest step of each case, which take turns."""

        def timed(drawn: Iterator[Batch]) -> float:
            self._prepare(next(drawn))
            start = time.process_time()
            self._trainer.step(self._source)
            return time.process_time() - start

        drawn = {name: itertools.cycle(each) for name, each in batches.items()}
        taken = in_turns({name: partial(timed, each) for name, each in drawn.items()}, rounds)
        return {name: min(times) for name, times in taken.items()}

    def peak(self, batch: Batch) -> int:
        """Bytes that one step has allocated at its peak, above those it found."""
        self._prepare(batch)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            self._trainer.step(self._source)
        assert seen.profiler is not None
        events = [each for each in seen.profiler.kineto_results.events() if each.name() == "[memory]"]
        held = np.cumsum([each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())])
        return int(held.max(initial=0))


if __name__ == "__main__":
    main()
