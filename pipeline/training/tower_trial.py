"""Trials of ``partition.auto``: what towers cost in quality after a short training, beside the flat model.

As the probe, a trial runs in one process, with tables cut to ``partition.probe_rows`` rows. All trials of a dataset
start from the same seed and take the same batches of the first epoch, then score the same held-out ones: the batches of
the train split that follow, on which no trial has trained. So their losses are paired row by row. Test rows stay
unseen, because a choice by them would flatter the model that is evaluated on them later.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.nn import functional

from pipeline.core.errors import GuardError
from pipeline.records.towers import Towers
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact
from pipeline.training.batches import BatchReader
from pipeline.training.distributed import connect
from pipeline.training.lr_schedule import warmup_steps
from pipeline.training.parquet import SplitReader
from pipeline.training.probe import cut_tables, fold_rows, one_process_plan, one_process_settings
from pipeline.training.sampler import Order, shuffle_key
from pipeline.training.settings import TrainingSettings
from pipeline.training.step import StepExecutor

# The most batches that are held out. Scoring takes a third of a step, so these add few seconds, and of batches of 4,096
# rows they are enough to tell differences of some hundredths of a per cent.
HELD_OUT = 64
# The share of an epoch's batches that is held out at most.
HELD_OUT_SHARE = 4
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TrialLength:
    """The ``steps`` of a trial, the ``held`` batches after them, and the ``batch`` of both."""

    steps: int
    held: int
    batch: int

    @property
    def text(self) -> str:
        """Return it as a report says it."""
        return (
            f"{self.steps:,} steps of {self.batch:,} rows, compared on the {self.held * self.batch:,} train rows that "
            "follow"
        )


@dataclass(frozen=True)
class HeldOutLosses:
    """The log ``losses`` of the held-out rows, float64 [n], and the ``weights`` of these rows."""

    losses: Floats
    weights: Floats

    @property
    def mean(self) -> float:
        """Return the mean loss of a row."""
        return float((self.weights * self.losses).sum() / self.weights.sum())


def trial_length(settings: TrainingSettings, rows: int) -> TrialLength:
    """Return how long trials on ``rows`` train rows are; 0 held-out batches if there are too few rows.

    They never begin a second epoch, in which the held-out rows would be trained on.
    """
    batch = one_process_settings(settings).train.batch
    whole = rows // batch
    held = min(HELD_OUT, whole // HELD_OUT_SHARE)
    return TrialLength(min(settings.partition.probe_steps, whole - held), held, batch)


def run_trial(
    settings: TrainingSettings, store: Store, dataset: Artifact, towers: Towers | None, length: TrialLength
) -> HeldOutLosses:
    """Train with ``towers``, None: the flat model, and return the losses of the held-out rows.

    Raises:
        GuardError: They are not finite.
    """
    trial, outside = _trial_settings(settings, length), dist.is_initialized()
    # A process group of a training or a test around the trial stays as it is.
    device = connect(trial.hardware, trial.train.threads_per_rank)
    losses, weights = list[Floats](), list[Floats]()
    try:
        split = SplitReader(store, dataset, "train")
        limit = trial.partition.probe_rows
        schema = cut_tables(split.schema, limit)
        plan = one_process_plan(schema, trial.model, length.batch)
        executor = StepExecutor(trial, schema, plan, device, _on_one_host(towers), total=length.steps)
        order = Order(key=shuffle_key(dataset), seed=trial.seed, global_batch=length.batch)
        with BatchReader(split, order) as reader:
            batches = fold_rows(reader, limit)
            # TorchRec's pipeline reads a batch ahead, which must not be one of those that are held out.
            trained = islice(batches, length.steps)
            for _ in range(length.steps):
                executor.step(trained)
            model = executor.finished()
            with torch.no_grad():
                for batch in islice(batches, length.held):
                    _, (logits, labels, row_weights) = model(batch.to(device))
                    if logits.ndim > 1:
                        # Further tasks do not count: NE is the main task's.
                        logits, labels = logits[:, 0], labels[:, 0]
                    lost = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
                    losses.append(lost.double().numpy())
                    weights.append(row_weights.double().numpy())
    finally:
        if not outside:
            dist.destroy_process_group()
    found = HeldOutLosses(np.concatenate(losses), np.concatenate(weights))
    if not np.isfinite(found.losses).all():
        raise GuardError(
            f"a trial of {length.steps:,} steps left losses that are not finite",
            hint=f"train.sparse_lr={settings.train.sparse_lr / 10:g}, or partition.auto=false",
        )
    return found


def ne_change(flat: HeldOutLosses, other: HeldOutLosses) -> tuple[float, float]:
    """Return the change of the NE from ``flat`` to ``other`` on the same rows in per cent, and its standard error.

    The entropy of the base rate is the same for both, so the ratio of NE is that of the mean losses. Its error is that
    of a ratio of two means of paired rows (the delta method).
    """
    weights = flat.weights
    ratio = other.mean / flat.mean
    residuals = weights * (other.losses - ratio * flat.losses)
    error = math.sqrt(float(np.square(residuals).sum())) / float(weights.sum()) / flat.mean
    return 100 * (ratio - 1), 100 * error


def _trial_settings(settings: TrainingSettings, length: TrialLength) -> TrainingSettings:
    alone = one_process_settings(settings)
    rising = min(warmup_steps(alone.train, length.steps), length.steps // 10)
    # Rates that fall to 0 lessen what two trainings of one model differ by, which rows cannot tell.
    train = dataclasses.replace(
        alone.train,
        max_steps=length.steps,
        warmup_steps=rising,
        schedule="linear",
        decay_ratio=1.0,
        min_lr_factor=0.0,
    )
    # One process exchanges nothing.
    partition = dataclasses.replace(alone.partition, exchange="fp32")
    return dataclasses.replace(alone, train=train, partition=partition)


def _on_one_host(towers: Towers | None) -> Towers | None:
    if towers is None:
        return None
    return dataclasses.replace(towers, towers=tuple(dataclasses.replace(each, hosts=(0,)) for each in towers.towers))
