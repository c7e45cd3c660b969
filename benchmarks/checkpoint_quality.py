"""``make bench-quality``: test NE of trainings that restore from quantised checkpoints, against one that never does.

Every training sees the same rows in the same order from the same initial values. One of ``r`` restores is told to
expect them, so the rule picks the bits; after every ``1 / (r + 1)`` of its steps it takes a checkpoint by the default
policy and goes on from what that checkpoint holds. ``ratio``: the largest NE by that of the training left alone.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from typing import Any

import numpy as np
import torch

from benchmarks.clicks import config_of, generate, plan_of
from benchmarks.common import finish
from pipeline.artifacts import Artifact, Store
from pipeline.checkpoint import Checkpointer, Model, TrainState
from pipeline.checkpoint.quantise import bits_for_restores
from pipeline.config import CheckpointConfig
from pipeline.embeddings import TouchedRows
from pipeline.evaluation.metrics import evaluate
from pipeline.training import BatchReader, Order, SplitReader, Trainer
from pipeline.training.distributed import connect

RESTORES = (1, 3, 20, 100)


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=3_276_800, help="train rows; a fifth of them more to test on")
    options.add_argument("--restores", type=int, nargs="*", default=RESTORES)
    options.add_argument("--hot", type=float, default=0.1, help="checkpoint.hot_share")
    given = options.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        print(f"generating {given.rows * 6 // 5:,} rows ...", flush=True)
        dataset = generate(store, given.rows, given.rows // 5)
        never = _train(store, dataset, 0, given.hot)
        print(f"never restored: NE {never:.6f}", flush=True)
        found: dict[str, Any] = {"ne_never": never, "steps": given.rows // 8192}
        for restores in given.restores:
            ne = _train(store, dataset, restores, given.hot)
            found[f"change_{restores}"] = ne / never - 1
            print(
                f"{restores} restores, {bits_for_restores(restores)} bit: NE {ne:.6f}, {ne / never - 1:+.4%}",
                flush=True,
            )
    worst = max(found[f"change_{restores}"] for restores in given.restores)
    finish("quality", 1 + worst, **found, bits={str(r): bits_for_restores(r) for r in given.restores})


def _train(store: Store, dataset: Artifact, restores: int, hot: float) -> float:
    """Test NE of one training with so many restores."""
    config = config_of()
    device = connect(config)
    split = SplitReader(store, dataset, "train")
    trainer = Trainer(config, split.schema, plan_of(split.schema), device)
    saver = _saver(store, trainer, restores, hot)
    steps = split.rows // config.train.global_batch
    stops = {round(steps * (i + 1) / (restores + 1)) for i in range(restores)}
    order = Order(key=dataset.key, seed=1, global_batch=config.train.global_batch)
    with BatchReader(split, order) as reader:
        batches = iter(reader)
        for step in range(1, steps + 1):
            trainer.step(batches)
            if step in stops:
                saver.save(TrainState(step=step), wait=True)
                saver.resume()
    saver.model.touched.detach()
    return _ne(trainer.finished(), SplitReader(store, dataset, "test"))


def _saver(store: Store, trainer: Trainer, restores: int, hot: float) -> Checkpointer:
    settings = CheckpointConfig(expected_restores=restores, hot_share=hot)
    model = Model(trainer.rows, TouchedRows(trainer.model), dict(trainer.dense), trainer.optimizers.dense)
    return Checkpointer(store, f"quality-{restores}", settings, model, "bench", {}, {}, print)


@torch.no_grad()
def _ne(model: torch.nn.Module, split: SplitReader) -> float:
    with BatchReader(split, Order(key="test", seed=0, global_batch=8192, shuffle=False)) as reader:
        logits = torch.cat([model(batch)[1][0].float() for batch in reader]).numpy()[: split.rows]
    labels = np.asarray(split.column("label"))
    return float(evaluate(labels, logits)["ne"])


if __name__ == "__main__":
    main()
