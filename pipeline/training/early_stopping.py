"""What validations decide: which weights are the best, when the rates are lowered, and when training stops.

Decisions depend only on the figures, which are the same on all ranks. The state is plain data in every checkpoint, so a
resumed training decides the same. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from pipeline.config.train import ValidateConfig

# The number of validations in an epoch with ``train.validate.every_steps=auto``.
LOOKS_PER_EPOCH = 4


class StoppingDecision(Enum):
    """What follows from a validation. LOWER and STOP restore the best weights; KEEP says these may be published too."""

    BETTER = "better"
    WORSE = "worse"
    LOWER = "lower"
    STOP = "stop"
    KEEP = "keep"


@dataclass(frozen=True)
class ValidationResult:
    """The figures of the validation rows after ``step``.

    ``train_ne`` is the NE of the last steps' rows, None where unknown. ``parts`` are those of the log loss, by
    blocks of rows; only the best look keeps them.
    """

    step: int
    ne: float
    auc: float
    logloss: float
    train_ne: float | None = None
    parts: list[float] | None = None


@dataclass
class Stopping:
    """The looks (validations) so far, and what they decide.

    ``since`` counts looks since the best one, or since the rates were lowered; ``drops`` counts how often they were.
    ``start`` is the look before the first step of a warm-started training, which is no candidate for the best. ``kept``
    is the step whose checkpoint has the best weights: the best look's, or the end of a training made longer since.
    """

    config: ValidateConfig
    looks: list[ValidationResult] = field(default_factory=list)
    best: ValidationResult | None = None
    since: int = 0
    drops: int = 0
    stopped: bool = False
    start: ValidationResult | None = None
    kept: int | None = None

    @property
    def lr_scale(self) -> float:
        """The factor of both learning rates."""
        return self.config.lr_factor**self.drops

    def decide(self, look: ValidationResult) -> StoppingDecision:
        """Take in the validation ``look`` and return what follows from it."""
        # Drop the parts of the loss: there are many of them, and this state is in every checkpoint.
        self.looks.append(replace(look, parts=None))
        if self.best is None or self._is_better(look, self.best):
            self.best, self.since, self.kept = look, 0, look.step
            return StoppingDecision.BETTER
        self.since += 1
        if self.config.patience is None or self.since < self.config.patience:
            return StoppingDecision.WORSE
        if self.drops < self.config.lr_drops:
            self.drops, self.since = self.drops + 1, 0
            return StoppingDecision.LOWER
        self.stopped = True
        return StoppingDecision.STOP

    def _is_better(self, look: ValidationResult, best: ValidationResult) -> bool:
        gain = best.ne - look.ne if self.config.monitor == "ne" else look.auc - best.auc
        return gain > self.config.min_delta

    def state(self) -> dict[str, Any]:
        """Return the state as plain data; ``load`` takes it back."""
        best = start = None
        if self.best is not None:
            best = asdict(self.best)
        if self.start is not None:
            start = asdict(self.start)
        return {
            "looks": [asdict(look) for look in self.looks],
            "best": best,
            "start": start,
            "since": self.since,
            "drops": self.drops,
            "stopped": self.stopped,
            "kept": self.kept,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue with the looks of an earlier run; ``state`` is empty for one without looks."""
        if not state:
            return
        self.looks = [ValidationResult(**look) for look in state["looks"]]
        self.best, self.start = None, None
        kept: int | None = None
        if state["best"]:
            self.best = ValidationResult(**state["best"])
            kept = self.best.step
        if state["start"]:
            self.start = ValidationResult(**state["start"])
        self.since, self.drops, self.stopped = state["since"], state["drops"], state["stopped"]
        # Checkpoints of earlier releases have no such key: their best weights were always those of the best look.
        self.kept = state.get("kept", kept)


def is_due(config: ValidateConfig, step: int, per_epoch: int, total: int) -> bool:
    """Whether a training of ``total`` steps validates after ``step`` (from 1)."""
    # The last step is always validated, since its weights may be the best ones.
    if step == total:
        return True
    if isinstance(config.every_steps, int):
        return step % config.every_steps == 0
    # A look is due where the step crosses a quarter of its epoch, which need not be a whole number of steps.
    place = (step - 1) % per_epoch + 1
    return place * LOOKS_PER_EPOCH // per_epoch > (place - 1) * LOOKS_PER_EPOCH // per_epoch


def looks_after(config: ValidateConfig, step: int, per_epoch: int, total: int) -> Iterator[int]:
    """Yield the steps after ``step`` that have a look."""
    return (each for each in range(step + 1, total + 1) if is_due(config, each, per_epoch, total))
