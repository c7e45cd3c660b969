"""Whether these rows are still those that the incumbent knew: a model trained on spoilt labels fits spoilt labels.

The incumbent was checked when it was published. If it looks wrong on today's rows, either the traffic or the labels
have changed, and a person must look. What chance explains, on today's rows and on those of that night, does not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pipeline.config.gate import GateConfig
from pipeline.evaluation.gate.answers import WHEN, place, with_ends
from pipeline.evaluation.gate.power import error_of, quantile_of
from pipeline.records.gate import Check, Former, Interval, ModelFigures
from pipeline.specs.gate_check import GateCheck, GateInputs


class Labels(GateCheck):
    """``max_label_shift`` and ``max_ne_drift``, against the figures of the night when the incumbent was published."""

    name = "labels"

    def decide(self, inputs: GateInputs) -> Iterator[Check]:
        """Yield answers on the incumbent's calibration, in total and by prediction, and on the NE of both models."""
        record = inputs.record
        settings: GateConfig = inputs.settings
        former, candidate, incumbent = record.former, record.candidate, record.incumbent
        if former is None or candidate is None or incumbent is None:
            return
        if settings.max_label_shift is not None:
            yield _check_click_rate(incumbent.calibration, former, settings.max_label_shift, record.confidence)
            yield _check_by_prediction(incumbent, former, settings.max_label_shift, record.confidence)
        if settings.max_ne_drift is not None:
            yield _check_drift("", candidate.ne, former, settings.max_ne_drift, record.confidence)
            whose = " of the incumbent on these rows"
            yield _check_drift(whose, incumbent.ne, former, settings.max_ne_drift, record.confidence)


def _check_click_rate(now: Interval, former: Former, limit: float, confidence: float) -> Check:
    # Clicks may be lost or doubled. The incumbent's calibration is compared, not the click rate itself, which moves
    # with the traffic, as predictions do. Logarithms make half and twice the clicks equally far off.
    then = former.calibration
    shift = math.inf
    if now.point > 0 and then > 0:
        shift = math.log(now.point / then)
    chance = _explained_by_chance(now, then, former.calibration_error, confidence)
    passed = abs(shift) - chance <= math.log1p(limit)
    words = (
        f"calibration of the incumbent on these rows is {with_ends(now)}; it was {then:.4f} "
        f"{WHEN}: {_explain(passed)} ({place(abs(shift), math.log1p(limit), passed)} {limit:.0%}, gate.max_label_shift)"
    )
    return Check("click rate", "gate.max_label_shift", passed, words)


def _check_by_prediction(incumbent: ModelFigures, former: Former, limit: float, confidence: float) -> Check:
    # Labels that were mixed up leave the total as it is, but show where predictions are high and low.
    now, then = incumbent.calibration_by_prediction, former.calibration_by_prediction
    error = math.hypot(incumbent.calibration_by_prediction_error, former.calibration_by_prediction_error)
    chance = quantile_of(confidence) * error
    passed = now - then - chance <= limit
    words = (
        f"calibration of the incumbent by prediction is off by {now:.1%} of the clicks; it was off by {then:.1%} "
        f"{WHEN}, and chance explains a rise of {chance:.1%}: {_explain(passed)} "
        f"({place(now - then, limit, passed)} {limit:.0%}, gate.max_label_shift)"
    )
    return Check("labels", "gate.max_label_shift", passed, words)


def _check_drift(whose: str, now: Interval, former: Former, limit: float, confidence: float) -> Check:
    rise = now.point / former.ne - 1
    chance = _explained_by_chance(now, former.ne, former.ne_error, confidence)
    # Check only a rise: rows that are easier to predict than before are no sign of spoilt labels.
    passed = math.log1p(rise) - chance <= math.log1p(limit)
    then = "it was" if whose else "the incumbent's was"
    words = (
        f"NE{whose} is {with_ends(now)}; {then} {former.ne:.4f} {WHEN}: "
        f"{rise:+.1%}, {place(rise, limit, passed)} {limit:+.0%} (gate.max_ne_drift)"
    )
    return Check(f"NE{whose} against former days", "gate.max_ne_drift", passed, words)


def _explained_by_chance(now: Interval, then: float, error_then: float, confidence: float) -> float:
    # Return the part of the logarithm of now over then that chance explains. The relative errors of the two nights are
    # independent.
    if now.point <= 0 or then <= 0:
        return 0.0
    return quantile_of(confidence) * math.hypot(error_of(now, confidence) / now.point, error_then / then)


def _explain(passed: bool) -> str:
    return "as before" if passed else "the labels are wrong, or the traffic has changed"


LABELS = Labels()
