"""The gate's questions beside other models: the incumbent, the best of the last versions, a simple model."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pipeline.config.gate import GateConfig
from pipeline.evaluation.check import WHEN, not_worse, percent, place
from pipeline.evaluation.power import Power, error_of, quantile_of
from pipeline.records.gate import Check, Figures, Former, GateRecord, Interval, ModelFigures, Shift

TOO_FEW = "too few rows to tell"


def power_of(record: GateRecord, change: Figures, settings: GateConfig) -> Power:
    """What the rows of ``record`` tell of its ``change`` of NE."""
    return Power(record.rows, change.ne.point, error_of(change.ne, record.confidence), settings.power)


def against_incumbent(record: GateRecord, settings: GateConfig) -> Iterator[Check]:
    """The candidate beside the incumbent on the same rows."""
    ours, theirs, change = record.candidate, record.incumbent, record.change
    if ours is None or theirs is None or change is None:
        return
    if settings.max_ne_increase is not None:
        power, figures = power_of(record, change, settings), (ours.ne.point, theirs.ne.point, change.ne)
        yield _no_worse(power, figures, settings.max_ne_increase)
    if settings.max_psi is not None and record.shift is not None:
        yield _shift(record.shift, settings.max_psi, better=change.ne.high < 0)


def _no_worse(power: Power, figures: tuple[float, float, Interval], limit: float) -> Check:
    """Whether the rows rule out a rise of NE as large as ``limit``."""
    ours, theirs, change = figures
    passed = power.bound <= limit  # not true of NaN
    words = (
        f"NE is {ours:.4f}, the incumbent's on the same rows {theirs:.4f}: {percent(change)}, "
        f"{_explained(power, limit, passed)} (gate.max_ne_increase)"
    )
    return Check("NE against the incumbent", "gate.max_ne_increase", passed, words)


def _explained(power: Power, limit: float, passed: bool) -> str:
    if passed:
        return f"at most {power.bound:+.2%} with {power.power:.0%} confidence, within {limit:+.2%}"
    if power.surely_above(limit):
        return f"a rise with at least {power.power:.0%} confidence, beyond {limit:+.2%}"
    if (testable := power.instead_of(limit)) is not None:
        return (
            f"{TOO_FEW}: a rise of up to {power.bound:+.2%} is not ruled out with {power.power:.0%} confidence, "
            f"the limit is {limit:+.2%}; use "
            f"about {power.rows_for(limit):,} test rows, or a limit that {power.rows:,} rows can resolve: "
            f"{testable:g}"
        )
    return f"possibly as much as {power.bound:+.2%}, beyond {limit:+.2%}"


def _shift(shift: Shift, limit: float, *, better: bool) -> Check:
    """Predictions that moved hold the candidate unless it is surely better: then they are the reason."""
    within = shift.psi <= limit
    words = (
        f"predictions moved from the incumbent's by KS {shift.ks:.3f}, PSI {shift.psi:.3f}, "
        f"{'within' if within else 'above'} {limit:g} (gate.max_psi)"
    )
    warned = not within and better
    words += "; NE is clearly better, so this is only a warning" if warned else ""
    return Check("prediction shift", "gate.max_psi", within or better, words, warned)


def against_best(record: GateRecord, ours: ModelFigures, settings: GateConfig) -> Iterator[Check]:
    """The candidate beside the best of the last versions: small rises that all pass must not add up."""
    limit, best = settings.max_ne_increase, record.best
    if limit is None or settings.best_of_last == 1 or best is None:
        return
    name, setting = f"NE against the best of the last {settings.best_of_last} versions", "gate.best_of_last"
    notes = list(best.notes)
    if bad := best.predictions_not_finite:
        notes.append(f"{bad:,} of the predictions of {best.version} are not finite")
    if best.ne is None or best.change is None:
        words = "; ".join([*notes, "no version before the incumbent was compared"])
        if not notes:
            words = "by their records the incumbent is the best of them"
        yield Check(name, setting, True, f"{words} (gate.best_of_last)", warned=bool(notes))
        return
    passed = not_worse(best.change, limit)
    words = (
        f"NE is {ours.ne.point:.4f}, that of {best.version} on the same rows {best.ne.point:.4f}: "
        f"{percent(best.change)}, {place(best.change.point, limit, passed)} {limit:+.2%} (gate.max_ne_increase)"
    )
    if not passed:
        words += ": small rises that each passed have added up, and that version is better"
    yield Check(name, setting, passed, "; ".join([words, *notes]), warned=passed and bool(notes))


def against_baseline(record: GateRecord, ours: ModelFigures, settings: GateConfig) -> Iterator[Check]:
    """A first model beside a simple one that was trained on the same rows in a few seconds.

    It is held where it surely misses its share of the simple one's gain, and warned of where it is surely worse.
    """
    limit, simple = settings.min_baseline_gain, record.baseline
    if limit is None or simple is None:
        return
    theirs, change, gain, spare = simple.ne, simple.change, simple.gain, simple.spare
    if theirs is None or change is None or gain is None or spare is None:
        return
    name, setting = "gain beside a simple model", "gate.min_baseline_gain"
    words = (
        f"NE is {ours.ne.point:.4f}, that of a logistic regression on the same rows {theirs.point:.4f}: "
        f"{percent(change)}"
    )
    if theirs.high >= 1:
        words += f"; the simple model is no better than the base rate, so this check does not apply ({setting})"
        yield Check(name, setting, True, words)
        return
    passed, worse = spare.high >= 0, change.low > 0
    asked = f"not surely below the {limit:.0%} that are asked for" if passed else f"below {limit:.0%}"
    words += f"; {gain.point:.0%} of its gain, {asked} ({setting})"
    if not passed:
        words += ": the model has not learnt what a simple one learns in one pass; train.epochs=3 trains it longer"
    elif worse:
        words += "; a simple model is clearly better: more steps (train.epochs) may help"
    yield Check(name, setting, passed, words, warned=passed and worse)


def labels(record: GateRecord, settings: GateConfig) -> Iterator[Check]:
    """Whether these rows are still those the incumbent knew: a model trained on spoilt labels fits spoilt labels.

    The incumbent was checked when it was published. If it looks wrong on today's rows, either the traffic or the labels
    have changed, and a person must look. What chance explains, on today's rows and on those of then, does not count.
    """
    former, ours, theirs = record.former, record.candidate, record.incumbent
    if former is None or ours is None or theirs is None:
        return
    if settings.max_label_shift is not None:
        yield _click_rate(theirs.calibration, former, settings.max_label_shift, record.confidence)
        yield _by_prediction(theirs, former, settings.max_label_shift, record.confidence)
    if settings.max_ne_drift is not None:
        for whose, model in (("", ours), (" of the incumbent on these rows", theirs)):
            yield _drift(whose, model.ne, former, settings.max_ne_drift, record.confidence)


def _click_rate(now: Interval, former: Former, limit: float, confidence: float) -> Check:
    then = former.calibration
    shift = math.log(now.point / then) if now.point > 0 and then > 0 else math.inf
    chance = _chance(now, then, former.calibration_error, confidence)
    passed = abs(shift) - chance <= math.log1p(limit)
    words = (
        f"calibration of the incumbent on these rows is {now.point:.4f} [{now.low:.4f}, {now.high:.4f}], {then:.4f} "
        f"{WHEN}: {_spoilt(passed)} ({place(abs(shift), math.log1p(limit), passed)} {limit:.0%}, gate.max_label_shift)"
    )
    return Check("click rate", "gate.max_label_shift", passed, words)


def _by_prediction(theirs: ModelFigures, former: Former, limit: float, confidence: float) -> Check:
    off, before = theirs.calibration_by_prediction, former.calibration_by_prediction
    errors = (theirs.calibration_by_prediction_error, former.calibration_by_prediction_error)
    chance = quantile_of(confidence) * math.hypot(*errors)
    passed = off - before - chance <= limit
    words = (
        f"calibration of the incumbent by prediction is off by {off:.1%} of the clicks, {before:.1%} {WHEN} "
        f"(chance explains {chance:.1%}): {_spoilt(passed)} ({place(off - before, limit, passed)} {limit:.0%}, "
        "gate.max_label_shift)"
    )
    return Check("labels", "gate.max_label_shift", passed, words)


def _drift(whose: str, now: Interval, former: Former, limit: float, confidence: float) -> Check:
    rise, chance = now.point / former.ne - 1, _chance(now, former.ne, former.ne_error, confidence)
    passed = math.log1p(rise) - chance <= math.log1p(limit)
    words = (
        f"NE{whose} is {now.point:.4f} [{now.low:.4f}, {now.high:.4f}], the incumbent's was {former.ne:.4f} {WHEN}: "
        f"{rise:+.1%}, {place(rise, limit, passed)} {limit:+.0%} (gate.max_ne_drift)"
    )
    return Check(f"NE{whose} against former days", "gate.max_ne_drift", passed, words)


def _chance(now: Interval, then: float, error_then: float, confidence: float) -> float:
    """What chance explains of the logarithm of a figure ``now`` over ``then``, each with its error."""
    if now.point <= 0 or then <= 0:
        return 0.0
    return quantile_of(confidence) * math.hypot(error_of(now, confidence) / now.point, error_then / then)


def _spoilt(passed: bool) -> str:
    return "as before" if passed else "the labels are wrong, or the traffic has changed"
