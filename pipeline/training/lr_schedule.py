"""The learning rates over a training: a linear warm-up, then constant or falling to the last planned step.

The rates of the dense part and of the tables are their settings times a factor that depends on the step alone, so a
resumed run on any number of ranks has the rates of the uninterrupted one.

With validation rows a schedule that falls restarts after every ``train.validate.cycle_epochs``, and a warm-up of
``auto`` is then a tenth of that cycle: ``Validation`` sets ``LRSchedule.cycle``, and lowers ``LRSchedule.scale`` at a
plateau. A resumed training takes no rate from its checkpoint, only the step and that scale.

``Optimizers.set_step`` sets the rates before each step: of the dense part by parameter group (``train.dense_groups``),
of the tables by kernel (``model.tables.<table>.lr``). Nothing scales them with the batch or the ranks, because the loss
is a mean over the global batch: who changes ``train.global_batch`` sets the rates anew.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

from pipeline.config.fields import AUTO
from pipeline.config.train import TrainConfig
from pipeline.core.units import plural

log = logging.getLogger(__name__)
# A training with fewer steps gets a warning.
FEWEST_STEPS = 100
# The longest warm-up in steps where ``train.warmup_steps`` is auto.
LONGEST_WARM_UP = 1000


@dataclass
class LRSchedule:
    """The learning rates of all steps, as factors of ``train.lr`` and ``train.sparse_lr``.

    Args:
        train: The settings of the schedule.
        total: Steps planned; the schedule ends with the last one.
        cycle: Steps after which the schedule restarts, see ``cycled``; None: never. Validations and snapshots set it.
        scale: The factor of all learning rates. A validation lowers it, and a resumed training restores it.
    """

    train: TrainConfig
    total: int
    cycle: int | None = None
    scale: float = 1.0

    def factor(self, step: int) -> float:
        """Return the factor in ``step`` (from 0)."""
        return cycled(self.train, step, self.total, self.cycle) * self.scale


def planned_steps(train: TrainConfig, rows: int) -> int:
    """Return the steps of a training on ``rows`` rows: its epochs, each with a short last batch, or ``max_steps``.

    ``stages.execution.with_resolved_batch`` has put a number in the place of ``train.global_batch=auto`` by now.
    """
    steps = train.epochs * -(-rows // train.batch)
    if train.max_steps is None:
        return steps
    return min(steps, train.max_steps)


def log_planned(train: TrainConfig, rows: int, cycle: int | None = None) -> None:
    """Log the number of planned steps, as a warning where they are too few or all of them are warm-up.

    ``cycle``: see ``cycled``.
    """
    total = planned_steps(train, rows)
    rising = warmup_steps(train, first_cycle(train, total, cycle))
    text = f"{plural(total, 'step')} of {train.batch:,} samples planned, warm-up of {plural(rising, 'step')}"
    if total < FEWEST_STEPS:
        hint = f"train.epochs={-(-FEWEST_STEPS // max(1, total)) * train.epochs}, or a smaller train.global_batch"
        log.warning("%s; a model barely learns in fewer than %d steps: %s", text, FEWEST_STEPS, hint)
    elif total <= rising:
        log.warning("%s; the learning rates never reach their full value: train.warmup_steps=auto", text)
    else:
        log.info("%s", text)


def warmup_steps(train: TrainConfig, total: int) -> int:
    """Return the warm-up steps of a training or cycle of ``total`` steps; ``auto``: a tenth of them, at most 1,000."""
    if isinstance(train.warmup_steps, int):
        return train.warmup_steps
    return min(LONGEST_WARM_UP, total // 10)


def first_cycle(train: TrainConfig, total: int, cycle: int | None) -> int:
    """Return the steps of the schedule's first cycle in a training of ``total`` steps; ``cycle``: see ``cycled``."""
    # A constant schedule has no cycles: it rises once and stays.
    if cycle is None or train.schedule == "constant":
        return total
    return min(cycle, total)


def cycled(train: TrainConfig, step: int, total: int, cycle: int | None) -> float:
    """Return ``lr_factor`` with a restart every ``cycle`` steps (warm restarts, SGDR); None: without restarts.

    The warm-up of every cycle but the first takes a tenth of the cycle: ``warmup_steps`` is for a training's start.
    """
    if cycle is None or train.schedule == "constant":
        return lr_factor(train, step, total)
    number, place = divmod(step, cycle)
    if number:
        train = replace(train, warmup_steps=AUTO)
    # The last cycle may be shorter than the others, and still falls to its own end.
    return lr_factor(train, place, min(cycle, total - number * cycle))


def lr_factor(train: TrainConfig, step: int, total: int) -> float:
    """Return the factor of both learning rates in ``step`` (from 0) of ``total``.

    The warm-up rises to 1 in its last step, and the factor stays there until the last ``decay_ratio`` of the steps that
    are left. In those ``train.schedule`` falls, either linearly or by half a cosine (SGDR, Loshchilov and Hutter 2017,
    one cycle), and reaches ``min_lr_factor`` in the last step. A ratio below 1 is warm-up, stable, decay (Hu et al.
    2024, section 4).

    The setting ``train.validate.lr_factor`` is something else: it lowers ``LRSchedule.scale``.
    """
    rising = warmup_steps(train, total)
    # The first step with a factor of 1: the last one of the warm-up, or step 0 without a warm-up.
    peak = max(1, rising) - 1
    if step < peak:
        return (step + 1) / rising
    if train.schedule == "constant" or total - 1 <= peak:
        return 1.0
    steps, ratio = total - 1 - peak, train.decay_ratio
    done = min(1.0, max(0.0, (step - peak - (1.0 - ratio) * steps) / (ratio * steps)))
    left = 1.0 - done
    if train.schedule != "linear":
        left = (1.0 + math.cos(math.pi * done)) / 2
    return train.min_lr_factor + (1.0 - train.min_lr_factor) * left
