"""``make bench-partition``: does the partitioner find planted feature blocks, and are its towers the better ones.

For every seed a synthetic log whose features interact within blocks only is ingested, and the partition stage assigns
its features. ``ari``: adjusted Rand index of the towers and the blocks; with ``--signed`` also ``ari_signed``, the same
from |mean cosine| of the embeddings as they are, which is what the paper describes. Then, unless ``--no-train``, the
model is trained with these towers and with strided ones, compressed alike by the dlrm tower module (c=0), and
``ne_gain`` is the relative difference of test NE, held against none by a one-sided paired t-test over the seeds.
``ratio``: the lowest ``ari``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.harness import finish, options, p_lower, run_config, show, silent, test_ne, words
from pipeline.config import Config
from pipeline.config.compose import compose
from pipeline.ingest.ground_truth import planted_blocks
from pipeline.records import Towers
from pipeline.stages.stage_inputs import read_dataset
from pipeline.store import Store
from pipeline.towers.interaction_strength import Interaction
from pipeline.towers.partitioner import partition
from pipeline.training import probe as probing
from pipeline.training.config_settings import select_training_settings


def main() -> None:
    given = options(
        __doc__,
        seeds=10,
        first=(1, "the first seed"),
        blocks=(4, "planted blocks, and towers"),
        rows=(450_000, "rows of each log, a fifth of them to test on"),
        probe_steps=400,
        imbalance=(0.1, "partition.imbalance; the default is its own"),
        no_train=(False, "only the adjusted Rand index"),
        signed=(False, "the paper's measure too, by a probe of its own"),
    )
    silent()
    began, found = time.monotonic(), []
    for seed in range(given.first, given.first + given.seeds):
        found.append(run_seed(given, seed))
        show(f"seed {seed}", found[-1], ".4f")
    figures = {name: np.array([one[name] for one in found]) for name in found[0]}
    summary: dict[str, Any] = {"ari_mean": float(figures["ari"].mean()), "seconds": time.monotonic() - began}
    if given.signed:
        summary["ari_signed_mean"] = float(figures["ari_signed"].mean())
    if not given.no_train:
        coherent, strided = figures["ne_coherent"], figures["ne_strided"]
        gain = 1 - coherent / strided
        summary |= {"ne_gain_mean": float(gain.mean()), "p_one_sided": p_lower(coherent, strided)}
        summary["wins"] = int((gain > 0).sum())
    finish("towers_partition", float(figures["ari"].min()), seeds=given.seeds, blocks=given.blocks, **summary)


def run_seed(given: argparse.Namespace, seed: int) -> dict[str, float]:
    """The figures of one log."""
    # One host whose ranks hold all towers: what leaves a tower is the same as on as many hosts.
    world = words(f"""data=synthetic partition=dmt seed={seed} data.synthetic.rows={given.rows}
        data.synthetic.blocks={given.blocks} data.synthetic.days=1 data.synthetic.ids_per_feature=30
        data.synthetic.zipf=0.5 data.synthetic.pairwise_effect=2.0 data.synthetic.first_order_effect=0.5
        data.synthetic.dense_effect=0.5 partition.towers={given.blocks} partition.probe_steps={given.probe_steps}
        partition.imbalance={given.imbalance} partition.module=dlrm partition.c=0 partition.p=2 model.embedding_dim=16
        model.bottom_mlp=[64] model.top_mlp=[128,64] train.global_batch=1024 train.sparse_lr=0.2
        train.threads_per_rank=1 train.warmup_steps=20 train.schedule=constant train.epochs=1 train.precision=fp32
        train.log_every_steps=200 train.guard.collapse=false""")
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            strategy: [*world, f"store={folder}", f"run={strategy}", f"partition.strategy={strategy}"]
            for strategy in ("coherent", "strided")
        }
        config, store = compose(settings["coherent"]), Store(folder)
        made = run_config(config, last="partition")
        towers = Towers.from_json(store.read_json(f"{made['partition'].path}/towers.json"))
        figures = {"ari": _ari(config, [tower.features for tower in towers.towers])}
        if given.signed:
            schema, _ = read_dataset(store, made["ingest"])
            features = [column.name for column in schema.sparse]
            signed = Interaction(len(features), signed=True)
            _, source = probing.probe(select_training_settings(config), store, made["ingest"], None, also=signed)
            groups, _ = partition(features, given.blocks, config.partition, signed.matrix(), {}, source=source)
            figures["ari_signed"] = _ari(config, groups)
        if not given.no_train:
            figures |= {f"ne_{strategy}": test_ne(overrides) for strategy, overrides in settings.items()}
    return figures


def _ari(config: Config, towers: Sequence[Sequence[str]]) -> float:
    """Adjusted Rand index of the features' towers and their planted blocks."""
    homes = [
        {name: number for number, names in enumerate(groups) for name in names}
        for groups in (towers, planted_blocks(config.data.synthetic, config.seed))
    ]
    found, truth = ([home[name] for name in sorted(homes[0])] for home in homes)
    return adjusted_rand_index(np.array(found), np.array(truth))


def adjusted_rand_index(left: np.ndarray, right: np.ndarray) -> float:
    """1 for the same clusters whatever their numbers, 0 on average for unrelated ones.

    Of two clusterings, counted pair by pair (Hubert and Arabie 1985).
    """
    upper = np.triu_indices(len(left), 1)
    same_left = (left[:, None] == left)[upper]
    same_right = (right[:, None] == right)[upper]
    both, pairs = np.sum(same_left & same_right), len(upper[0])
    expected = same_left.sum() * same_right.sum() / pairs
    most = (same_left.sum() + same_right.sum()) / 2
    return 1.0 if most == expected else float((both - expected) / (most - expected))


if __name__ == "__main__":
    main()
