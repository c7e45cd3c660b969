"""``make bench-sequences``: what blocks of sequences learn where a click depends on the last similar item.

The logs are synthetic (``data=synthetic_users``): each user sees items of two categories, and the log odds of a click
are the effect of one earlier row, the last of the same user and category. Ingestion builds the histories from the log.
Ids, rows, ranking model and settings are the same for all blocks; a seed draws other logs, initial values and orders of
the rows. The true probabilities are known, so a block's NE says how much of the reachable gain it has: 1 minus NE, over
1 minus the NE of the truth. A sum of the events cannot tell the last one from those before it.

``ratio``: the smallest mean gain of the blocks that attend (``--attending``); ``gains``: of each block the mean, and
its smallest over the seeds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass

from benchmarks.common import finish
from benchmarks.runs import processes, run
from pipeline.core.cpus import available_cpus
from pipeline.store import Store

ATTENDING, BASE = ("din", "hstu"), "sum"


@dataclass(frozen=True)
class Job:
    """One log, of ``seed``, on which every block is trained; ``more``: overrides of all of them."""

    seed: int
    blocks: tuple[str, ...]
    rows: int
    epochs: int
    more: tuple[str, ...]


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--first-seed", type=int, default=11, help="lower ones are for choosing settings")
    options.add_argument("--rows", type=int, default=300_000, help="of a log, a fifth of them to test on")
    options.add_argument("--epochs", type=int, default=5)
    options.add_argument("--attending", nargs="+", default=list(ATTENDING), help="blocks that the ratio is of")
    options.add_argument("--beside", nargs="*", default=[BASE], help="further blocks")
    options.add_argument("--jobs", type=int, default=available_cpus(), help="processes at a time")
    options.add_argument("--set", nargs="*", default=[], help="overrides of every run's configuration")
    given = options.parse_args()
    began, blocks = time.monotonic(), (*given.attending, *given.beside)
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    jobs = [Job(seed, blocks, given.rows, given.epochs, tuple(given.set)) for seed in seeds]
    gains: dict[str, list[float]] = {block: [] for block in blocks}
    with processes(given.jobs, runs_each=1) as pool:
        for job, scores in zip(jobs, pool.map(run_job, jobs), strict=True):
            print(f"seed {job.seed}: " + ", ".join(f"{name} {gain:.4f}" for name, gain in scores.items()), flush=True)
            for name, gain in scores.items():
                gains[name].append(gain)
    means = {name: statistics.fmean(each) for name, each in gains.items()}
    print(f"\n{'block':<10}{'mean gain':>10}{'smallest':>10}{'largest':>10}")
    for name, each in gains.items():
        print(f"{name:<10}{means[name]:>10.4f}{min(each):>10.4f}{max(each):>10.4f}", flush=True)
    finish(
        "sequences",
        min(means[name] for name in given.attending),
        seconds=time.monotonic() - began,
        seeds=given.seeds,
        rows=given.rows,
        gains={name: [round(means[name], 4), round(min(each), 4)] for name, each in gains.items()},
    )


def run_job(job: Job) -> dict[str, float]:
    """The share of the reachable gain that each block has, by its name."""
    with tempfile.TemporaryDirectory() as folder:
        return {block: _gain(block, job, f"{folder}/store") for block in job.blocks}


def settings_of(block: str, rows: int, epochs: int, seed: int, store: str) -> list[str]:
    """The overrides of a run."""
    return [
        "data=synthetic_users",
        f"data.synthetic.rows={rows}",
        f"data.synthetic.users={rows // 50}",
        "run=q",
        f"store={store}",
        f"seed={seed}",
        f"+model.sequences.history.block={block}",
        "model.embedding_dim=32",
        "model.top_mlp=[64,32]",
        "train.global_batch=512",
        f"train.epochs={epochs}",
        "train.lr=0.004",
        "train.sparse_lr=0.1",
        "train.threads_per_rank=1",
        "train.precision=fp32",
        "train.log_every_steps=1000",
        "train.guard.collapse=false",
    ]


def _gain(block: str, job: Job, store: str) -> float:
    artifacts = run([*settings_of(block, job.rows, job.epochs, job.seed, store), *job.more])
    figures = Store(store).read_json(f"{artifacts['evaluate'].path}/metrics.json")
    return float((1 - figures["ne"]) / (1 - figures["bayes_ne"]))


if __name__ == "__main__":
    main()
