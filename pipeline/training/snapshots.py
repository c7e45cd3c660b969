"""Ensembles from one training: a snapshot at the end of every cycle, and what the next one begins with.

Cyclic learning rates: Huang et al., "Snapshot Ensembles: Train 1, get M for free" (ICLR'17). Directed perturbation and
a choice by validation rows: Saphal et al., SEERL (arXiv 2001.05209). Snapshots are checkpoints of the training, exact
to the bit; the last one is its last checkpoint. What a cycle begins with is a function of seed and step, so a resumed
training has the snapshots of the uninterrupted one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.checkpoint.collectives import all_gather_records
from pipeline.checkpoint.index import name_of
from pipeline.config.train import PERTURB, RESET, TrainConfig
from pipeline.embeddings.fused_optimizer import set_table_steps
from pipeline.errors import ConfigError
from pipeline.evaluation.ensemble_members import choose, fitted_weights, ne_of
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.early_stopping import StoppingDecision
from pipeline.training.model import build
from pipeline.training.parquet import SplitReader
from pipeline.training.predict import main_logits
from pipeline.training.sampler import Order
from pipeline.training.settings import ModelSettings
from pipeline.training.trainer import Trainer
from pipeline.training.validation import Validation

MOMENT = "exp_avg"  # where the state of Adam, AdamW and LAMB has the direction of the last steps
_STRIDE = 1_000_003  # between the seeds of cycles
log = logging.getLogger(__name__)


def cycle_steps(count: int, total: int) -> int:
    """Steps of a cycle, of which the last of ``count`` may lack some of ``total``; ConfigError where it has none."""
    steps = -(-total // count)
    if (count - 1) * steps >= total:
        raise ConfigError(
            f"train.snapshots.count is {count}, but {total:,} planned steps cannot be cut into as many equal cycles",
            hint=f"train.snapshots.count={max(1, int(total**0.5))}, or more train.epochs",
        )
    return steps


@dataclass(frozen=True)
class Start:
    """What an untrained model is built from: ``logits`` that its last biases begin at (None: zero)."""

    settings: ModelSettings
    split: SplitReader
    logits: list[float] | None

    @torch.no_grad()
    def put(self, trainer: Trainer, number: int) -> None:
        """Give ``trainer`` the initial values of cycle ``number``, and optimizers that have taken no step."""
        seed = self.settings.seed + _STRIDE * number
        fresh = build(replace(self.settings, seed=seed), self.split.schema, torch.device("cpu"), trained=False)
        if self.logits is not None:
            fresh.head.start_at(self.logits)
        values = dict(fresh.named_parameters())
        for name, parameter in trainer.dense.items():
            parameter.copy_(values[name])
        trainer.rows.initialise(seed)
        optimizer = trainer.optimizers.dense
        optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})
        set_table_steps(trainer.model, 0)


@torch.no_grad()
def perturb(dense: dict[str, Tensor], optimizer: torch.optim.Optimizer, share: float, seed: int) -> None:
    """Move each of the ``dense`` parameters by ``share`` of its norm on in the direction of its last steps.

    Where the optimizer keeps no moving average of gradients, the direction is random, by ``seed``.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in (each for each in dense.values() if each.requires_grad):
        moment = optimizer.state.get(parameter, {}).get(MOMENT)
        if moment is None or not bool(moment.any()):
            moment = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        parameter.sub_(moment * (share * parameter.norm() / moment.norm()))


