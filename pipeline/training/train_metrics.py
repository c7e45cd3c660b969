"""The figures of a training interval: step outputs are kept until its end, then summed over the ranks."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from itertools import chain
from operator import add

import torch
from torch.nn import functional

from pipeline.evaluation.metrics import entropy_of_rate
from pipeline.records.dataset import DatasetSchema
from pipeline.specs.label_kind import TaskSums
from pipeline.training.distributed import add_up
from pipeline.training.model import Output
from pipeline.training.tasks import main_sums, task_figures, task_sums


@dataclass(frozen=True)
class Sums:
    """Sums over the real rows of some steps on all ranks. ``bad``: rows whose logit is not finite.

    Where rows have weights, every sum except ``bad`` is weighted and ``rows`` is the sum of the weights; ``unweighted``
    is then the number of rows.
    """

    rows: float = 0.0
    positives: float = 0.0
    loss: float = 0.0
    logit: float = 0.0
    logit_square: float = 0.0
    bad: float = 0.0
    unweighted: float = 0.0

    @property
    def samples(self) -> float:
        """The number of rows."""
        return self.unweighted or self.rows

    def __add__(self, other: Sums) -> Sums:
        return Sums(*map(add, astuple(self), astuple(other)))

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


class MetricAccumulator:
    """Collects the outputs of steps; ``close`` sums them over all ranks (the one collective of an interval).

    ``schema`` is that of the dataset, for its further tasks and row weights (None: it has neither).
    """

    def __init__(self, window_steps: int, schema: DatasetSchema | None = None) -> None:
        self.window_steps = window_steps
        self._tasks = schema.tasks if schema is not None else ()
        self._weighted = schema is not None and schema.counted
        self._outputs: list[Output] = []
        self._window: deque[_IntervalSums] = deque()
        self._began = time.perf_counter()
        self._waited = 0.0

    def add(self, output: Output) -> None:
        """Keep one step's (logits, labels, weights)."""
        self._outputs.append(output)

    @property
    def steps(self) -> int:
        """The number of steps in the interval so far."""
        return len(self._outputs)

    @property
    def window(self) -> Sums:
        """Sums over the last intervals, which have ``window_steps`` steps or more."""
        return sum((interval.sums for interval in self._window), Sums())

    def task_figures(self) -> dict[str, dict[str, float | None]]:
        """Return the figures of the further tasks over the window, by task."""
        totals = [TaskSums()] * len(self._tasks)
        for interval in self._window:
            for number, sums in enumerate(interval.tasks):
                totals[number] = totals[number].plus(sums)
        return task_figures(self._tasks, totals)

    @property
    def window_full(self) -> bool:
        """Whether ``window`` spans ``window_steps`` steps already."""
        return sum(interval.steps for interval in self._window) >= self.window_steps

    def state(self) -> list[list[float]]:
        """Return the window as plain data, for a checkpoint; ``load`` takes it back."""
        state = []
        for interval in self._window:
            figures = [interval.steps, *astuple(interval.sums)]
            # Without row weights, the number of rows is the first of the sums, so checkpoints do not store it twice.
            if not interval.sums.unweighted:
                figures.pop()
            state.append(figures + list(chain(*interval.tasks)))
        return state

    def load(self, state: list[list[float]]) -> None:
        """Continue with a window that ``state`` returned."""
        self._window.clear()
        for figures in state:
            own = len(figures) - len(TaskSums._fields) * len(self._tasks)
            sums, tasks = Sums(*figures[1:own]), _sums_of_tasks(figures[own:])
            self._window.append(_IntervalSums(int(figures[0]), sums, tasks))

    def begin_anew(self) -> None:
        """Forget the window, whose rows another model scored."""
        self._window.clear()

    def close(self, waited: float) -> tuple[Sums, float, float]:
        """End the interval; return its sums over all ranks, its seconds, and this rank's share of waiting for data.

        ``waited``: seconds waited for data since the start of training.
        """
        sums, tasks = self._sums()
        self._window.append(_IntervalSums(self.steps, sums, tasks))
        self._outputs = []
        # Only whole intervals leave the window, so a full one has ``window_steps`` steps or a few more.
        while sum(each.steps for each in self._window) - self._window[0].steps >= self.window_steps:
            self._window.popleft()
        now = time.perf_counter()
        seconds, share = now - self._began, (waited - self._waited) / max(now - self._began, 1e-9)
        self._began, self._waited = now, waited
        return sums, seconds, share

    def _sums(self) -> tuple[Sums, tuple[TaskSums, ...]]:
        logits, labels, weights = map(torch.cat, zip(*self._outputs, strict=True))
        real = weights > 0
        logits, labels, weights = logits[real], labels[real], weights[real]
        if not self._tasks and not self._weighted:
            losses = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
            figures = [
                real.sum(),
                labels.sum(dtype=torch.float64),
                losses.sum(dtype=torch.float64),
                logits.sum(dtype=torch.float64),
                logits.double().square().sum(),
                (~torch.isfinite(logits)).sum(),
            ]
            return Sums(*add_up(torch.stack([figure.double() for figure in figures])).tolist()), ()

        # Without row weights, the weights of the batch only say which rows are real.
        if not self._weighted:
            weights = torch.ones_like(weights)
        main_logits, clicked = logits, labels
        if self._tasks:
            main_logits, clicked = logits[:, 0], labels[:, 0]
        figures = main_sums(main_logits, clicked, weights)
        main = len(figures)
        if self._tasks:
            figures[5] = (~torch.isfinite(logits)).any(1).sum()
            figures += task_sums(self._tasks, logits, labels, weights)
        totals = add_up(torch.stack([figure.double() for figure in figures])).tolist()
        sums = Sums(*totals[:main])
        if not self._weighted:
            sums = replace(sums, unweighted=0.0)
        return sums, _sums_of_tasks(totals[main:])

    def leave_out(self) -> None:
        """Exclude the time since ``close`` from the next interval."""
        self._began = time.perf_counter()


@dataclass(frozen=True)
class _IntervalSums:
    steps: int
    sums: Sums
    tasks: tuple[TaskSums, ...] = ()


def _sums_of_tasks(figures: Sequence[float]) -> tuple[TaskSums, ...]:
    size = len(TaskSums._fields)
    return tuple(TaskSums(*figures[at : at + size]) for at in range(0, len(figures), size))
