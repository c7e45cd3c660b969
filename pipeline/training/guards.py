"""Training guards: they stop a run with the same error on every rank."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipeline.config import TrainConfig
from pipeline.errors import GuardError
from pipeline.training.distributed import add_up, first_fault
from pipeline.training.faults import LAYER, Fault
from pipeline.training.metrics import Meter, Sums


def check_finite(sums: Sums, step: int, config: TrainConfig, fault: Callable[[], Fault | None]) -> None:
    """Raise GuardError where an interval has a logit or loss that is not finite. ``fault`` returns this rank's fault.

    ``sums`` are equal on all ranks, so all ranks raise it.
    """
    if not sums.bad:
        return
    first = first_fault(fault())
    raise GuardError(
        f"the loss is not finite (noticed at step {step}, {sums.bad:.0f} of {sums.samples:.0f} rows): the first part "
        f"that is not finite is {first.part if first else 'the loss'}",
        hint=f"train.lr={config.lr / 4:g} train.sparse_lr={config.sparse_lr / 4:g} train.warmup_steps="
        f"{_longer(config.warmup_steps)}, or train.precision=fp32",
    )


def _longer(warmup: int | str) -> int:
    return max(100, 2 * warmup) if isinstance(warmup, int) else 1000


def check_collapse(meter: Meter, step: int, config: TrainConfig) -> None:
    """Raise GuardError where the window's predictions are all alike, or no better than the base rate."""
    guard, window = config.guard, meter.window
    if not guard.collapse or step < guard.collapse_after_steps or not meter.window_full:
        return
    over = f"over the {window.samples:.0f} rows before step {step}"
    go_on = "train.guard.collapse=false to continue"
    if window.logit_std < guard.min_logit_std:
        raise GuardError(
            f"predictions have collapsed: the standard deviation of the logits is {window.logit_std:.3g} {over}, "
            f"expected at least train.guard.min_logit_std={guard.min_logit_std:g}",
            hint=f"train.lr={config.lr / 4:g}, or {go_on}",
        )
    if window.ne is not None and window.ne >= guard.max_window_ne:
        raise GuardError(
            f"the model is not learning: NE is {window.ne:.4f} {over}, expected below "
            f"train.guard.max_window_ne={guard.max_window_ne:g} (1 is the base rate alone)",
            hint=f"train.lr={config.lr / 4:g} train.sparse_lr={config.sparse_lr / 4:g}, or {go_on}",
        )


def check_layers(
    dense: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, step: int, config: TrainConfig
) -> None:
    """Before a checkpoint, raise GuardError where a layer or its ``optimizer`` state is not finite. Collective.

    An infinite moment freezes its weight for ever, though the weight itself stays finite. ``checkpoint.snapshot``
    checks the tables while it copies their rows, which saves a pass over them.
    """
    fault = _spoilt(dense, optimizer)
    flag = torch.tensor([float(fault is not None)], device=next(iter(dense.values())).device)
    if add_up(flag).item():
        first = first_fault(Fault(step, LAYER, fault) if fault else None)
        raise GuardError(
            f"{first.part if first else 'a layer'} is not finite after step {step}; no checkpoint was written",
            hint=f"train.lr={config.lr / 4:g} train.sparse_lr={config.sparse_lr / 4:g}, or train.clip.dense_norm=1",
        )


def _spoilt(dense: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> str | None:
    """The first layer, or else the first state of a layer's optimizer, that is not finite."""
    values: list[tuple[str, object]] = [(f"layer parameter {name!r}", value) for name, value in dense.items()]
    values += [
        (f"{key} of layer parameter {name!r}", state)
        for name, value in dense.items()
        for key, state in optimizer.state.get(value, {}).items()
    ]
    bad = (name for name, value in values if isinstance(value, torch.Tensor) and not torch.isfinite(value).all())
    return next(bad, None)
