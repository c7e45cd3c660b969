"""``make bench-quality``: test NE of trainings that restore from quantised checkpoints, against one that never does.

Every training sees the same rows in the same order from the same initial values. One of ``r`` restores is told to
expect them, so the rule picks the bits; after every ``1 / (r + 1)`` of its steps it takes a checkpoint by the default
policy and goes on from what that checkpoint holds. Any tiny change of a value moves a training's NE, up as often
as down (``nudged``: one that is never restored either, its dense weights changed by a millionth); so the change by
restores is the mean over ``--seeds`` (initial values, order of the rows), with its standard error. ``ratio``: 1 + the
largest mean change, so over 1 where quality is lost.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.checkpoint import checkpointer
from benchmarks.harness import finish, options, show, silent, standard_error
from benchmarks.models_and_rows import config_of, generate, logits_of, trainer_of
from pipeline.checkpoint.quantise import bits_for_restores
from pipeline.checkpoint.train_state import TrainState
from pipeline.config import CheckpointConfig
from pipeline.evaluation.metrics import evaluate
from pipeline.store import Artifact, Store
from pipeline.training.batches import BatchReader
from pipeline.training.parquet import SplitReader
from pipeline.training.sampler import Order


def main() -> None:
    given = options(
        __doc__,
        rows=(3_276_800, "train rows; a fifth of them more to test on"),
        restores=[1, 3, 20, 100],
        hot=(CheckpointConfig.hot_share, "checkpoint.hot_share"),
        quantise=(CheckpointConfig.quantise, "checkpoint.quantise"),
        state=(CheckpointConfig.state, "checkpoint.state"),
        seeds=[1, 2, 3],
    )
    silent()
    coding = {"hot_share": given.hot, "quantise": given.quantise, "state": given.state}
    changes: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        print(f"generating {given.rows * 6 // 5:,} rows ...", flush=True)
        dataset = generate(store, given.rows, given.rows // 5)
        for seed in given.seeds:
            never = train(store, dataset, 0, coding, seed)
            nes = {"nudged": train(store, dataset, 0, coding, seed, nudge=1e-6)}
            nes |= {str(count): train(store, dataset, count, coding, seed) for count in given.restores}
            show(f"seed {seed}", {"never restored": never} | nes, ".6f")
            for name, ne in nes.items():
                changes.setdefault(name, []).append(ne / never - 1)
    figures: dict[str, Any] = {"steps": given.rows // 8192, "seeds": len(given.seeds)}
    figures |= {"bits": {str(count): bits_for_restores(count) for count in given.restores}}
    figures["nudged"] = changes.pop("nudged")
    mean = {name: float(np.mean(each)) for name, each in changes.items()}
    for name, each in changes.items():
        figures |= {f"change_{name}": mean[name], f"error_{name}": standard_error(each)}
    finish("quality", 1 + max(mean.values()), **figures)


def train(
    store: Store, dataset: Artifact, restores: int, coding: dict[str, Any], seed: int, nudge: float = 0.0
) -> float:
    """Test NE of one training with so many restores."""
    config, split = replace(config_of(), seed=seed), SplitReader(store, dataset, "train")
    trainer = trainer_of(config, split.schema)
    with torch.no_grad():
        for parameter in trainer.dense.values():
            parameter.mul_(1 + nudge)
    saver = checkpointer(store, f"quality-{restores}-{seed}", trainer, expected_restores=restores, **coding)
    steps = split.rows // config.train.global_batch
    stops = {round(steps * (i + 1) / (restores + 1)) for i in range(restores)}
    with BatchReader(split, Order(key=dataset.key, seed=seed, global_batch=config.train.global_batch)) as reader:
        for step in range(1, steps + 1):
            trainer.step(reader)
            if step in stops:
                saver.save(TrainState(step=step), wait=True)
                saver.resume()
    saver.model.touched.detach()
    test = SplitReader(store, dataset, "test")
    return float(evaluate(np.asarray(test.column("label")), logits_of(trainer.finished(), test))["ne"])


if __name__ == "__main__":
    main()
