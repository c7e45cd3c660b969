"""The figures of a training interval: outputs are kept while steps run, and summed over the ranks at its end."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import astuple, dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.evaluation.metrics import entropy_of_rate
from pipeline.training.distributed import add_up
from pipeline.training.model import Output


@dataclass(frozen=True)
class Sums:
    """Sums over the real rows of some steps, all ranks together. ``bad``: rows whose logit is not finite."""

    rows: float = 0.0
    positives: float = 0.0
    loss: float = 0.0
    logit: float = 0.0
    logit_square: float = 0.0
    bad: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def mean_loss(self) -> float:
        """Log loss per row."""
        return self.loss / self.rows if self.rows else math.nan

    @property
    def ne(self) -> float | None:
        """Normalised entropy of these rows; None for rows of one class."""
        if not 0 < self.positives < self.rows:
            return None
        return self.mean_loss / entropy_of_rate(self.positives / self.rows, math.log, math.log1p)

    @property
    def logit_std(self) -> float:
        """Standard deviation of the logits."""
        if not self.rows:
            return math.nan
        mean = self.logit / self.rows
        return math.sqrt(max(self.logit_square / self.rows - mean * mean, 0.0))


class Meter:
    """Collects the outputs of steps; ``close`` sums them over all ranks (the one collective of an interval)."""

    def __init__(self, window_steps: int) -> None:
        self.window_steps = window_steps
        self._outputs: list[Output] = []
        self._window: deque[tuple[int, Sums]] = deque()
        self._began = time.perf_counter()
        self._waited = 0.0

    def add(self, output: Output) -> None:
        """Keep one step's (logits, labels, weights)."""
        self._outputs.append(output)

    @property
    def steps(self) -> int:
        """Steps of the interval so far."""
        return len(self._outputs)

    @property
    def window(self) -> Sums:
        """Sums of the last intervals, of ``window_steps`` steps or more."""
        return sum((sums for _, sums in self._window), Sums())

    @property
    def window_full(self) -> bool:
        """Whether ``window`` spans ``window_steps`` steps already."""
        return sum(steps for steps, _ in self._window) >= self.window_steps

    def state(self) -> list[list[float]]:
        """The window as plain data, for a checkpoint; ``load`` takes it back."""
        return [[steps, *astuple(sums)] for steps, sums in self._window]

    def load(self, state: list[list[float]]) -> None:
        """Go on with the window of an earlier session."""
        self._window = deque((int(steps), Sums(*figures)) for steps, *figures in state)

    def close(self, waited: float) -> tuple[Sums, float, float]:
        """End the interval: (its sums over all ranks, its seconds, the share spent waiting for data on this rank).

        ``waited``: seconds waited for data since the start of training.
        """
        steps, sums = self.steps, _sums(self._outputs)
        self._outputs = []
        self._window.append((steps, sums))
        while sum(count for count, _ in self._window) - self._window[0][0] >= self.window_steps:
            self._window.popleft()
        now = time.perf_counter()
        seconds, share = now - self._began, (waited - self._waited) / max(now - self._began, 1e-9)
        self._began, self._waited = now, waited
        return sums, seconds, share

    def leave_out(self) -> None:
        """Leave the time since ``close`` out of the next interval."""
        self._began = time.perf_counter()


def _sums(outputs: list[Output]) -> Sums:
    logits, labels, weights = (torch.cat(parts) for parts in zip(*outputs, strict=True))
    real = weights > 0
    logits, labels = logits[real], labels[real]
    losses = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    figures: list[Tensor] = [
        real.sum(), labels.sum(dtype=torch.float64), losses.sum(dtype=torch.float64), logits.sum(dtype=torch.float64),
        logits.double().square().sum(), (~torch.isfinite(logits)).sum(),
    ]  # fmt: skip
    return Sums(*add_up(torch.stack([figure.double() for figure in figures])).tolist())
