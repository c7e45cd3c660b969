"""Ensembles from one training: a snapshot at the end of every cycle, and what the next one begins with.

Cyclic learning rates: Huang et al., "Snapshot Ensembles: Train 1, get M for free" (ICLR'17). Directed perturbation and
a choice by validation rows: Saphal et al., SEERL (arXiv 2001.05209). Snapshots are checkpoints of the training, exact
to the bit; the last one is its last checkpoint. What a cycle begins with is a function of seed and step, so a resumed
training has the snapshots of the uninterrupted one.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from pipeline.checkpoint.collectives import all_gather_records
from pipeline.checkpoint.index import name_of
from pipeline.config.train import PERTURB, RESET, TrainConfig
from pipeline.core.errors import ConfigError
from pipeline.embeddings.table_training import set_table_steps
from pipeline.evaluation.metrics import compute_ne, fill_weights, sigmoid
from pipeline.training.early_stopping import StoppingDecision
from pipeline.training.model import build
from pipeline.training.parquet import SplitReader
from pipeline.training.predict import main_logits, score_published
from pipeline.training.settings import ModelSettings
from pipeline.training.step import StepExecutor
from pipeline.training.validation import ValidatedTraining, Validation

# The state of Adam, AdamW and LAMB that holds the direction of the last steps.
MOMENT = "exp_avg"
# The seeds of two cycles are this far apart.
_STRIDE = 1_000_003
# Weight of the pull of fitted weights towards equal ones, in rows.
RIDGE_ROWS = 1000
_NEWTON_STEPS = 20
Floats = NDArray[np.floating]
log = logging.getLogger(__name__)


def cycle_steps(count: int, total: int) -> int:
    """Return the steps of a cycle. The last of ``count`` cycles may be shorter; ConfigError if it would be empty."""
    steps = -(-total // count)
    # Cycles are rounded up, so training may end before the last one begins.
    if (count - 1) * steps >= total:
        raise ConfigError(
            f"train.snapshots.count is {count}, but {total:,} planned steps cannot be cut into as many equal cycles",
            hint=f"train.snapshots.count={max(1, int(total**0.5))}, or more train.epochs",
        )
    return steps


@dataclass(frozen=True)
class Start:
    """Builds untrained models. ``logits``: the initial values of the last biases (None: zero)."""

    settings: ModelSettings
    split: SplitReader
    logits: list[float] | None

    @torch.no_grad()
    def put(self, executor: StepExecutor, number: int) -> None:
        """Give ``executor`` the initial values of cycle ``number``, and optimizers that have taken no step."""
        seed = self.settings.seed + _STRIDE * number
        # Build on the CPU whatever the training runs on, so that initial values depend on the seed alone.
        fresh = build(replace(self.settings, seed=seed), self.split.schema, torch.device("cpu"), trained=False)
        if self.logits is not None:
            fresh.head.start_at(self.logits)
        values = dict(fresh.named_parameters())
        for name, parameter in executor.dense.items():
            parameter.copy_(values[name])
        executor.rows.initialise(seed)
        optimizer = executor.optimizers.dense
        optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})
        set_table_steps(executor.model, 0)


@torch.no_grad()
def perturb(dense: dict[str, Tensor], optimizer: torch.optim.Optimizer, share: float, seed: int) -> None:
    """Move each of the ``dense`` parameters by ``share`` of its norm on in the direction of its last steps.

    If the optimizer keeps no moving average of gradients, the direction is random, by ``seed``.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in dense.values():
        if not parameter.requires_grad:
            continue
        moment = optimizer.state.get(parameter, {}).get(MOMENT)
        # A moment of zeros has no direction, and its norm of 0 would be divided by.
        if moment is None or not bool(moment.any()):
            moment = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        parameter.sub_(moment * (share * parameter.norm() / moment.norm()))


