"""A study in a store: ``studies/<study>/study.json``, and ``trials/<number>.json`` for each of its trials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.records.record import Record, absent

# States of a trial.
TRYING, DONE, PRUNED, BROKEN = "running", "done", "pruned", "failed"


def study_directory(study: str) -> str:
    """Return where a study's records are, relative to the store."""
    return f"studies/{study}"


def trial_path(study: str, number: int) -> str:
    """Return the path of the record of trial ``number``, relative to the store."""
    return f"{study_directory(study)}/trials/{number:05d}.json"


@dataclass(frozen=True, kw_only=True)
class Dimension(Record):
    """What a setting is searched over. ``kind``: choice (of ``choices``, as overrides write them) | float | int.

    ``low`` and ``high`` belong to the range; ``step``: between its values; ``log``: drawn by their logarithms.
    """

    kind: str
    choices: tuple[str, ...] | None = absent()
    low: float | None = absent()
    high: float | None = absent()
    step: float | None = absent()
    log: bool = absent(False)


@dataclass(frozen=True, kw_only=True)
class Look(Record):
    """The NE of the validation rows after ``step``, with so many ``samples`` trained."""

    step: int
    samples: int
    ne: float


@dataclass(frozen=True, kw_only=True)
class TrialRecord(Record):
    """A trial, which is the run ``run``: running | done | pruned | failed. ``parameters``: the settings that differ.

    ``looks``: those that the study has answered; ``asks_at``: the samples from which on the trial waits for the next
    answer; ``rungs``: the NE at each rung of the pruner. ``ne`` and ``auc`` are of the validation rows with the best
    weights, ``test_ne`` and ``test_auc`` of the held-out rows. ``step_ms`` and ``table_bytes``: predicted by the plan.
    ``steps``: trained, of ``steps_total``. ``attempts``: how often its process ended without an outcome. ``given``: its
    settings are those without the study. ``parts``: of the validation rows' log loss, as in ``ValidationPart``.
    """

    FILE: ClassVar[str] = "trial.json"
    KIND: ClassVar[str] = "trial"

    number: int
    run: str
    state: str
    parameters: dict[str, Any]
    started: float
    ended: float | None = absent()
    looks: tuple[Look, ...] = ()
    asks_at: int = 0
    rungs: dict[str, float] | None = absent()
    ne: float | None = absent()
    auc: float | None = absent()
    test_ne: float | None = absent()
    test_auc: float | None = absent()
    step_ms: float | None = absent()
    table_bytes: int | None = absent()
    steps: int | None = absent()
    steps_total: int | None = absent()
    attempts: int = absent(0)
    given: bool = absent(False)
    parts: tuple[float, ...] | None = absent()
    error: str | None = absent()
    exit_code: int | None = absent()

    @property
    def overrides(self) -> list[str]:
        """The settings of the trial as overrides."""
        return [f"{key}={value}" for key, value in self.parameters.items()]


@dataclass(frozen=True, kw_only=True)
class StudyRecord(Record):
    """A study: the ``overrides`` that all trials share, and what each setting of ``space`` is searched over.

    ``settings``: that all trials share, by dotted name. ``warm_start``: the study whose trials inform this one.
    """

    FILE: ClassVar[str] = "study.json"
    KIND: ClassVar[str] = "study"

    study: str
    overrides: tuple[str, ...]
    space: dict[str, Dimension]
    settings: dict[str, Any]
    created: float
    warm_start: str | None = absent()


@dataclass(frozen=True, kw_only=True)
class StudyLine(Record):
    """A study in few figures: trials by state, and the best trial's number and NE of the validation rows."""

    study: str
    created: float
    trials: dict[str, int]
    best: int | None = absent()
    ne: float | None = absent()


@dataclass(frozen=True, kw_only=True)
class StudyShown(Record):
    """A study with its trials. ``best``: the number of the best one; ``importance``: shares by setting, sum 1.

    ``lowest``: the number of the trial with the lowest NE, where that is not the one with the settings as given;
    ``gain``: how much lower its NE is than that one's, and the standard error of that.
    ``steps`` were trained; all trials in full would have taken ``steps_in_full``.
    """

    study: StudyRecord
    trials: tuple[TrialRecord, ...]
    best: int | None = absent()
    lowest: int | None = absent()
    gain: tuple[float, float] | None = absent()
    importance: dict[str, float] | None = absent()
    steps: int = 0
    steps_in_full: int = 0

    @property
    def best_trial(self) -> TrialRecord | None:
        """The trial that the study found; None if none has finished."""
        return next((each for each in self.trials if each.number == self.best), None)
