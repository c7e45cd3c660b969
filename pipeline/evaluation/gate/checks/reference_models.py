"""Checks of the candidate against other models, and of further tasks (``gate.tasks``).

The models are the incumbent, the best of the last versions and a simple one. A task that the settings do not name has
the default limits.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.gate import GateConfig
from pipeline.config.tasks import TaskLimits
from pipeline.evaluation.gate.answers import (
    check_auc,
    check_limit,
    explain_rise,
    may_be_calibrated,
    not_worse,
    percent,
    place,
    with_ends,
)
from pipeline.evaluation.gate.power import Level, power_of
from pipeline.records.gate import Check, Figures, GateRecord, Interval, Shift, TaskComparison
from pipeline.specs.gate_check import GateCheck, GateInputs
from pipeline.specs.label_kind import LABEL_KINDS


class Incumbent(GateCheck):
    """``max_ne_increase``, ``max_ne_fall`` and ``max_psi``, on the same rows."""

    name = "incumbent"

    def decide(self, inputs: GateInputs) -> Iterator[Check]:
        """Yield answers on a rise of NE, on a fall, and on the predictions."""
        record = inputs.record
        settings: GateConfig = inputs.settings
        if record.candidate is None or record.incumbent is None or record.change is None:
            return
        if settings.max_ne_increase is not None:
            yield self._check_rise(record, record.candidate, record.incumbent, record.change, settings)
        if settings.max_ne_fall is not None:
            yield self._check_fall(record.change.ne, settings.max_ne_fall)
        if settings.max_psi is not None and record.shift is not None:
            yield self._check_shift(record.shift, settings.max_psi, better=record.change.ne.high < 0)

    def _check_rise(
        self, record: GateRecord, candidate: Figures, incumbent: Figures, change: Figures, settings: GateConfig
    ) -> Check:
        level, limit = Level.of(record, settings), settings.max_ne_increase or 0.0
        power = power_of(record, change, level)
        passed = power.bound <= limit  # false for NaN

        # Say how many rows would resolve the limit. Rows that a calibrator is fitted on do not count.
        needed = power.rows_for(limit) or 0
        rows = f"about {needed:,} test rows"
        if record.calibrated is not None:
            rows += " beside those that fit the calibrator"
        if needed > settings.max_rows:
            rows += f" and gate.max_rows={needed}"
        words = (
            f"NE is {candidate.ne.point:.4f}, the incumbent's on the same rows {incumbent.ne.point:.4f}: "
            f"{percent(change.ne)}, {explain_rise(power, level, limit, passed, rows)} (gate.max_ne_increase)"
        )
        return Check("NE against the incumbent", "gate.max_ne_increase", passed, words)

    def _check_fall(self, change: Interval, limit: float) -> Check:
        passed = change.high >= -limit  # false for NaN
        # Show as many digits as the setting has, but at least one.
        digits = max(len(f"{100 * limit:.10f}".rstrip("0").partition(".")[2]), 1)
        verdict = "not clearly below" if passed else "clearly below"
        words = (
            f"NE changed by {percent(change)} from the incumbent's, {verdict} {-limit:+.{digits}%} (gate.max_ne_fall)"
        )
        if not passed:
            words += ": too good to be true, as of a feature that knows the label, until a person has looked"
        return Check("fall of NE", "gate.max_ne_fall", passed, words)

    def _check_shift(self, shift: Shift, limit: float, *, better: bool) -> Check:
        # A model that learnt more spreads its predictions: if it is surely better, that explains why they moved.
        within = shift.psi <= limit
        verdict = "within" if within else "above"
        words = (
            f"predictions moved from the incumbent's by KS {shift.ks:.3f}, PSI {shift.psi:.3f}, {verdict} {limit:g} "
            "(gate.max_psi)"
        )
        warned = not within and better
        if warned:
            words += "; NE is clearly better, so this is only a warning"
        return Check("prediction shift", "gate.max_psi", within or better, words, warned)


class BestVersionCheck(GateCheck):
    """``best_of_last``: small rises that pass night by night must not add up."""

    name = "best"

    def decide(self, inputs: GateInputs) -> Iterator[Check]:
        """Yield one answer; it warns of versions that were better by their records and could not be scored."""
        settings: GateConfig = inputs.settings
        limit, best, candidate = settings.max_ne_increase, inputs.record.best, inputs.record.candidate
        if limit is None or settings.best_of_last == 1 or best is None or candidate is None:
            return
        name, setting = f"NE against the best of the last {settings.best_of_last} versions", "gate.best_of_last"
        notes = list(best.notes)
        if best.predictions_not_finite:
            notes.append(f"{best.predictions_not_finite:,} of the predictions of {best.version} are not finite")
        if best.ne is None or best.change is None:
            words = "the incumbent is the best of them by their recorded NE"
            if notes:
                words = "; ".join([*notes, "no version before the incumbent was compared"])
            yield Check(name, setting, True, f"{words} (gate.best_of_last)", warned=bool(notes))
            return
        passed = not_worse(best.change, limit)
        words = (
            f"NE is {candidate.ne.point:.4f}, that of {best.version} on the same rows {best.ne.point:.4f}: "
            f"{percent(best.change)}, {place(best.change.point, limit, passed)} {limit:+.2%} (gate.max_ne_increase)"
        )
        if not passed:
            words += ": small rises that each passed have added up, and that version is better"
        yield Check(name, setting, passed, "; ".join([words, *notes]), warned=passed and bool(notes))


class BaselineCheck(GateCheck):
    """``min_baseline_gain``: compares a first model with a logistic regression that learnt from the same rows.

    A model that surely misses its share of that gain is held, and one that is surely worse gets a warning.
    """

    name = "baseline"

    def decide(self, inputs: GateInputs) -> Iterator[Check]:
        """Yield one answer; none if there is an incumbent, since no simple model is trained then."""
        name, setting = "gain beside a simple model", "gate.min_baseline_gain"
        least, simple = inputs.settings.min_baseline_gain, inputs.record.baseline
        candidate = inputs.record.candidate
        if least is None or simple is None or candidate is None:
            return
        ne, change, gain, spare = simple.ne, simple.change, simple.gain, simple.spare
        if ne is None or change is None or gain is None or spare is None:
            return
        words = (
            f"NE is {candidate.ne.point:.4f}, that of a logistic regression on the same rows {ne.point:.4f}: "
            f"{percent(change)}"
        )
        if ne.high >= 1:
            # The simple model's gain, 1 - NE, may be nothing at all, and any model has a share of nothing.
            words += f"; the simple model is no better than the base rate, so this check does not apply ({setting})"
            yield Check(name, setting, True, words)
            return
        passed = spare.high >= 0
        worse = change.low > 0
        verdict = f"below {least:.0%}"
        if passed:
            verdict = f"not surely below the {least:.0%} that are asked for"
        words += f"; {gain.point:.0%} of its gain, {verdict} ({setting})"
        if not passed:
            words += ": the model has not learnt what a simple one learns in one pass; train.epochs=3 trains it longer"
        elif worse:
            words += "; a simple model is clearly better: more steps (train.epochs) may help"
        yield Check(name, setting, passed, words, warned=passed and worse)


INCUMBENT, BEST, BASELINE = Incumbent(), BestVersionCheck(), BaselineCheck()


class Tasks(GateCheck):
    """What every further task must reach, and that its figure does not rise above the incumbent's."""

    name = "tasks"

    def decide(self, inputs: GateInputs) -> Iterator[Check]:
        """Yield answers for each task; a warning for a task without labelled rows."""
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
