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

import statistics
import tempfile
import time

from benchmarks.harness import PLAIN, SET, finish, options, processes, run, show, words
from pipeline.core.cpus import available_cpus
from pipeline.store import Store


def main() -> None:
    given = options(
        __doc__,
        seeds=5,
        first_seed=(11, "lower ones are for choosing settings"),
        rows=(300_000, "of a log, a fifth of them to test on"),
        epochs=5,
        attending=(["din", "hstu"], "blocks that the ratio is of", {"nargs": "+"}),
        beside=(["sum"], "further blocks"),
        jobs=(available_cpus(), "processes at a time"),
        set=SET,
    )
    began, blocks = time.monotonic(), (*given.attending, *given.beside)
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    jobs = [(seed, blocks, given.rows, given.epochs, given.set) for seed in seeds]
    gains: dict[str, list[float]] = {block: [] for block in blocks}
    with processes(given.jobs, runs_each=1) as pool:
        for seed, scores in zip(seeds, pool.map(gains_of, *zip(*jobs, strict=True)), strict=True):
            show(f"seed {seed}", scores, ".4f")
            for name, gain in scores.items():
                gains[name].append(gain)
    mean = {name: statistics.fmean(each) for name, each in gains.items()}
    for name, each in gains.items():
        show(name, {"mean gain": mean[name], "smallest": min(each), "largest": max(each)}, ".4f")
    finish(
        "sequences",
        min(mean[name] for name in given.attending),
        seconds=time.monotonic() - began,
        seeds=given.seeds,
        rows=given.rows,
        gains={name: [round(mean[name], 4), round(min(each), 4)] for name, each in gains.items()},
    )


def gains_of(seed: int, blocks: tuple[str, ...], rows: int, epochs: int, more: list[str]) -> dict[str, float]:
    """The share of the reachable gain that each block has, trained on the log of ``seed``."""
    gains = {}
    with tempfile.TemporaryDirectory() as folder:
        world = words(f"""data=synthetic_users data.synthetic.rows={rows} data.synthetic.users={rows // 50} run=q
            store={folder}/store seed={seed} model.embedding_dim=32 model.top_mlp=[64,32] train.global_batch=512
            train.epochs={epochs} train.lr=0.004 train.sparse_lr=0.1""")
        for block in blocks:
            made = run([*world, *PLAIN, f"+model.sequences.history.block={block}", *more])
            figures = Store(f"{folder}/store").read_json(f"{made['evaluate'].path}/metrics.json")
            gains[block] = float((1 - figures["ne"]) / (1 - figures["bayes_ne"]))
    return gains


if __name__ == "__main__":
    main()
