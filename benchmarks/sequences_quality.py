"""``make bench-sequences``: what blocks of sequences learn where a click depends on the last similar item.

The logs are synthetic (``data=synthetic_users``): each user sees items of two categories, and the log odds of a click
are the effect of one earlier row, the last of the same user and category. Ingestion builds the histories from the log.
Ids, rows, ranking model and settings are the same for all blocks; a seed draws other logs, initial values and orders of
the rows. The true probabilities are known, so a block's NE says how much of the reachable gain it has: 1 minus NE, over
1 minus the NE of the truth. A sum of the events cannot tell the last one from those before it.

``ratio``: the smallest mean gain of the blocks that attend; ``gains``: of each block the mean, and its smallest over
the seeds.
"""

from __future__ import annotations

import argparse
import statistics
import time

from benchmarks.harness import PLAIN, finish, options, run, words
from benchmarks.studies import MACHINE, per_case
from pipeline.store import Store

ATTENDING, BESIDE = ("din", "hstu"), "sum"


def main() -> None:
    first = (11, "lower ones are for choosing settings")
    rows = (300_000, "of a log, a fifth of them to test on")
    given = options(__doc__, seeds=5, first_seed=first, rows=rows, epochs=5, **MACHINE)
    began = time.monotonic()
    found = per_case(gains_of, given, [(given.first_seed + seed,) for seed in range(given.seeds)])
    gains = {block: [each[block] for each in found] for block in (*ATTENDING, BESIDE)}
    mean = {block: statistics.fmean(each) for block, each in gains.items()}
    finish(
        "sequences",
        min(mean[block] for block in ATTENDING),
        seconds=time.monotonic() - began,
        seeds=given.seeds,
        rows=given.rows,
        gains={block: [round(mean[block], 4), round(min(each), 4)] for block, each in gains.items()},
    )


def gains_of(given: argparse.Namespace, folder: str, seed: int) -> dict[str, float]:
    """The share of the reachable gain that each block has, trained on the log of ``seed``."""
    gains, rows = {}, given.rows
    world = words(f"""data=synthetic_users data.synthetic.rows={rows} data.synthetic.users={rows // 50} run=q
        store={folder}/store seed={seed} model.embedding_dim=32 model.top_mlp=[64,32] train.global_batch=512
        train.epochs={given.epochs} train.lr=0.004 train.sparse_lr=0.1""")
    for block in (*ATTENDING, BESIDE):
        made = run([*world, *PLAIN, f"+model.sequences.history.block={block}", *given.set])
        figures = Store(f"{folder}/store").read_json(f"{made['evaluate'].path}/metrics.json")
        gains[block] = float((1 - figures["ne"]) / (1 - figures["bayes_ne"]))
    return gains


if __name__ == "__main__":
    main()
