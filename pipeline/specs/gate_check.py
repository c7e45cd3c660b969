"""The protocol of a gate check, and the scored rows that it may measure something on.

``pipeline/evaluation/gate/checks/`` has the built-in checks; packages add others as entry points of group
``nightjar.gate_checks``. No setting chooses among them: the gate asks every check that is installed. Nothing here loads
NumPy, because composing a configuration asks each check for its settings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeline.core.registry import Registry
from pipeline.records.gate import Calibrated, Check, GateRecord

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.floating]


@dataclass(frozen=True, kw_only=True)
class SliceColumn:
    """A column by whose values rows are sliced.

    Attributes:
        codes: An integer for each row, [n].
        names: What codes are called; a code without a name is shown as a number.
    """

    codes: NDArray[np.integer]
    names: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoredTask:
    """A further task on the scored rows.

    Attributes:
        kind: Name of the label's kind (``specs.label_kind``).
        labels: Of each row, [n]; NaN where it is missing.
        candidate: The candidate's logits, [n].
        incumbent: The incumbent's logits, [n]; None where it lacks the task.
        weights: How many rows each row counts as, [n]; None: one.
    """

    kind: str
    labels: Floats
    candidate: Floats
    incumbent: Floats | None = None
    weights: Floats | None = None

    def select_rows(self, rows: NDArray[np.bool_]) -> ScoredTask:
        """Return the task on the rows that ``rows`` [n] marks."""
        return replace(
            self,
            labels=self.labels[rows],
            candidate=self.candidate[rows],
            incumbent=None if self.incumbent is None else self.incumbent[rows],
            weights=None if self.weights is None else self.weights[rows],
        )


@dataclass(frozen=True, kw_only=True)
class ScoredRows:
    """Held-out rows as the models score them: labels and logits of the same rows, [n] each.

    Attributes:
        labels: 0 or 1.
        candidate: Logits of the candidate as it would be served.
        incumbent: Logits of the version that serves; None: there is none, or it cannot be scored.
        trained: Logits of the candidate as it was trained; None: not known.
        best: Logits of the best of the last versions, where that is not the incumbent.
        baseline: Logits of a simple model.
        slices: The columns of ``gate.slices``, by name.
        tasks: The further tasks, by name.
        weights: How many rows each row counts as; None: one.
        users: A number from 0 on for the user of each row, negative where it has none; None: not known. It may be any
            group of rows that is ranked together.
        users_by: The feature whose ids they are, for messages; None: they are called users.
        uncalibrated: Logits of the candidate without its calibrator, which ``calibrated`` describes.
        calibrated: The record of that calibrator; None: there is none.
    """

    labels: Floats
    candidate: Floats
    incumbent: Floats | None = None
    trained: Floats | None = None
    best: Floats | None = None
    baseline: Floats | None = None
    slices: Mapping[str, SliceColumn] = field(default_factory=dict)
    tasks: Mapping[str, ScoredTask] = field(default_factory=dict)
    weights: Floats | None = None
    users: NDArray[np.integer] | None = None
    users_by: str | None = None
    uncalibrated: Floats | None = None
    calibrated: Calibrated | None = None

    def select_rows(self, rows: NDArray[np.bool_]) -> ScoredRows:
        """Return the rows that ``rows`` [n] marks."""
        columns: dict[str, Any] = {}
        models = ("candidate", "incumbent", "trained", "best", "baseline", "uncalibrated")
        for name in ("labels", "weights", "users", *models):
            column = getattr(self, name)
            columns[name] = None if column is None else column[rows]
        slices = {name: replace(column, codes=column.codes[rows]) for name, column in self.slices.items()}
        tasks = {name: task.select_rows(rows) for name, task in self.tasks.items()}
        return replace(self, **columns, slices=slices, tasks=tasks)


@dataclass(frozen=True, kw_only=True)
class GateInputs:
    """What a check decides from.

    Attributes:
        record: The figures of ``gate.json``, as yet without checks and verdict.
        settings: Group ``gate`` (``config.GateConfig``).
        options: The check's own settings, ``gate.<name>``; None where it has none.
        measured: What its ``measure`` returned; None where the gate was given no rows.
    """

    record: GateRecord
    settings: Any
    options: Any = None
    measured: Any = None


class GateCheck(ABC):
    """A check of the gate: what it measures, how it decides, and the words that say so.

    Attributes:
        name: An identifier.
        settings: A dataclass of its own settings, each declared by ``config.fields.setting``, which are set as
            ``gate.<name>.<setting>``. None: it has none, or those of group ``gate`` suffice.
        needs_figures: Whether it is left out where the candidate has no figures because some of its predictions are
            not finite. The gate holds such a candidate in any case.
        can_be_forced: Whether ``gate.force`` publishes a model that it holds.
    """

    name: str
    settings: type | None = None
    needs_figures = True
    can_be_forced = True

    def measure(self, rows: ScoredRows, options: Any) -> Any:
        """Measure on ``rows`` what the record's figures do not tell; by default nothing.

        Args:
            rows: The scored rows. The logits of candidate and incumbent are finite where ``needs_figures`` is set;
                those of other models may not be.
            options: The check's own settings.

        Returns:
            Anything, for ``decide``. No file keeps it: what people should read goes into the words.
        """
        return None

    @abstractmethod
    def decide(self, inputs: GateInputs) -> Iterable[Check]:
        """Decide from ``inputs``; nothing if the check does not apply.

        A ``Check`` that did not pass holds the model with its ``words`` as the reason, so they name the figure, the
        limit and the setting. Compare so that NaN does not pass: ``figure <= limit``, not ``not figure > limit``.
        """


def gate_check_problem(check: Any) -> str:
    """Return why a package's ``check`` cannot be asked, in words; "" if it can."""
    if isinstance(check, type):
        return "which is a class, expected an instance of it"
    if not isinstance(check, GateCheck):
        return f"which is {type(check).__name__}, expected a pipeline.specs.GateCheck"
    if check.settings is not None and not (isinstance(check.settings, type) and is_dataclass(check.settings)):
        return f"whose settings are {check.settings!r}, expected a dataclass"
    # The name becomes a field of the dataclass of group ``gate`` (``config.gate``).
    if not check.name.isidentifier():
        return "whose name is no identifier, as gate.<name> needs"
    return ""


GATE_CHECKS: Registry[GateCheck] = Registry(
    "gate check",
    setting="gate.*",
    home="pipeline.evaluation.gate.checks",
    group="nightjar.gate_checks",
    problem=gate_check_problem,
    all_apply=True,
)
