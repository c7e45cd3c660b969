"""Scores the validation rows while a model trains, and acts on the result.

A look scores the rows with the weights that would be published. The best weights are in a checkpoint of this training,
exact to the bit: training goes back to it on a plateau, and ends with it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch.distributed as dist

from pipeline.checkpoint.collectives import all_gather_records, run_on_all_ranks
from pipeline.config.train import TrainConfig
from pipeline.core.errors import ConfigError, DataError, GuardError
from pipeline.core.registry import VALIDATIONS, load_hooks
from pipeline.evaluation.bootstrap import loss_parts
from pipeline.evaluation.metrics import evaluate
from pipeline.records.dataset import LABEL, VALIDATION
from pipeline.store.manifest import Artifact
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.early_stopping import Stopping, StoppingDecision, ValidationResult, is_due, looks_after
from pipeline.training.guards import GuardFigures
from pipeline.training.parquet import SplitReader
from pipeline.training.predict import main_logits, score_published
from pipeline.training.sampler import Order
from pipeline.training.settings import TrainingSettings
from pipeline.training.step import StepExecutor

_FIGURES = ("ne", "auc", "logloss")
log = logging.getLogger(__name__)


def validation_split(train: SplitReader, config: TrainConfig) -> SplitReader | None:
    """Open the validation rows of the dataset of ``train``; None without such a split. DataError if it is empty."""
    if VALIDATION not in train.schema.rows:
        # Without validation rows nothing stops a training of several epochs early.
        if config.epochs > 1 and dist.get_rank() == 0:
            log.info(
                "train.epochs=%d without validation rows: the weights of the last step are published. "
                "data.split.validation_share=0.1 keeps the best ones, and stops when they get no better",
                config.epochs,
            )
        return None
    split = SplitReader(train.store, train.dataset, VALIDATION)
    if not split.rows:
        raise DataError(
            f"dataset {train.dataset.path} has no {VALIDATION} rows", hint="data.split.validation_share=<larger>"
        )
    return split


@dataclass(frozen=True)
class ValidatedTraining:
    """A training that validates, as an argument of ``Validation``.

    Args:
        settings: The settings; ``settings.train.validate`` says when there is a look and what it decides.
        train_split: The train rows.
        split: The validation rows.
        order: The order of the training's batches.
        executor: The executor, which has the model.
        checkpoints: The checkpoints of this training; the best weights are one of them.
        start_logits: Initial values of the last biases of a new model; None: zero.
        init: The checkpoint that the training starts from; None: there is none.
    """

    settings: TrainingSettings
    train_split: SplitReader
    split: SplitReader
    order: Order
    executor: StepExecutor
    checkpoints: Checkpoints
    start_logits: list[float] | None
    init: Artifact | None


def build_validation(training: ValidatedTraining) -> Validation:
    """Build the validation of a training: the plugin's that ``applies`` to the settings, or ``Validation``.

    Raises:
        ConfigError: Several plugins apply.
    """
    kinds: dict[str, type[Validation]] = {}
    for name, kind in load_hooks(VALIDATIONS).items():
        if kind.applies(training.settings.train):
            kinds[name] = kind
    if len(kinds) > 1:
        without = []
        for name, kind in kinds.items():
            without.append(kind.turned_off_by or f"uninstall the package that adds {name}")
        raise ConfigError(
            f"{' and '.join(kinds)} of {VALIDATIONS} apply to this training, expected one: each looks at the "
            "validation rows in its own way",
            hint=", or ".join(without),
        )
    for kind in kinds.values():
        return kind(training)
    return Validation(training)


class Validation:
    """Validates one training. All methods are collective.

    Plugins of group ``nightjar.validations`` are subclasses whose ``applies`` decides for which trainings they are
    used.

    Args:
        training: The training to validate.

    Attributes:
        turned_off_by: The override that makes ``applies`` false; "" where there is none.
        seconds: The time that looks took in this run.
        decision: The decision of the newest look.
    """

    turned_off_by: ClassVar[str] = ""

    def __init__(self, training: ValidatedTraining) -> None:
        self._config = training.settings.train.validate
        self._split, self._order = training.split, training.order
        self._executor, self._checkpoints = training.executor, training.checkpoints
        self._steps_per_epoch = training.order.steps_per_epoch(training.train_split.rows)
        # Rank 0 gets all scores and computes the figures.
        self._labels, self._weights = np.empty(0, np.float32), None
        if dist.get_rank() == 0:
            self._labels, self._weights = self._split.column(LABEL), self._split.row_weights()
        run_on_all_ranks("checking the validation rows", self._check_labels)
        self.stopping = self._checkpoints.stopping = Stopping(self._config)
        cycle = None
        if self._config.cycle_epochs is not None:
            cycle = self._config.cycle_epochs * self._steps_per_epoch
        self._executor.optimizers.schedule.cycle = cycle
        self.seconds = 0.0
        self.decision: StoppingDecision | None = None
        # The standard deviation of the logits at the newest look.
        self._logit_std: float | None = None

    @staticmethod
    def applies(config: TrainConfig) -> bool:
        """Whether a training by ``config`` validates in this way."""
        return True

    def _check_labels(self) -> None:
        # Rows that allow no figures must be an error before the first step, and not at the first look.
        if dist.get_rank() != 0:
            return
        counted, weighted = self._labels, ""
        if self._weights is not None:
            counted = self._labels[self._weights > 0]
            weighted = f" and {len(counted):,} with a weight above 0"
        clicks = int((counted == 1).sum())
        if clicks in (0, len(counted)):
            raise DataError(
                f"dataset {self._split.dataset.path} has {self._split.rows:,} {VALIDATION} rows{weighted}, {clicks:,} "
                "of them clicks, expected both classes: NE and AUC are not defined for one class only",
                hint="data.split.validation_share=<larger>, or data.split.validation_hours=<more>",
            )

    def due(self, step: int, total: int) -> bool:
        """Whether there is a look after ``step`` of ``total``."""
        return is_due(self._config, step, self._steps_per_epoch, total)

    def next_look(self, step: int, total: int) -> int:
        """Return the next step after ``step`` with a look."""
        return next(looks_after(self._config, step, self._steps_per_epoch, total))

    def begin(self, total: int, *, warm: bool) -> int:
        """Begin or continue with ``total`` planned steps; return their number, which an earlier run may have cut.

        ``warm``: the training starts from a checkpoint of another one. That model is scored and shown, but it is never
        the best one.
        """
        if warm and not self._executor.steps:
            self.stopping.start = look = self._evaluate(train_ne=None)
            if dist.get_rank() == 0:
                log.info("validation rows before training: NE %.5f, AUC %.5f", look.ne, look.auc)
        return self._executor.steps if self.stopping.stopped else total

    def validate(self, train_ne: float | None) -> StoppingDecision:
        """Score the present weights and decide. ``train_ne`` is that of the last steps' rows."""
        self.decision = self.stopping.decide(self._evaluate(train_ne))
        return self.decision

    def act_on_validation(self, total: int) -> bool:
        """Act on the newest look and return whether that took a checkpoint of this step.

        ``total``: the last step, which may be this one.
        """
        ended = self._executor.steps == total
        if self.decision is StoppingDecision.BETTER:
            # If the weights of the last step are the best, the last checkpoint has them, so none is taken here.
            if not ended:
                self._checkpoints.save(best=True)
            return not ended
        if ended:
            self.end(total)
            return False
        if self.decision is not StoppingDecision.LOWER:
            return False
        self._checkpoints.go_back()
        # Set the scale after ``go_back``, which restores rows and optimizers but not the schedule. A resumed training
        # computes it again from the number of drops.
        self._executor.optimizers.schedule.scale = self.stopping.lr_scale
        best = self.stopping.best
        if dist.get_rank() == 0 and best is not None:
            log.info(
                "no better look at the validation rows since step %s: training goes on from the weights of that "
                "step, with %g times the scheduled learning rates",
                f"{best.step:,}",
                self.stopping.lr_scale,
            )
        return False

    def end(self, step: int) -> None:
        """Go back to the best weights, with which training ends.

        The last checkpoint then has them and that of the best look may go, so a longer training goes back to the last
        one.
        """
        self._checkpoints.go_back()
        self.stopping.kept = step
        best = self.stopping.best
        if dist.get_rank() == 0 and best is not None:
            why = "stopped by the validation rows" if self.stopping.stopped else "at its end"
            log.info(
                "training %s after step %s: it ends with the weights of step %s, validation NE %.5f, AUC %.5f",
                why,
                f"{step:,}",
                f"{best.step:,}",
                best.ne,
                best.auc,
            )
            average = self._executor.published_average
            if average is not None and best.step < average.first:
                log.warning(
                    "these weights are no average: train.average starts with step %s of the planned ones; "
                    "train.average.start=0 starts at once",
                    f"{average.first:,}",
                )

    def end_early(self, step: int, train_ne: float | None) -> None:
        """End a training resumed at its last ``step`` with the best weights, after scoring the present ones."""
        looks, best = self.stopping.looks, self.stopping.best
        # A look that the checkpoint holds is not repeated, since it would count twice towards the patience.
        if looks and looks[-1].step == step and best is not None:
            better = best.step == step
        else:
            better = self.validate(train_ne) is StoppingDecision.BETTER
        if not better:
            self.end(step)

    def age(self, step: int) -> int:
        """Return the steps that the model after ``step`` has taken since its initial values."""
        return step

    def result(self) -> dict[str, Any]:
        """Return what the training's figures have besides ``summary``."""
        return {}

    def judged(self) -> GuardFigures:
        """Return how the model does after this step, at no cost if it has just been scored."""
        looks = self.stopping.looks
        rows = f"{self._split.rows:,} {VALIDATION} rows"
        # Checkpoints keep looks but not the spread of their logits, so a resumed training scores the rows again.
        if looks and looks[-1].step == self._executor.steps and self._logit_std is not None:
            return GuardFigures(looks[-1].ne, self._logit_std, rows)
        figures = self._measure()
        return GuardFigures(figures["ne"], figures["logit_std"], rows)

    def _evaluate(self, train_ne: float | None) -> ValidationResult:
        figures = self._measure()
        self._logit_std = figures["logit_std"]
        return ValidationResult(
            self._executor.steps, figures["ne"], figures["auc"], figures["logloss"], train_ne, figures["parts"]
        )

    def _measure(self) -> dict[str, Any]:
        # Returns the figures of all validation rows, bitwise equal on all ranks. GuardError: a score is not finite.
        began, step = time.perf_counter(), self._executor.steps
        logits = score_published(self._executor, self._split, self._order)
        measured: dict[str, Any] | None = None
        # The figures stay None if rank 0 has a score that is not finite: if it raised here, the other ranks would wait
        # in the exchange below.
        if logits is not None and np.isfinite(logits).all():
            # The figures are those of the main task, which is the one monitored.
            main = main_logits(logits)
            parts = loss_parts(self._labels, main, self._weights)
            measured = {**evaluate(self._labels, main, weights=self._weights)}
            measured |= {"parts": parts, "logit_std": float(main.std())}
        figures: dict[str, Any] | None = all_gather_records(measured)[0]
        if figures is None:
            raise GuardError(
                f"scores of validation rows are not finite after step {step:,}",
                hint="lower train.lr and train.sparse_lr, or train.precision=fp32",
            )
        self.seconds += time.perf_counter() - began
        return figures

    def record(self) -> dict[str, Any]:
        """Return what an interval's record has about the look that ends it."""
        look, best = self.stopping.looks[-1], self.stopping.best
        figures = {f"validation_{name}": getattr(look, name) for name in _FIGURES}
        if best is not None:
            figures |= {"best_step": best.step, "best_ne": best.ne}
        return figures

    def summary(self) -> dict[str, Any]:
        """Return ``validation`` of the training's figures."""
        stopping, best, start = self.stopping, self.stopping.best, self.stopping.start
        figures: dict[str, Any] = {
            "rows": self._split.rows,
            "looks": len(stopping.looks),
            "monitor": self._config.monitor,
            "stopped": stopping.stopped,
            "lr_drops": stopping.drops,
            "seconds": self.seconds,
        }
        if best is not None:
            figures |= {"best_step": best.step, "best_epoch": best.step / self._steps_per_epoch}
            figures |= {name: getattr(best, name) for name in (*_FIGURES, "parts")}
        if start is not None:
            figures |= {"start_ne": start.ne, "start_auc": start.auc}
        return figures
