"""``make bench-scaling``: samples per second on 1, 2 and 4 ranks of one thread each, on one machine.

The model, rows and global batch of ``bench-train``; the tables are dealt out whole, and a rank reads the row groups of
its own lanes, as it does of any dataset with eight for each rank. ``ratio``: 4 ranks over 1; ``ratio_2``: 2 over 1;
medians over rounds, in which the numbers of ranks take turns. ``ceiling``: what the machine allows, 4 trainings at once
with a quarter of the batch each, which exchange nothing, over 1; ``share``: ``ratio`` over it. The phases of a step are
those of the last round, in ms. On a machine with fewer CPUs than ranks all processes of a comparison get the same
``cpus_a_rank``, however many they are, by a cgroup's quota, from their warm-up on: so 4 ranks are to one as on a
machine of 4 CPUs that are as much slower.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from benchmarks.cgroup import awake, equal_share, shares
from benchmarks.harness import be_rank, finish, free_port, in_turns, median_ratio, options, seconds_of, silent
from benchmarks.models_and_rows import BATCH, TABLES, config_of, generate, plan_with, table_plan, trainer_of
from pipeline.store import Store
from pipeline.training.batches import BatchReader
from pipeline.training.parquet import SplitReader
from pipeline.training.sampler import Order

WARM_UP = 12  # steps before the clock starts
GROUP = 8192  # rows of a row group: enough of them for a lane a rank


@dataclass(frozen=True)
class Run:
    """``copies`` trainings at once on ``world`` ranks each, of which each process has so many ``cpus``."""

    world: int
    copies: int
    cpus: float

    def __str__(self) -> str:
        return f"{self.world * self.copies}{' apart' if self.copies > 1 else ''} at {self.cpus:g}"


def main() -> None:
    given = options(__doc__, steps=(60, "timed steps of a round"), rounds=3)
    runs = [Run(world, 1, equal_share(most)) for most in (2, 4) for world in (1, most)]
    runs = list(dict.fromkeys([*runs, Run(1, 4, equal_share(4))]))
    with tempfile.TemporaryDirectory() as folder:
        generate(Store(folder), (given.steps + WARM_UP + 8) * BATCH, 0, GROUP)
        found = in_turns({str(run): lambda run=run: measure(given.steps, folder, run) for run in runs}, given.rounds)
    speeds = {name: [each["samples_per_s"] for each in rounds] for name, rounds in found.items()}
    over_one = {}
    for run in runs:
        over_one[run.world, run.copies] = median_ratio(speeds[str(run)], speeds[str(replace(run, world=1, copies=1))])
    finish(
        "scaling",
        over_one[4, 1],
        ratio_2=over_one[2, 1],
        ceiling=over_one[1, 4],
        share=over_one[4, 1] / over_one[1, 4],
        phases_ms={name: rounds[-1]["phases"] for name, rounds in found.items()},
        cpus_a_rank={2: equal_share(2), 4: equal_share(4)},
        samples_per_s={name: statistics.median(rounds) for name, rounds in speeds.items()},
    )


def measure(steps: int, folder: str, run: Run) -> dict[str, Any]:
    """Samples/s of all trainings of ``run``, and the phases of the first one's step."""
    context, ranks = mp.get_context("spawn"), run.world * run.copies
    ports = [free_port() for _ in range(run.copies)]
    ready, together = context.Barrier(ranks + 1), context.Barrier(ranks)
    running = mp.spawn(_rank, args=(run, folder, steps, ports, ready, together), nprocs=ranks, join=False)
    while ready.n_waiting < ranks:
        running.join(0.05)  # raises the error of a rank that ended
    with awake(run.cpus < 1), shares(running.pids(), run.cpus):
        ready.wait()
        while not running.join():
            pass
    figures: dict[str, Any] = json.loads(Path(folder, "figures.json").read_text())
    print(f"{run}: {figures['samples_per_s']:,.0f} samples/s", flush=True)
    return figures


def _rank(number: int, run: Run, folder: str, steps: int, ports: list[int], ready: Any, together: Any) -> None:
    """Train as a rank of a training; the first one writes ``figures.json``. All start and stop the clock together."""
    silent()
    copy, rank = divmod(number, run.world)
    be_rank(rank, run.world, ports[copy])
    config = config_of(batch=BATCH // run.copies, ranks=run.world, threads=1)
    store: Store = Store(folder)
    split = SplitReader(store, store.get("data", "ingest"), "train")
    # The tables whole, neighbours on the same rank.
    tables = {
        column.name: table_plan(column.rows, config.model.embedding_dim, rank=i * run.world // TABLES)
        for i, column in enumerate(split.schema.sparse)
    }
    trainer = trainer_of(config, split.schema, plan_with(tables, run.world))
    batch, lanes = config.train.batch, config.train.dealt_lanes
    order = Order(key="scaling", seed=1, global_batch=batch, lanes=lanes, rank=rank, world_size=run.world)

    def train(count: int) -> None:
        for _ in range(count):
            trainer.step(reader)
        together.wait()

    ready.wait()
    with BatchReader(split, order) as reader:
        train(WARM_UP)
        seconds = seconds_of(lambda: train(steps))
    if number == 0:
        phases = {name: round(ms, 2) for name, ms in trainer.clock.figures().items()}
        figures = {"samples_per_s": steps * batch * run.copies / seconds, "phases": phases}
        Path(folder, "figures.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
