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

from benchmarks.harness import finish, options, silent, standard_error
from benchmarks.models_and_rows import config_of, generate, plan_of
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
    nudged, changes = [], []
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        print(f"generating {given.rows * 6 // 5:,} rows ...", flush=True)
        dataset = generate(store, given.rows, given.rows // 5)
        for seed in given.seeds:
            never = train(store, dataset, 0, coding, seed)
            nudged.append(train(store, dataset, 0, coding, seed, nudge=1e-6) / never - 1)
            print(f"seed {seed}: never restored: NE {never:.6f}, nudged {nudged[-1]:+.4%}", flush=True)
            changes.append([])
            for count in given.restores:
                ne = train(store, dataset, count, coding, seed)
                changes[-1].append(ne / never - 1)
                what = f"{count} restores, {bits_for_restores(count)} bit"
                print(f"seed {seed}: {what}: NE {ne:.6f}, {changes[-1][-1]:+.4%}", flush=True)
    figures: dict[str, Any] = {"steps": given.rows // 8192, "seeds": len(given.seeds)}
    figures |= {"bits": {str(count): bits_for_restores(count) for count in given.restores}, "nudged": nudged}
    for count, column in zip(given.restores, np.array(changes).T, strict=True):
        figures |= {f"change_{count}": float(column.mean()), f"error_{count}": standard_error(column)}
    finish("quality", 1 + max(figures[f"change_{count}"] for count in given.restores), **figures)


def train(
    store: Store, dataset: Artifact, restores: int, coding: dict[str, Any], seed: int, nudge: float = 0.0
) -> float:
    """Test NE of one training with so many restores."""
    config = replace(config_of(), seed=seed)
    device = connect(config.hardware, config.train.threads_per_rank)
    split = SplitReader(store, dataset, "train")
    trainer = StepExecutor(select_model_settings(config), split.schema, plan_of(split.schema, config), device)
    with torch.no_grad():
        for parameter in trainer.dense.values():
            parameter.mul_(1 + nudge)
    settings = CheckpointConfig(expected_restores=restores, **coding)
    model = CheckpointedModel(trainer.rows, TouchedRows(trainer.model), dict(trainer.dense), trainer.optimizers.dense)
    saver = Checkpointer(store, f"quality-{restores}-{seed}", settings, model, "bench", {}, {})
    steps = split.rows // config.train.global_batch
    stops = {round(steps * (i + 1) / (restores + 1)) for i in range(restores)}
    with BatchReader(split, Order(key=dataset.key, seed=seed, global_batch=config.train.global_batch)) as reader:
        drawn = iter(reader)
        for step in range(1, steps + 1):
            trainer.step(drawn)
            if step in stops:
                saver.save(TrainState(step=step), wait=True)
                saver.resume()
    saver.model.touched.detach()
    test, finished = SplitReader(store, dataset, "test"), trainer.finished()
    order = Order(key="test", seed=0, global_batch=8192, shuffle=False)
    with torch.no_grad(), BatchReader(test, order) as reader:
        logits = torch.cat([finished(batch)[1][0].float() for batch in reader]).numpy()[: test.rows]
    return float(evaluate(np.asarray(test.column("label")), logits)["ne"])


if __name__ == "__main__":
    main()
