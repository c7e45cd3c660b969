"""``gate.tasks``: limits of further tasks. A task that the settings do not name has the default limits."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.gate import GateConfig
from pipeline.config.tasks import TaskLimits
from pipeline.evaluation.gate.wording import (
    check_auc,
    check_limit,
    may_be_calibrated,
    not_worse,
    percent,
    place,
    with_ends,
)
from pipeline.records.gate import Check, Interval, TaskComparison
from pipeline.specs.gate_check import GateCheck, GateInputs
from pipeline.specs.label_kind import LABEL_KINDS


class Tasks(GateCheck):
    """What every further task must reach, and that its figure does not rise over the incumbent's."""

    name = "tasks"

    def decide(self, inputs: GateInputs) -> Iterator[Check]:
        """Answers for each task; a warning for one of which no row has a label."""
        settings: GateConfig = inputs.settings
        for name, task in (inputs.record.tasks or {}).items():
            limits = settings.tasks.get(name) or TaskLimits()
            if task.candidate is None:
                words = f"no test row has a label of task {name} that allows figures"
                yield Check(f"{name}: rows", "", True, words, warned=True)
                continue
            yield from self._check_floors(name, task, task.candidate, limits)
            yield from self._check_increase(name, task, task.candidate, limits.max_increase)

    def _check_floors(
        self, name: str, task: TaskComparison, candidate: Interval, limits: TaskLimits
    ) -> Iterator[Check]:
        setting, limit = "max_rmse", limits.max_rmse
        if LABEL_KINDS.get(task.kind).classes:
            setting, limit = "max_ne", limits.max_ne
        what = f"{task.figure} of task {name} is"
        yield from check_limit(f"{name}: {task.figure}", f"tasks.{name}.{setting}", candidate.point, limit, what)
        if task.auc is not None:
            what = f"AUC of task {name}"
            yield from check_auc(f"{name}: AUC", f"tasks.{name}.min_auc", task.auc.point, limits.min_auc, what)
        limit = limits.max_calibration_error
        if task.calibration is not None and limit is not None:
            setting = f"gate.tasks.{name}.max_calibration_error"
            passed = may_be_calibrated(task.calibration, limit)
            words = (
                f"calibration of task {name} is {with_ends(task.calibration)}, "
                f"{place(abs(task.calibration.point - 1), limit, passed)} {limit:.1%} ({setting})"
            )
            yield Check(f"{name}: calibration", setting, passed, words)

    def _check_increase(
        self, name: str, task: TaskComparison, candidate: Interval, limit: float | None
    ) -> Iterator[Check]:
        if task.change is None or task.incumbent is None or limit is None:
            return
        setting = f"gate.tasks.{name}.max_increase"
        passed = not_worse(task.change, limit)
        words = (
            f"{task.figure} of task {name} is {candidate.point:.4f}, the incumbent's "
            f"{task.incumbent.point:.4f}: {percent(task.change)}, {place(task.change.point, limit, passed)} "
            f"+{limit:.1%} ({setting})"
        )
        yield Check(f"{name}: {task.figure} beside the incumbent", setting, passed, words)


TASKS = Tasks()
