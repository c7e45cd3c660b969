"""Settings of further tasks: their labels, how a model shares itself among them, their weights and limits."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.config.fields import setting
from pipeline.core.errors import ConfigError
from pipeline.specs.label_kind import LABEL_KINDS, MAIN_TASK

# Columns of scores and names of parts that a task's name would hide.
TAKEN_TASKS = ("label", "file", "line", "probability", "row", MAIN_TASK)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(kw_only=True)
class TaskLabel:
    """The label of a further task. A row without it counts for the other tasks."""

    column: str | None = setting(None, doc="Column with the task's label; null: the column of its name.")
    kind: str = setting(
        "binary",
        choices=LABEL_KINDS.names,
        doc="What the label is, which decides loss and metrics.",
        more=lambda: " ".join(f"{each.name}: {each.doc}" for each in LABEL_KINDS),
    )
    positive: str = setting("1", doc="With kind binary, the value of a positive label.")
    negative: str = setting("0", doc="With kind binary, the value of a negative label.")
    given: str | None = setting(
        None,
        doc="The task without which this one cannot happen: where that label is negative, this one counts as negative "
        "even if it is missing, and a positive one sends the row to quarantine. null: none.",
    )

    def check(self, path: str) -> None:
        # Two classes need two values, and the name must be valid for columns.
        if LABEL_KINDS.get(self.kind).classes and self.positive == self.negative:
            raise ConfigError(
                f"{path}.positive and {path}.negative are both {self.positive!r}, expected two values",
                hint=f"{path}.positive=1 {path}.negative=0",
            )
        if self.given is not None and not LABEL_KINDS.get(self.kind).classes:
            raise ConfigError(
                f"{path}.given is {self.given!r}, but {path}.kind is {self.kind}: only a binary task has it",
                hint=f"{path}.given=null",
            )


@dataclass(kw_only=True)
class TaskTraining:
    """How much a task counts in training."""

    weight: float = setting(1.0, low=0.0, doc="Factor of the task's loss in the loss that is trained.")


@dataclass(kw_only=True)
class TaskLimits:
    """What a model must satisfy in a further task to be published; null: no limit."""

    max_ne: float | None = setting(1.0, low=0.0, doc="Largest NE of a binary task.")
    min_auc: float | None = setting(None, low=0.0, high=1.0, doc="Smallest AUC of a binary task.")
    max_calibration_error: float | None = setting(
        None, low=0.0, doc="Largest difference between predicted and observed sum, as a share of the observed one."
    )
    max_rmse: float | None = setting(None, low=0.0, doc="Largest root mean square error of a count or value.")
    max_increase: float | None = setting(
        0.02,
        low=0.0,
        doc="Largest rise over the incumbent's on the same rows, as a share: of NE, or of RMSE. The model is held if "
        "the rise is larger beyond doubt.",
    )


@dataclass(kw_only=True)
class TaskOptions:
    """Options of `model.tasks`; null: its own value. An option that it lacks is refused."""

    task_mlp: list[int] | None = setting(None, doc="Hidden widths of each task's own MLP.")
    expert_mlp: list[int] | None = setting(None, doc="Hidden widths of an expert of mmoe or ple.")
    experts: int | None = setting(None, low=1, high=256, doc="Number of experts that all tasks share.")
    own_experts: int | None = setting(None, low=1, high=256, doc="Number of experts that ple gives each task.")
    levels: int | None = setting(None, low=1, high=16, doc="Number of levels of experts that ple puts on each other.")

    def check(self, path: str) -> None:
        # A layer must have a width.
        for name in ("task_mlp", "expert_mlp"):
            if any(width < 1 for width in getattr(self, name) or ()):
                raise ConfigError(
                    f"{path}.{name} is {getattr(self, name)}, expected widths of at least 1", hint=f"{path}.{name}=[64]"
                )


def check_task_names(path: str, tasks: dict[str, TaskLabel]) -> None:
    """Check that names are usable as columns, and that ``given`` names an earlier binary task."""
    before = [MAIN_TASK]
    for name, task in tasks.items():
        if name in TAKEN_TASKS or not _NAME.fullmatch(name):
            safe = re.sub(r"\W", "_", name)
            raise ConfigError(
                f"{path} has a task {name!r}, expected letters, digits and _, and none of: {', '.join(TAKEN_TASKS)}",
                hint=f"'+{path}.my_{safe}={{column: {task.column or name}}}' in place of {name!r}",
            )
        if (labelled := name.removeprefix("label_")) != name and labelled in tasks:
            raise ConfigError(
                f"{path} has tasks {labelled!r} and {name!r}, but nightjar predict writes the labels of {labelled!r} "
                f"into a column {name!r}",
                hint=f"another name, such as '+{path}.{labelled}_label={{column: {task.column or name}}}'",
            )
        if task.given is not None and task.given not in before:
            raise ConfigError(
                f"{path}.{name}.given is {task.given!r}, expected a binary task before it: {', '.join(before)}",
                hint=f"{path}.{name}.given={MAIN_TASK}",
            )
        # A task can be conditional only on one that either happens or does not.
        if LABEL_KINDS.get(task.kind).classes:
            before.append(name)