class Snapshots(Validation):
    """Validates a training that makes an ensemble: once, at the end of each cycle.

    It stops nothing and lowers no rates. A cycle of kind reset begins with an untrained model, or with the checkpoint
    that the training started from. All methods are collective.
    """

    turned_off_by = "train.snapshots.count=1"

    def __init__(self, training: ValidatedTraining) -> None:
        config = training.settings.train
        # Set no patience: a cycle that starts over is worse than the one before, which must not stop the training. The
        # schedule's cycle is that of the snapshots, which ``begin`` sets.
        plain = replace(config, validate=replace(config.validate, patience=None, cycle_epochs=None))
        super().__init__(replace(training, settings=replace(training.settings, train=plain)))
        self._snapshots, self._init = config.snapshots, training.init
        self._start = Start(training.settings, training.train_split, training.start_logits)
        # This is a placeholder until ``begin`` knows the planned steps.
        self._cycle = 1

    @staticmethod
    def applies(config: TrainConfig) -> bool:
        """Return whether ``train.snapshots`` asks for more than one model."""
        return config.snapshots.active

    def begin(self, total: int, *, warm: bool) -> int:
        """Begin like ``Validation.begin``; a training that resumed at the end of a cycle begins the next one."""
        self._cycle = self._executor.optimizers.schedule.cycle = cycle_steps(self._snapshots.count, total)
        total, step = super().begin(total, warm=warm), self._executor.steps
        self._checkpoints.retained = []
        for number in range(1, self._snapshots.count + 1):
            end = min(number * self._cycle, total)
            if end <= step:
                self._checkpoints.retained.append(name_of(end))
        if step and step < total and step % self._cycle == 0:
            # The earlier process wrote this cycle's snapshot, but ended before it began the next cycle.
            self._restart()
        elif self._snapshots.kind == RESET:
            # ``resume`` has set the steps of the whole training, but these tables began with their cycle.
            age = 0
            if step:
                age = self.age(step)
            set_table_steps(self._executor.model, age)
        return total

    def due(self, step: int, total: int) -> bool:
        """Return whether a cycle ends with ``step`` of ``total``."""
        return step == total or step % self._cycle == 0

    def next_look(self, step: int, total: int) -> int:
        """Return the end of the cycle of the step after ``step``."""
        return min(total, (step // self._cycle + 1) * self._cycle)

    def age(self, step: int) -> int:
        """Return the steps that the model after ``step`` has taken since it was last reset."""
        if self._snapshots.kind != RESET:
            return step
        return (step - 1) % self._cycle + 1

    def validate(self, train_ne: float | None) -> StoppingDecision:
        """Look at the weights of now, which are a snapshot whatever their figures are."""
        super().validate(train_ne)
        self._checkpoints.retained = [*(self._checkpoints.retained or ()), name_of(self._executor.steps)]
        self.decision = StoppingDecision.KEEP
        return self.decision

    def act_on_validation(self, total: int) -> bool:
        """Take a snapshot and begin the next cycle; that of the last cycle is the last checkpoint."""
        if self._executor.steps == total:
            return False
        self._checkpoints.save(publishable=True)
        self._restart()
        return True

    def _restart(self) -> None:
        executor, number = self._executor, self._executor.steps // self._cycle
        if self._snapshots.kind == PERTURB:
            seed = self._start.settings.seed + number
            perturb(dict(executor.dense), executor.optimizers.dense, self._snapshots.perturbation, seed)
        elif self._snapshots.kind == RESET:
            self._start.put(executor, number)
            if self._init is not None:
                self._checkpoints.start_from(self._init)
            # The next checkpoint must hold every row, and the guards must not see figures from before.
            self._checkpoints.checkpointer.model.touched.fill()
            self._checkpoints.metrics.begin_anew()
        if dist.get_rank() == 0:
            log.info("cycle %d of %d begins: %s", number + 1, self._snapshots.count, self._snapshots.kind)

    def result(self) -> dict[str, Any]:
        """Return ``ensemble`` of the training's figures: the snapshots that became members, and their cost."""
        began, paths = time.perf_counter(), self._checkpoints.retained_paths()
        scores = []
        for path in paths:
            self._checkpoints.load(path)
            logits = score_published(self._executor, self._split, self._order)
            scores.append(None if logits is None else main_logits(logits))
        chosen = None
        if dist.get_rank() == 0:
            chosen = self._choose_members(paths, scores)
        record: dict[str, Any] = all_gather_records(chosen)[0]
        record["seconds"] = time.perf_counter() - began
        if dist.get_rank() == 0:
            log.info(
                "ensemble: %d of %d snapshots, validation NE %.5f together, %.5f the best one alone",
                len(record["members"]),
                len(paths),
                record["ne"],
                record["best_ne"],
            )
        return {"ensemble": record}

    def _choose_members(self, paths: list[str], scores: list[Any]) -> dict[str, Any]:
        config, logits, labels, weights = self._snapshots, np.stack(scores), self._labels, self._weights
        keep = min(config.keep, len(paths))
        single_ne = [compute_ne(scored, labels, weights) for scored in logits]
        last = list(range(len(paths)))[-keep:]
        members = last
        if config.choose != "last":
            # Sort the members by their steps instead of the order in which they were chosen.
            members = sorted(choose(logits, labels, weights, keep))
        chosen = logits[members]
        shares = np.full(keep, 1.0 / keep)
        if config.weights == "fitted":
            shares = fitted_weights(chosen, labels, weights)
        described = []
        for member, share in zip(members, shares, strict=True):
            described.append({"checkpoint": paths[member], "weight": float(share), "ne": single_ne[member]})
        return {
            "members": described,
            "made": len(paths),
            "kind": config.kind,
            "ne": compute_ne(shares @ chosen, labels, weights),
            "best_ne": min(single_ne),
            "last_ne": compute_ne(logits[last].mean(axis=0), labels, weights),
        }


# An ensemble's logit is the weighted sum of its members' logits. NE of the mean falls with the members' own NE and with
# their distance from each other, so choosing by it selects good and diverse members (SEERL, section 3.3).
def choose(logits: Floats, labels: Floats, weights: Floats | None, keep: int) -> list[int]:
    """Return the places of ``keep`` of the models with ``logits`` [m, n], each the best next addition to the mean.

    Each one gives the smallest NE of the mean of those chosen; of equal ones the newest is taken.
    """
    chosen: list[int] = []
    total = np.zeros(logits.shape[1])
    # Start with the newest model, since ``min`` takes the first of equal ones.
    left = list(reversed(range(len(logits))))
    while left and len(chosen) < keep:
        best = min(left, key=lambda at: compute_ne((total + logits[at]) / (len(chosen) + 1), labels, weights))
        total += logits[best]
        chosen.append(best)
        left.remove(best)
    return chosen


def fitted_weights(logits: Floats, labels: Floats, weights: Floats | None = None) -> NDArray[np.float64]:
    """Return the weights [m] of members with ``logits`` [m, n], by logistic regression with a ridge.

    The mean of logits is nearer to the base rate than each of its members, so the weights may add up to more than 1.
    The ridge draws them towards 1 / m. The loss is convex and minimised by Newton's method.
    """
    rows, counted = logits.astype(np.float64), fill_weights(labels, weights)
    counted = counted / counted.sum()
    equal, ridge = np.full(len(rows), 1.0 / len(rows)), RIDGE_ROWS / rows.shape[1]
    fitted = equal.copy()
    for _ in range(_NEWTON_STEPS):
        chance = sigmoid(fitted @ rows)
        slope = rows @ ((chance - labels) * counted) + ridge * (fitted - equal)
        bend = (rows * (chance * (1 - chance) * counted)) @ rows.T + ridge * np.eye(len(rows))
        step = np.linalg.solve(bend, slope)
        fitted -= step
        if np.abs(step).max() < 1e-12:
            break
    return fitted
