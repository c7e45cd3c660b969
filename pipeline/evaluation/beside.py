"""The gate's questions beside other models: the incumbent, the best of the last versions, a simple model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import NormalDist
from typing import Any

from pipeline.config import GateConfig
from pipeline.evaluation.check import WHEN, Check, not_worse, percent, place
from pipeline.evaluation.power import Power, error_of

TOO_FEW = "too few rows to tell"


def power_of(record: Mapping[str, Any], settings: GateConfig) -> Power:
    """What the rows of ``record``, which has a change of NE, tell of it."""
    change = record["change"]["ne"]
    return Power(record["rows"], change[0], error_of(change, record["confidence"]), settings.power)


def against_incumbent(record: Mapping[str, Any], settings: GateConfig) -> Iterator[Check]:
    """The candidate beside the incumbent on the same rows."""
    if "incumbent" not in record:
        return
    if settings.max_ne_increase is not None:
        yield _no_worse(record, settings, settings.max_ne_increase)
    if settings.max_psi is not None:
        yield _shift(record, settings.max_psi)


def _no_worse(record: Mapping[str, Any], settings: GateConfig, limit: float) -> Check:
    """A rise of NE as large as ``limit`` must have been seen, had there been one."""
    ours, theirs, change = record["candidate"]["ne"][0], record["incumbent"]["ne"][0], record["change"]["ne"]
    power = power_of(record, settings)
    passed = power.bound <= limit  # not true of NaN
    words = (
        f"NE is {ours:.4f}, the incumbent's on the same rows {theirs:.4f}: {percent(change)}, "
        f"{_told(power, limit, passed)} (gate.max_ne_increase)"
    )
    return Check("NE against the incumbent", "gate.max_ne_increase", passed, words)


def _told(power: Power, limit: float, passed: bool) -> str:
    if passed:
        return f"at most {power.bound:+.2%} ({power.power:.0%} sure), within {limit:+.2%}"
    if power.change > limit and power.change > power.quantile * power.error:
        return f"at least {power.power:.0%} sure that it rose, beyond {limit:+.2%}"
    if (needed := power.rows_for(limit)) is not None and needed > power.rows:
        return (
            f"{TOO_FEW}: a rise of up to {power.bound:+.2%} is not ruled out, the limit is {limit:+.2%}; it takes "
            f"about {needed:,} held-out rows, or a limit that {power.rows:,} rows can tell: "
            f"{_upwards(max(power.resolved, power.bound))}"
        )
    return f"perhaps as much as {power.bound:+.2%}, beyond {limit:+.2%}"


def _upwards(value: float) -> str:
    """A share with one digit more than its leading one, rounded up, as a setting is typed."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / unit) * unit:.2g}"


def _shift(record: Mapping[str, Any], limit: float) -> Check:
    """Predictions that moved are held unless the candidate is surely better; then they are what made it so."""
    shift, better = record["shift"], record["change"]["ne"][2] < 0
    within = shift["psi"] <= limit
    words = (
        f"predictions moved from the incumbent's by KS {shift['ks']:.3f}, PSI {shift['psi']:.3f}, "
        f"{'within' if within else 'above'} {limit:g} (gate.max_psi)"
    )
    warned = not within and better
    words += "; NE is surely better, so this only warns" if warned else ""
    return Check("prediction shift", "gate.max_psi", within or better, words, warned)


def against_best(record: Mapping[str, Any], settings: GateConfig) -> Iterator[Check]:
    """The candidate beside the best of the last versions: small rises that all pass must not add up."""
    limit, found = settings.max_ne_increase, record.get("best")
    if limit is None or settings.best_of_last == 1 or found is None:
        return
    name, setting = f"NE against the best of the last {settings.best_of_last} versions", "gate.best_of_last"
    notes = list(found.get("notes", ()))
    if bad := found.get("predictions_not_finite"):
        notes.append(f"{bad:,} of the predictions of {found['version']} are not finite")
    if "change" not in found:
        words = "; ".join([*notes, "no version before the incumbent was compared with"])
        if not notes:
            words = "the incumbent is the best of them by their records"
        yield Check(name, setting, True, f"{words} (gate.best_of_last)", warned=bool(notes))
        return
    passed = not_worse(found["change"], limit)
    words = (
        f"NE is {record['candidate']['ne'][0]:.4f}, that of {found['version']} on the same rows {found['ne'][0]:.4f}: "
        f"{percent(found['change'])}, {place(found['change'][0], limit, passed)} {limit:+.2%} (gate.max_ne_increase)"
    )
    if not passed:
        words += ": rises that passed one by one have added up, and that version would serve better"
    yield Check(name, setting, passed, "; ".join([words, *notes]), warned=passed and bool(notes))


