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

import argparse
import itertools
import logging
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import finish
from benchmarks.sequences_speed import BLOCKS, uneven_lengths
from pipeline.config import Config, DataConfig, HardwareConfig, TrainConfig
from pipeline.config.sequences import SequenceModel, SequenceOptions
from pipeline.models.settings import DlrmConfig
from pipeline.records import DatasetSchema, Plan, SequenceColumn, SequenceGroup, ShardPlan, SparseColumn, TablePlan
from pipeline.store import Artifact, Store
from pipeline.training.batches import Batch, BatchReader
from pipeline.training.config_settings import select_model_settings
from pipeline.training.distributed import connect
from pipeline.training.parquet import SplitReader
from pipeline.training.sampler import Order
from pipeline.training.step import StepExecutor

ROWS = {"user": 50_000, "item": 50_000, "category": 500}
AGES, DENSE, BATCHES = 66, 4, 3


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--blocks", nargs="+", default=list(BLOCKS), help="a number behind / is of layers")
    options.add_argument("--samples", type=int, default=512, help="rows of a batch")
    options.add_argument("--mean", type=int, default=20)
    options.add_argument("--longest", type=int, default=200)
    options.add_argument("--dim", type=int, default=32)
    options.add_argument("--rounds", type=int, default=12)
    options.add_argument("--threads", type=int, default=1)
    given = options.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    began, even = time.monotonic(), torch.full((given.samples,), given.mean)
    one_long = torch.cat([torch.tensor([given.longest]), even[1:]])
    uneven = uneven_lengths(given.samples, given.mean, given.longest)
    cases = {"uneven": uneven, "even": even, "twice": 2 * even, "one_long": one_long}
    seconds, peaks = dict[str, dict[str, float]](), dict[str, dict[str, float]]()
    connect(HardwareConfig(name="bench"), given.threads)
    with tempfile.TemporaryDirectory() as folder:
        store: Store = Store(folder)
        data = {name: write(store, name, lengths.numpy(), given.longest) for name, lengths in cases.items()}
        for block in given.blocks:
            steps = Steps(trainer_of(block, store, data["even"], given.dim, given.samples))
            batches = {name: read(store, dataset, given.samples) for name, dataset in data.items()}
            seconds[block] = fastest(steps, {name: batches[name] for name in ("uneven", "even")}, given.rounds)
            peaks[block] = {name: peak(steps, each[0]) / 2**20 for name, each in batches.items()}
            print(
                f"{block:<8}"
                + "".join(f"{name:>9} {1e3 * each:7.1f} ms" for name, each in seconds[block].items())
                + "  peak"
                + "".join(f"  {name} {each:.1f} MiB" for name, each in peaks[block].items()),
                flush=True,
            )
    finish(
        "sequences_step",
        max(each["uneven"] / each["even"] for each in seconds.values()),
        samples=given.samples,
        events=int(uneven.sum()),
        longest=int(uneven.max()),
        threads=given.threads,
        uneven_to_even={name: round(each["uneven"] / each["even"], 3) for name, each in seconds.items()},
        step_ms={name: {case: round(1e3 * each, 1) for case, each in cases.items()} for name, cases in seconds.items()},
        peak_mib={name: {case: round(each, 1) for case, each in cases.items()} for name, cases in peaks.items()},
        seconds=time.monotonic() - began,
    )


