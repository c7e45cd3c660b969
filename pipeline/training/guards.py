"""Training guards: they stop a run with the same error on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pipeline.checkpoint.collectives import log_on_rank0
from pipeline.config.train import TrainConfig
from pipeline.core.errors import GuardError
from pipeline.training.distributed import add_up, first_fault
from pipeline.training.faults import LAYER, Fault
from pipeline.training.train_metrics import MetricAccumulator, Sums

# NE must fall by this share of itself in ``window_steps`` steps to count as learning.
LEAST_GAIN = 1e-4
# Near the base rate NE falls by less than LEAST_GAIN in a window, so there it only has to fall by that in PATIENCE
# windows.
NEAR, PATIENCE = 0.01, 4
# The most windows between two judgements that cost a pass over rows.
LONGEST_WAIT = 16
log = logging.getLogger(__name__)


def check_finite(sums: Sums, step: int, config: TrainConfig, fault: Callable[[], Fault | None]) -> None:
    """Raise GuardError where an interval has a logit or loss that is not finite. ``fault`` returns this rank's fault.

    ``sums`` are equal on all ranks, so all ranks raise it.
    """
    if not sums.bad:
        return
    first, part, warmup = first_fault(fault()), "the loss", 1000
    if first is not None:
        part = first.part
    if isinstance(config.warmup_steps, int):
        warmup = max(100, 2 * config.warmup_steps)
    raise GuardError(
        f"the loss is not finite (noticed at step {step}, {sums.bad:.0f} of {sums.samples:.0f} rows): the first part "
        f"that is not finite is {part}",
        hint=f"train.lr={config.lr / 4:g} train.sparse_lr={config.sparse_lr / 4:g} train.warmup_steps={warmup}, "
        "or train.precision=fp32",
    )


@dataclass(frozen=True)
class GuardFigures:
    """How the model as it would be published does on some rows: NE, None for rows of one class; spread of its logits.

    ``rows`` says in words which rows they are.
    """

    ne: float | None
    logit_std: float
    rows: str


class Collapse:
    """Stops a training whose predictions are all alike, or no better than the base rate and not on their way there.

    Predictions of training steps contain the noise of dropout and depend on batch statistics, so they only raise a
    suspicion. The model in evaluation mode decides, on validation rows where there are some, else on train rows. A
    model that is worse than the base rate may go on while the learning rates still rise, and while it improves: within
    ``window_steps``, or ``PATIENCE`` times as many where it is about as good as the base rate.
    """

    def __init__(self, config: TrainConfig, rising: int = 0) -> None:
        """Start with the ``rising`` steps of the warm-up, in which the learning rates rise."""
        self._config, self._rising = config, rising
        self._begin()

    def _begin(self) -> None:
        guard = self._config.guard
        self._first = self._next = max(0, guard.collapse_after_steps - guard.window_steps)
        self._last, self._wait = 0, guard.window_steps
        # The step and NE of each judgement.
        self._known = list[tuple[int, float]]()

    def is_due(self, meter: MetricAccumulator, step: int, *, free: bool = False) -> bool:
        """Whether the last steps' predictions ask for a judgement of the model after ``step``; equal on all ranks.

        ``free``: a judgement costs nothing or is the last chance, because the model was just scored or takes no more
        steps.
        """
        guard, window = self._config.guard, meter.window
        if step < self._last:
            # The model was reset to initial values.
            self._begin()
        self._last = step
        earliest = self._first if free else self._next
        if not guard.collapse or step < earliest or not meter.window_full:
            return False
        if window.logit_std < guard.min_logit_std:
            return True
        useless = window.ne is not None and window.ne >= guard.max_window_ne
        return useless and (free or step >= self._rising - guard.window_steps)

    def take(self, judged: GuardFigures, step: int, *, last: bool) -> None:
        """Take in a judgement of the model after ``step``, which is equal on all ranks.

        Args:
            judged: The judgement.
            step: Steps that the model has taken.
            last: Whether the model takes no more steps, so that it cannot improve.

        Raises:
            GuardError: The predictions have collapsed, or the model does not learn.
        """
        guard, ne = self._config.guard, judged.ne
        alike = judged.logit_std < guard.min_logit_std
        self._next = step + self._wait
        span = 0
        if ne is not None and ne < guard.max_window_ne * (1 + NEAR) and not last:
            span = PATIENCE * guard.window_steps
        best = min((known_ne for known_step, known_ne in self._known if known_step <= step - span), default=None)
        if ne is not None:
            self._known.append((step, ne))
        if not alike and (ne is None or ne < guard.max_window_ne):
            # Something else keeps up the suspicion, such as dropout's noise, so wait longer before the next judgement.
            self._wait = min(2 * self._wait, LONGEST_WAIT * guard.window_steps)
            return
        if step < guard.collapse_after_steps:
            return
        on, go_on = f"on {judged.rows} after step {step:,}", "train.guard.collapse=false to continue"
        if alike:
            raise GuardError(
                f"predictions have collapsed: the standard deviation of the logits is {judged.logit_std:.3g} {on}, "
                f"expected at least train.guard.min_logit_std={guard.min_logit_std:g}",
                hint=f"train.lr={self._config.lr / 4:g}, or {go_on}",
            )
        if step < self._rising and not last:
            return
        limit = f"train.guard.max_window_ne={guard.max_window_ne:g} (1 is the base rate alone)"
        improves = best is not None and ne is not None and ne < best * (1 - LEAST_GAIN)
        if improves or (best is None and not last):
            log_on_rank0(log.warning, "NE is %.4f %s, not below %s; training goes on while it falls", ne, on, limit)
            return
        assert ne is not None
        before = "" if best is None else f" and was {best:.4f} before"
        raise GuardError(
            f"the model is not learning: NE is {ne:.4f} {on}{before}, expected below {limit}",
            hint=f"train.lr={self._config.lr / 4:g} train.sparse_lr={self._config.sparse_lr / 4:g}, or {go_on}",
        )


def check_layers(
    dense: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, step: int, config: TrainConfig
) -> None:
    """Before a checkpoint, raise GuardError where a layer or its ``optimizer`` state is not finite. Collective.

    An infinite moment freezes its weight for ever, though the weight itself stays finite. The tables need no check
    here: ``copy_rows`` of checkpoints checks their rows while it copies them, which saves a pass.
    """

    def first_not_finite() -> str:
        for name, parameter in dense.items():
            if not torch.isfinite(parameter).all():
                return f"layer parameter {name!r}"
        for name, parameter in dense.items():
            for key, state in optimizer.state.get(parameter, {}).items():
                if isinstance(state, torch.Tensor) and not torch.isfinite(state).all():
                    return f"{key} of layer parameter {name!r}"
        return ""

    found = first_not_finite()
    flag = torch.tensor([float(bool(found))], device=next(iter(dense.values())).device)
    if not add_up(flag).item():
        return
    # All ranks raise, because those without a fault would otherwise wait in the checkpoint's collectives.
    first, part = first_fault(Fault(step, LAYER, found) if found else None), "a layer"
    if first is not None:
        part = first.part
    raise GuardError(
        f"{part} is not finite after step {step}; no checkpoint was written",
        hint=f"train.lr={config.lr / 4:g} train.sparse_lr={config.sparse_lr / 4:g}, or train.clip.dense_norm=1",
    )