class Snapshots(Validation):
    """The looks at the validation rows of a training that makes an ensemble: one at the end of each cycle.

    They stop nothing and lower no rates. ``start``: what a cycle of kind reset begins with, and then ``warm``, which
    puts the checkpoint that the training started from in place (None: from none). All methods are collective.
    """

    def __init__(
        self,
        config: TrainConfig,
        split: SplitReader,
        order: Order,
        trainer: Trainer,
        checkpointing: Checkpoints,
        per_epoch: int,
        start: Start,
        warm: Callable[[], None] | None,
    ) -> None:
        plain = replace(config, validate=replace(config.validate, patience=None, cycle_epochs=None))
        super().__init__(plain, split, order, trainer, checkpointing, per_epoch)
        self._wanted, self._initial, self._warm = config.snapshots, start, warm
        self._cycle = 1

    def begin(self, total: int, *, warm: bool) -> int:
        """As ``Validation.begin``; a training that was resumed at the end of a cycle begins the next one."""
        self._cycle = self._trainer.optimizers.cycle = cycle_steps(self._wanted.count, total)
        total, step = super().begin(total, warm=warm), self._trainer.steps
        ends = (min(number * self._cycle, total) for number in range(1, self._wanted.count + 1))
        self._checkpointing.snapshots = [name_of(end) for end in ends if end <= step]
        if step and step < total and step % self._cycle == 0:
            self.restart()
        elif self._wanted.kind == RESET:
            set_table_steps(self._trainer.model, self.age(step) if step else 0)
        return total

    def due(self, step: int, total: int) -> bool:
        """Whether a cycle ends with ``step`` of ``total``."""
        return step == total or step % self._cycle == 0

    def next_look(self, step: int, total: int) -> int:
        """The end of the cycle of the step after ``step``."""
        return min(total, (step // self._cycle + 1) * self._cycle)

    def age(self, step: int) -> int:
        """Steps that the model after ``step`` has taken since it began anew."""
        return (step - 1) % self._cycle + 1 if self._wanted.kind == RESET else step

    def validate(self, train_ne: float | None) -> StoppingDecision:
        """Look at the weights of now, which are a snapshot whatever their figures are."""
        super().validate(train_ne)
        self._checkpointing.snapshots = [*(self._checkpointing.snapshots or ()), name_of(self._trainer.steps)]
        return StoppingDecision.SNAPSHOT

    def restart(self) -> None:
        """Begin the next cycle."""
        trainer, number = self._trainer, self._trainer.steps // self._cycle
        if self._wanted.kind == PERTURB:
            seed = self._initial.settings.seed + number
            perturb(dict(trainer.dense), trainer.optimizers.dense, self._wanted.perturbation, seed)
        elif self._wanted.kind == RESET:
            self._initial.put(trainer, number)
            if self._warm is not None:
                self._warm()
            self._checkpointing.changed_without_lookups()
        if dist.get_rank() == 0:
            log.info("cycle %d of %d begins: %s", number + 1, self._wanted.count, self._wanted.kind)

    def result(self) -> dict[str, Any]:
        """``ensemble`` of the training's figures: the snapshots that became members, and their cost to find."""
        began, paths = time.perf_counter(), self._checkpointing.snapshot_paths()
        scores = [self._scores_of(path) for path in paths]
        record = all_gather_records(self._chosen(paths, scores) if dist.get_rank() == 0 else None)[0]
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

    def _scores_of(self, path: str) -> np.ndarray | None:
        """Logits that the snapshot at ``path`` gives the validation rows; None but on rank 0."""
        self._checkpointing.load(path)
        logits = self._scores()
        return None if logits is None else main_logits(logits)

    def _chosen(self, paths: list[str], scores: list[Any]) -> dict[str, Any]:
        logits, labels, weights = np.stack(scores), self._labels, self._weights
        keep, alone = min(self._wanted.keep, len(paths)), [ne_of(each, labels, weights) for each in logits]
        last = list(range(len(paths)))[-keep:]
        members = last if self._wanted.choose == "last" else sorted(choose(logits, labels, weights, keep))
        chosen = logits[members]
        shares = np.full(keep, 1.0 / keep)
        if self._wanted.weights == "fitted":
            shares = fitted_weights(chosen, labels, weights)
        return {
            "members": [
                {"checkpoint": paths[at], "weight": float(share), "ne": alone[at]}
                for at, share in zip(members, shares, strict=True)
            ],
            "made": len(paths),
            "kind": self._wanted.kind,
            "ne": ne_of(shares @ chosen, labels, weights),
            "best_ne": min(alone),
            "last_ne": ne_of(logits[last].mean(axis=0), labels, weights),
        }