def against_baseline(record: Mapping[str, Any], settings: GateConfig) -> Iterator[Check]:
    """A first model beside a simple one that was trained on the same rows in a few seconds.

    It is held where it surely misses its share of the simple one's gain, and warned of where it is surely worse.
    """
    limit, found = settings.min_baseline_gain, record.get("baseline")
    if limit is None or found is None or "change" not in found:
        return
    name, setting = "gain beside a simple model", "gate.min_baseline_gain"
    ours, theirs, change = record["candidate"]["ne"][0], found["ne"], found["change"]
    words = f"NE is {ours:.4f}, that of a logistic regression on the same rows {theirs[0]:.4f}: {percent(change)}"
    if theirs[2] >= 1:
        words += f"; the simple model knows no more than the base rate, so nothing is asked ({setting})"
        yield Check(name, setting, True, words)
        return
    share = found["gain"][0]
    passed, worse = found["spare"][2] >= 0, change[1] > 0
    words += f"; {share:.0%} of its gain, {'not ' if passed else ''}below {limit:.0%} ({setting})"
    if not passed:
        words += ": the model has not learnt what a simple one learns in one pass; train.epochs=3 trains it longer"
    elif worse:
        words += "; a simple model is surely better: more steps (train.epochs) may help"
    yield Check(name, setting, passed, words, warned=passed and worse)


def labels(record: Mapping[str, Any], settings: GateConfig) -> Iterator[Check]:
    """Whether these rows are still those the incumbent knew: a model trained on spoilt labels fits spoilt labels.

    The incumbent was checked when it was published. Where today's rows make it look wrong, either the world has changed
    or the labels have; both want a person. What chance explains, on today's rows and on those of then, does not count.
    """
    former = record.get("former")
    if former is None or "incumbent" not in record:
        return
    if settings.max_label_shift is not None:
        yield _click_rate(record, former, settings.max_label_shift)
        yield _by_prediction(record, former, settings.max_label_shift)
    if settings.max_ne_drift is not None:
        for whose, model in (("", "candidate"), (" of the incumbent on these rows", "incumbent")):
            yield _drift(record, former, whose, record[model]["ne"], settings.max_ne_drift)


def _click_rate(record: Mapping[str, Any], former: Mapping[str, Any], limit: float) -> Check:
    now, then = record["incumbent"]["calibration"], former["calibration"]
    shift = math.log(now[0] / then) if now[0] > 0 and then > 0 else math.inf
    chance = _chance(record, now, then, former.get("calibration_error", 0.0))
    passed = abs(shift) - chance <= math.log1p(limit)
    words = (
        f"calibration of the incumbent on these rows is {now[0]:.4f} [{now[1]:.4f}, {now[2]:.4f}], {then:.4f} {WHEN}: "
        f"{_spoilt(passed)} ({place(abs(shift), math.log1p(limit), passed)} {limit:.0%}, gate.max_label_shift)"
    )
    return Check("click rate", "gate.max_label_shift", passed, words)


def _by_prediction(record: Mapping[str, Any], former: Mapping[str, Any], limit: float) -> Check:
    theirs = record["incumbent"]
    off, before = theirs["calibration_by_prediction"], former["calibration_by_prediction"]
    errors = (theirs.get("calibration_by_prediction_error", 0.0), former.get("calibration_by_prediction_error", 0.0))
    chance = _quantile(record) * math.hypot(*errors)
    passed = off - before - chance <= limit
    words = (
        f"calibration of the incumbent by prediction is off by {off:.1%} of the clicks, {before:.1%} {WHEN} "
        f"(chance explains {chance:.1%}): {_spoilt(passed)} ({place(off - before, limit, passed)} {limit:.0%}, "
        "gate.max_label_shift)"
    )
    return Check("labels", "gate.max_label_shift", passed, words)


def _drift(record: Mapping[str, Any], former: Mapping[str, Any], whose: str, now: list[float], limit: float) -> Check:
    rise, chance = now[0] / former["ne"] - 1, _chance(record, now, former["ne"], former.get("ne_error", 0.0))
    passed = math.log1p(rise) - chance <= math.log1p(limit)
    words = (
        f"NE{whose} is {now[0]:.4f} [{now[1]:.4f}, {now[2]:.4f}], the incumbent's was {former['ne']:.4f} {WHEN}: "
        f"{rise:+.1%}, {place(rise, limit, passed)} {limit:+.0%} (gate.max_ne_drift)"
    )
    return Check(f"NE{whose} against former days", "gate.max_ne_drift", passed, words)


def _chance(record: Mapping[str, Any], now: list[float], then: float, error_then: float) -> float:
    """What chance explains of the logarithm of a figure ``now`` over ``then``, each with its error."""
    error_now = error_of(now, record["confidence"])
    return _quantile(record) * math.hypot(error_now / now[0], error_then / then) if now[0] > 0 and then > 0 else 0.0


def _quantile(record: Mapping[str, Any]) -> float:
    return NormalDist().inv_cdf((1 + record["confidence"]) / 2)


def _spoilt(passed: bool) -> str:
    return "as before" if passed else "labels are spoilt, or the traffic has changed"