def write(store: Store, name: str, lengths: np.ndarray, longest: int) -> Artifact:
    """A dataset of ``BATCHES`` batches with histories of these ``lengths`` each, in another order."""
    rng, samples = np.random.default_rng(3), len(lengths)
    rows = BATCHES * samples
    each = np.concatenate([rng.permutation(lengths) for _ in range(BATCHES)])
    offsets = np.concatenate([[0], np.cumsum(each)]).astype(np.int32)
    sizes = {"item": ROWS["item"], "category": ROWS["category"], "age": AGES}
    columns = {"label": rng.integers(0, 2, rows).astype(np.float32)}
    columns |= {f"I{number}": rng.normal(size=rows).astype(np.float32) for number in range(DENSE)}
    columns |= {name: rng.integers(0, size, rows).astype(np.int32) for name, size in ROWS.items()}
    events = {
        f"history__{name}": pa.ListArray.from_arrays(
            pa.array(offsets), pa.array(rng.integers(0, size, int(offsets[-1])).astype(np.int32))
        )
        for name, size in sizes.items()
    }
    schema = DatasetSchema(
        dense=tuple(f"I{number}" for number in range(DENSE)),
        sparse=tuple(SparseColumn(name=name, rows=size) for name, size in ROWS.items()),
        rows={"train": rows, "test": 0},
        files={"train": ["train/part-00000.parquet"], "test": []},
        groups={"train": [[samples] * BATCHES], "test": []},
        sequences=(
            SequenceGroup(
                name="history",
                max_length=longest,
                columns=tuple(
                    SequenceColumn(name=f"history__{name}", rows=size, table=name if name in ROWS else "")
                    for name, size in sizes.items()
                ),
            ),
        ),
    )
    with store.draft(f"datasets/{name}", kind="dataset", key=name, config={}, inputs={}) as draft:
        with draft.open(schema.files["train"][0]) as sink:
            pq.write_table(pa.table({**columns, **events}), sink, row_group_size=samples)
        draft.write_json("schema.json", schema.to_json())
        return draft.commit({})


def trainer_of(block: str, store: Store, dataset: Artifact, dim: int, samples: int) -> StepExecutor:
    """A trainer of a DLRM with ``block``, called by its name and its layers."""
    name, _, layers = block.partition("/")
    chosen = SequenceModel(block=name, options=SequenceOptions(layers=int(layers) if layers else None))
    config = Config(
        data=DataConfig(name="bench", format="synthetic"),
        hardware=HardwareConfig(name="bench"),
        model=DlrmConfig(embedding_dim=dim, sequences={"history": chosen}),
        train=TrainConfig(global_batch=samples, warmup_steps=1, schedule="constant", precision="fp32"),
    )
    schema = SplitReader(store, dataset, "train").schema
    return StepExecutor(select_model_settings(config), schema, plan_of(schema, dim, samples), torch.device("cpu"))


def plan_of(schema: DatasetSchema, dim: int, samples: int) -> Plan:
    """Every table whole on the one rank."""
    tables = {
        table.name: TablePlan(
            rows=table.rows,
            dim=dim,
            pooling=1.0,
            tier="ddr",
            sharding="table_wise",
            kernel="fused",
            cost_ms=0.0,
            shards=(ShardPlan(rank=0, row=0, rows=table.rows, column=0, columns=dim),),
            reason="",
        )
        for table in schema.tables
    }
    return Plan(hardware="bench", device="cpu", world_size=1, ranks_per_host=1, global_batch=samples, tables=tables)


def read(store: Store, dataset: Artifact, samples: int) -> list[Batch]:
    """The batches of ``dataset``."""
    order = Order(key=dataset.key, seed=1, global_batch=samples, shuffle=False)
    with BatchReader(SplitReader(store, dataset, "train"), order) as reader:
        return list(itertools.islice(reader, BATCHES))


class Steps:
    """Steps of ``trainer``, whose pipeline has the next batch in hand before it takes a step."""

    def __init__(self, trainer: StepExecutor) -> None:
        self._trainer, self._batches = trainer, deque[Batch]()
        self._source = iter(self._batches.popleft, None)

    def on(self, batch: Batch) -> Callable[[], object]:
        """A step on ``batch``, after others on it that take the memory which batches before it gave back."""
        self._batches.clear()
        self._batches.extend([batch] * 4)
        for _ in range(2):
            self._trainer.step(self._source)
        return lambda: self._trainer.step(self._source)


def fastest(steps: Steps, batches: dict[str, list[Batch]], rounds: int) -> dict[str, float]:
    """CPU seconds of the fastest step of each case, which take turns."""
    taken: dict[str, list[float]] = {name: [] for name in batches}
    for number in range(rounds):
        for name, each in batches.items():
            step = steps.on(each[number % len(each)])
            start = time.process_time()
            step()
            taken[name].append(time.process_time() - start)
    return {name: min(times) for name, times in taken.items()}


def peak(steps: Steps, batch: Batch) -> int:
    """Bytes that one step has allocated at its peak, above those it found."""
    step = steps.on(batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    assert seen.profiler is not None
    events = [each for each in seen.profiler.kineto_results.events() if each.name() == "[memory]"]
    held = np.cumsum([each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())])
    return int(held.max(initial=0))


if __name__ == "__main__":
    main()
