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
import logging
import tempfile
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import ttest_rel

from benchmarks.ari import adjusted_rand_index
from benchmarks.common import finish
from benchmarks.runs import run_config
from pipeline.config import Config
from pipeline.config.compose import compose
from pipeline.ingest.ground_truth import planted_blocks
from pipeline.records import Towers
from pipeline.specs.stage import StageIO
from pipeline.stages.execution import run_stage
from pipeline.stages.stage_inputs import read_dataset
from pipeline.stages.steps import steps
from pipeline.store import Artifact, Store
from pipeline.towers.interaction_strength import Interaction
from pipeline.towers.partitioner import partition
from pipeline.training import probe as probing
from pipeline.training.config_settings import select_training_settings

SILENT = StageIO()


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=10)
    options.add_argument("--first", type=int, default=1, help="the first seed")
    options.add_argument("--blocks", type=int, default=4, help="planted blocks, and towers")
    options.add_argument("--rows", type=int, default=450_000, help="rows of each log, a fifth of them to test on")
    options.add_argument("--probe-steps", type=int, default=400)
    options.add_argument("--imbalance", type=float, default=0.1, help="partition.imbalance; the default is its own")
    options.add_argument("--no-train", action="store_true", help="only the adjusted Rand index")
    options.add_argument("--signed", action="store_true", help="the paper's measure too, by a probe of its own")
    given = options.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    began, found = time.monotonic(), []
    for seed in range(given.first, given.first + given.seeds):
        with tempfile.TemporaryDirectory() as folder:
            found.append(_seed(given, seed, Store(folder)))
        print(f"seed {seed}: {', '.join(f'{k} {v:.4f}' for k, v in found[-1].items())}", flush=True)
    figures = {name: [one[name] for one in found] for name in found[0]}
    summary: dict[str, Any] = {"ari_mean": float(np.mean(figures["ari"])), "seconds": time.monotonic() - began}
    if given.signed:
        summary["ari_signed_mean"] = float(np.mean(figures["ari_signed"]))
    if not given.no_train:
        test = ttest_rel(figures["ne_coherent"], figures["ne_strided"], alternative="less")
        gain = 1 - np.array(figures["ne_coherent"]) / np.array(figures["ne_strided"])
        summary |= {
            "ne_gain_mean": float(gain.mean()),
            "p_one_sided": float(test.pvalue),
            "wins": int((gain > 0).sum()),
        }
    finish("towers_partition", min(figures["ari"]), seeds=given.seeds, blocks=given.blocks, **summary)


def config_of(given: argparse.Namespace, seed: int, store: Store, strategy: str) -> Config:
    """One host whose ranks hold all towers: what leaves a tower is the same as on as many hosts."""
    return compose(
        [
            "data=synthetic",
            "partition=dmt",
            f"seed={seed}",
            f"store={store.url}",
            f"run={strategy}",
            f"data.synthetic.rows={given.rows}",
            f"data.synthetic.blocks={given.blocks}",
            "data.synthetic.days=1",
            "data.synthetic.ids_per_feature=30",
            "data.synthetic.zipf=0.5",
            "data.synthetic.pairwise_effect=2.0",
            "data.synthetic.first_order_effect=0.5",
            "data.synthetic.dense_effect=0.5",
            f"partition.towers={given.blocks}",
            f"partition.strategy={strategy}",
            f"partition.probe_steps={given.probe_steps}",
            f"partition.imbalance={given.imbalance}",
            "partition.module=dlrm",
            "partition.c=0",
            "partition.p=2",
            "model.embedding_dim=16",
            "model.bottom_mlp=[64]",
            "model.top_mlp=[128,64]",
            "train.global_batch=1024",
            "train.sparse_lr=0.2",
            "train.threads_per_rank=1",
            "train.warmup_steps=20",
            "train.schedule=constant",
            "train.epochs=1",
            "train.precision=fp32",
            "train.log_every_steps=200",
            "train.guard.collapse=false",
        ]
    )


def _seed(given: argparse.Namespace, seed: int, store: Store) -> dict[str, float]:
    """The figures of one log."""
    config = config_of(given, seed, store, "coherent")
    made = {step.name: step for step in steps(config, store)}
    for name in ("ingest", "plan", "partition"):
        run_stage(made[name], config, store, SILENT)
    towers = Towers.from_json(store.read_json(f"{made['partition'].path}/towers.json"))
    figures = {"ari": _ari(config, [tower.features for tower in towers.towers])}
    if given.signed:
        figures["ari_signed"] = _signed(config, store, store.get(made["ingest"].path, "ingest"))
    if not given.no_train:
        for strategy in ("coherent", "strided"):
            figures[f"ne_{strategy}"] = test_ne(config_of(given, seed, store, strategy))
    return figures


def _ari(config: Config, towers: Sequence[Sequence[str]]) -> float:
    """Adjusted Rand index of the features' towers and their planted blocks."""
    homes = [
        {name: number for number, names in enumerate(groups) for name in names}
        for groups in (towers, planted_blocks(config.data.synthetic, config.seed))
    ]
    found, truth = ([home[name] for name in sorted(homes[0])] for home in homes)
    return adjusted_rand_index(np.array(found), np.array(truth))


def _signed(config: Config, store: Store, dataset: Artifact) -> float:
    """The adjusted Rand index by the paper's measure."""
    schema, _ = read_dataset(store, dataset)
    features = [column.name for column in schema.sparse]
    signed = Interaction(len(features), signed=True)
    _, source = probing.probe(select_training_settings(config), store, dataset, None, also=signed)
    towers, _ = partition(features, config.partition.towers, config.partition, signed.matrix(), {}, source=source)
    return _ari(config, towers)


def test_ne(config: Config) -> float:
    """Test NE of the whole chain, run in this process."""
    return float(run_config(config)["evaluate"].summary["ne"])


if __name__ == "__main__":
    main()
