"""``make bench-partition``: does the partitioner find planted feature blocks, and are its towers the better ones.

For every seed a synthetic log whose features interact within blocks only is ingested, and the partition stage assigns
its features. ``ari``: adjusted Rand index of the towers and the blocks. Then the model is trained with these towers and
with strided ones, compressed alike by the dlrm tower module (c=0), and ``ne_gain`` is the relative difference of test
NE, held against none by a one-sided paired t-test over the seeds. ``ratio``: the lowest ``ari``.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence

import numpy as np
from sklearn.metrics import adjusted_rand_score

from benchmarks.harness import finish, options, p_lower, run, show, words
from pipeline.config.compose import compose
from pipeline.ingest.ground_truth import planted_blocks
from pipeline.records import Towers
from pipeline.store import Store

BLOCKS = 4
# One host whose ranks hold all towers: what leaves a tower is the same as on as many hosts.
SETTINGS = words(f"""data=synthetic data.synthetic.blocks={BLOCKS} data.synthetic.days=1 data.synthetic.zipf=0.5
    data.synthetic.ids_per_feature=30 data.synthetic.pairwise_effect=2.0 data.synthetic.first_order_effect=0.5
    data.synthetic.dense_effect=0.5 partition=dmt partition.towers={BLOCKS} partition.module=dlrm partition.c=0
    partition.p=2 model.embedding_dim=16 model.bottom_mlp=[64] model.top_mlp=[128,64] train.global_batch=1024
    train.sparse_lr=0.2 train.threads_per_rank=1 train.warmup_steps=20 train.schedule=constant train.epochs=1
    train.precision=fp32 train.log_every_steps=200 train.guard.collapse=false""")


def main() -> None:
    given = options(__doc__, seeds=10, rows=(450_000, "rows of each log, a fifth of them to test on"), probe_steps=400)
    began, found = time.monotonic(), []
    for seed in range(1, 1 + given.seeds):
        with tempfile.TemporaryDirectory() as folder:
            world = [f"data.synthetic.rows={given.rows}", f"partition.probe_steps={given.probe_steps}"]
            found.append(run_seed(folder, seed, [*SETTINGS, *world]))
        show(f"seed {seed}", found[-1], ".4f")
    ari, coherent, strided = (np.array([one[name] for one in found]) for name in ("ari", "coherent", "strided"))
    gain = 1 - coherent / strided
    finish(
        "towers_partition",
        float(ari.min()),
        seeds=given.seeds,
        blocks=BLOCKS,
        ari_mean=float(ari.mean()),
        seconds=time.monotonic() - began,
        ne_gain_mean=float(gain.mean()),
        p_one_sided=p_lower(coherent.tolist(), strided.tolist()),
        wins=int((gain > 0).sum()),
    )


def run_seed(folder: str, seed: int, world: list[str]) -> dict[str, float]:
    """The agreement of one log's towers with its blocks, and the test NE by strategy."""
    figures = {}
    for strategy in ("coherent", "strided"):
        settings = [*world, f"seed={seed}", f"store={folder}", f"run={strategy}", f"partition.strategy={strategy}"]
        made = run(settings)
        figures[strategy] = float(made["evaluate"].summary["ne"])
        if strategy == "coherent":
            towers = Towers.from_json(Store(folder).read_json(f"{made['partition'].path}/towers.json"))
            blocks = planted_blocks(compose(settings).data.synthetic, seed)
            figures["ari"] = _ari([tower.features for tower in towers.towers], blocks)
    return figures


def _ari(towers: Sequence[Sequence[str]], blocks: Sequence[Sequence[str]]) -> float:
    """Adjusted Rand index of the features' towers and their planted blocks."""
    homes = [{name: number for number, names in enumerate(groups) for name in names} for groups in (towers, blocks)]
    found, truth = ([home[name] for name in sorted(homes[0])] for home in homes)
    return float(adjusted_rand_score(truth, found))


if __name__ == "__main__":
    main()
