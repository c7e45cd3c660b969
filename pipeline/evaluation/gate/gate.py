"""The gate: PASS or HOLD for a candidate, with reasons in words and numbers.

``measure.py`` takes the figures, and each check decides one question of them (``checks/``, ``specs/gate_check.py``).
A check is a ``GateCheck``; its answers, with words and numbers, are ``records.gate.Check``. ``stages/release_gate.py``
brings the scores, by way of ``budget.judge_within_budget``.
Most limits are settings of group ``gate``; null switches a check off. docs/gate.md says how to read the answers.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from pipeline.config.gate import GateConfig
from pipeline.core.registry import BUILT_IN
from pipeline.core.units import printable
from pipeline.evaluation.gate.power import Level, power_of, power_of_slice
from pipeline.records.error_budget import ErrorBudget
from pipeline.records.gate import HOLD, PASS, Check, GateRecord
from pipeline.specs.gate_check import GATE_CHECKS, GateCheck, GateInputs, ScoredRows

AGE = "age of the labels"
# Prefixes of the names of calibration checks, of all rows and of a slice.
CALIBRATION = ("calibration", "slice: calibration")

log = logging.getLogger(__name__)


def judge(record: GateRecord, settings: GateConfig, rows: ScoredRows | None = None) -> GateRecord:
    """Ask every check, and decide.

    Args:
        record: The figures of ``measure``, with what publishing knows: ``weights_not_finite``, ``coverage``, ``former``
            (``former_figures`` of the incumbent), ``not_comparable``, of ``best`` its ``version`` and ``notes``, and
            with ``gate.budget`` the ``budget`` that this look has (``budget.judge_within_budget``).
        settings: Group ``gate``.
        rows: The rows of those figures, for checks that measure something of their own.

    Returns:
        ``record`` with checks, verdict, reasons and warnings. A HOLD becomes a PASS by ``settings.force``, which is
        recorded under ``forced``, unless a check holds the model that no reason overrides.
    """
    # 1. Ask the built-in checks, in the order of the record.
    answers: list[Check] = []
    added: list[GateCheck] = []
    can_be_forced = True
    for check in GATE_CHECKS:
        if GATE_CHECKS.origin(check.name) != BUILT_IN:
            added.append(check)
            continue
        answered = _ask(check, record, settings, rows)
        answers += answered
        can_be_forced &= check.can_be_forced or all(answer.passed for answer in answered)

    # 2. Clicks that are still to come may explain why predicted clicks exceed the observed ones, so failed checks of
    #    calibration become warnings. This applies only to built-in checks: a package's check may mean something else
    #    by such a name.
    if record.young_labels:
        found, answers = answers, [Check(AGE, "data.label.window_days", True, record.young_labels, warned=True)]
        for answer in found:
            if not answer.passed and answer.name.startswith(CALIBRATION):
                words = f"{answer.words}; not held for, as clicks may still come"
                answer = replace(answer, passed=True, warned=True, words=words)
            answers.append(answer)

    # 3. Ask the checks of packages, by name, because the order in which packages are found depends on the machine.
    for check in sorted(added, key=lambda check: check.name):
        answered = _ask_added(check, record, settings, rows)
        answers += answered
        can_be_forced &= check.can_be_forced or all(answer.passed for answer in answered)

    # 4. Give the verdict: one failed check is enough to hold the model.
    reasons = tuple(answer.words for answer in answers if not answer.passed)
    power = None
    if record.change is not None and settings.max_ne_increase is not None:
        power = power_of(record, record.change, Level.of(record, settings)).record(settings.max_ne_increase)
    judged = replace(
        record,
        verdict=HOLD if reasons else PASS,
        reasons=reasons,
        checks=tuple(answers),
        power=power,
        budget=_with_slices(record, settings),
        warnings=tuple(answer.words for answer in answers if answer.warned),
    )
    if reasons and settings.force and can_be_forced:
        judged = replace(judged, verdict=PASS, forced=settings.force, reasons=(f"forced: {settings.force}", *reasons))
    return judged


def _with_slices(record: GateRecord, settings: GateConfig) -> ErrorBudget | None:
    # Return the look's budget with the slices that it covers and those that it does not.
    limit, level = settings.slice_max_ne_increase, Level.of(record, settings)
    if record.budget is None or limit is None:
        return record.budget
    covered: list[str] = []
    not_covered: list[str] = []
    for part in record.slices or ():
        if part.change is None:
            continue
        name, power = f"{part.slice}={printable(part.value)}", power_of_slice(record, part, part.change, level)
        if level.covers(power, limit):
            covered.append(name)
        else:
            not_covered.append(name)
    return replace(record.budget, covered=tuple(covered), not_covered=tuple(not_covered))


def _ask(check: GateCheck, record: GateRecord, settings: GateConfig, rows: ScoredRows | None) -> list[Check]:
    if check.needs_figures and record.candidate is None:
        # Without finite predictions there are no figures, and another check holds the model for that.
        return []
    options = None
    if check.settings is not None:
        # Settings that a program made without composing lack those of checks, which then have their defaults.
        options = getattr(settings, check.name, None) or check.settings()
    measured = check.measure(rows, options) if rows is not None else None
    return list(check.decide(GateInputs(record=record, settings=settings, options=options, measured=measured)))


def _ask_added(check: GateCheck, record: GateRecord, settings: GateConfig, rows: ScoredRows | None) -> list[Check]:
    """Ask a check of a package. What goes wrong in it holds the model: an error is not a pass."""
    answers = []
    try:
        for answer in _ask(check, record, settings, rows):
            if not isinstance(answer, Check):
                raise TypeError(f"it answered {answer!r}, expected a Check")
            # Convert NumPy's booleans, which comparisons of its numbers give and which are not JSON.
            answers.append(replace(answer, passed=bool(answer.passed), warned=bool(answer.warned)))
    except Exception as error:
        whose = ""
        if GATE_CHECKS.package(check.name):
            whose = f" of package {GATE_CHECKS.package(check.name)}"
        words = f"gate check {check.name!r}{whose} failed: {type(error).__name__}: {error}"
        log.warning("gate       %s", words, exc_info=error)
        return [Check(check.name, "", False, words)]
    return answers
