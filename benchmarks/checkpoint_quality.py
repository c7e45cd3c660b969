"""``make bench-quality``: test NE of trainings that restore from quantised checkpoints, against one that never does.

Every training sees the same rows in the same order from the same initial values. One of ``r`` restores is told to
expect them, so the rule picks the bits; after every ``1 / (r + 1)`` of its steps it takes a checkpoint by the default
policy and goes on from what that checkpoint holds. Any tiny change of a value moves a training's NE, up as often
as down (``nudged``: one that is never restored either, its dense weights changed by a millionth); so the change by
restores is the mean over ``--seeds`` (initial values, order of the rows), with its standard error. ``ratio``: 1 + the
largest mean change, so over 1 where quality is lost.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.clicks import config_of, generate, plan_of
from benchmarks.common import finish
from pipeline.checkpoint.checkpointer import CheckpointedModel, Checkpointer
from pipeline.checkpoint.quantise import bits_for_restores
from pipeline.checkpoint.train_state import TrainState
from pipeline.config import CheckpointConfig
from pipeline.embeddings.touched import TouchedRows
from pipeline.evaluation.metrics import evaluate
from pipeline.store import Artifact, Store
from pipeline.training.batches import BatchReader
from pipeline.training.config_settings import select_model_settings
from pipeline.training.distributed import connect
from pipeline.training.parquet import SplitReader
from pipeline.training.sampler import Order
from pipeline.training.step import StepExecutor

RESTORES = (1, 3, 20, 100)


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=3_276_800, help="train rows; a fifth of them more to test on")
    options.add_argument("--restores", type=int, nargs="*", default=RESTORES)
    options.add_argument("--hot", type=float, default=CheckpointConfig.hot_share, help="checkpoint.hot_share")
    options.add_argument("--quantise", default=CheckpointConfig.quantise, help="checkpoint.quantise")
    options.add_argument("--state", default=CheckpointConfig.state, help="checkpoint.state")
    options.add_argument("--seeds", type=int, nargs="*", default=(1, 2, 3))
    given = options.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        print(f"generating {given.rows * 6 // 5:,} rows ...", flush=True)
        dataset = generate(store, given.rows, given.rows // 5)
        coding = {"hot_share": given.hot, "quantise": given.quantise, "state": given.state}
        changes = np.array([_changes(store, dataset, given.restores, coding, seed) for seed in given.seeds])
    nudged, changes = changes[:, 0], changes[:, 1:]
    bits = {str(restores): bits_for_restores(restores) for restores in given.restores}
    figures: dict[str, Any] = {"steps": given.rows // 8192, "seeds": len(given.seeds), "bits": bits}
    figures["nudged"] = nudged.tolist()
    for restores, column in zip(given.restores, changes.T, strict=True):
        figures[f"change_{restores}"] = column.mean()
        figures[f"error_{restores}"] = column.std(ddof=1) / len(column) ** 0.5 if len(column) > 1 else None
    finish("quality", 1 + changes.mean(axis=0).max(), **figures)


def _changes(
    store: Store, dataset: Artifact, restores: Sequence[int], coding: dict[str, Any], seed: int
) -> list[float]:
    """Relative change of the test NE by a nudge, then by each number of restores."""
    never = _train(store, dataset, 0, coding, seed)
    changes = [_train(store, dataset, 0, coding, seed, nudge=1e-6) / never - 1]
    print(f"seed {seed}: never restored: NE {never:.6f}, nudged {changes[0]:+.4%}", flush=True)
    for count in restores:
        ne = _train(store, dataset, count, coding, seed)
        changes.append(ne / never - 1)
        bits = bits_for_restores(count)
        print(f"seed {seed}: {count} restores, {bits} bit: NE {ne:.6f}, {changes[-1]:+.4%}", flush=True)
    return changes


def _train(
    store: Store, dataset: Artifact, restores: int, coding: dict[str, Any], seed: int, nudge: float = 0.0
) -> float:
    """Test NE of one training with so many restores."""
    config = replace(config_of(), seed=seed)
    device = connect(config.hardware, config.train.threads_per_rank)
    split = SplitReader(store, dataset, "train")
    trainer = StepExecutor(select_model_settings(config), split.schema, plan_of(split.schema), device)
    with torch.no_grad():
        for parameter in trainer.dense.values():
            parameter.mul_(1 + nudge)
    saver = _saver(store, trainer, restores, coding, seed)
    steps = split.rows // config.train.global_batch
    stops = {round(steps * (i + 1) / (restores + 1)) for i in range(restores)}
    order = Order(key=dataset.key, seed=seed, global_batch=config.train.global_batch)
    with BatchReader(split, order) as reader:
        batches = iter(reader)
        for step in range(1, steps + 1):
            trainer.step(batches)
            if step in stops:
                saver.save(TrainState(step=step), wait=True)
                saver.resume()
    saver.model.touched.detach()
    return _ne(trainer.finished(), SplitReader(store, dataset, "test"))


def _saver(store: Store, trainer: StepExecutor, restores: int, coding: dict[str, Any], seed: int) -> Checkpointer:
    settings = CheckpointConfig(expected_restores=restores, **coding)
    model = CheckpointedModel(trainer.rows, TouchedRows(trainer.model), dict(trainer.dense), trainer.optimizers.dense)
    return Checkpointer(store, f"quality-{restores}-{seed}", settings, model, "bench", {}, {})


@torch.no_grad()
def _ne(model: torch.nn.Module, split: SplitReader) -> float:
    with BatchReader(split, Order(key="test", seed=0, global_batch=8192, shuffle=False)) as reader:
        logits = torch.cat([model(batch)[1][0].float() for batch in reader]).numpy()[: split.rows]
    labels = np.asarray(split.column("label"))
    return float(evaluate(labels, logits)["ne"])


if __name__ == "__main__":
    main()
