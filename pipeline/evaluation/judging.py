"""The gate: PASS or HOLD for a candidate, with reasons in words and numbers.

``measure`` (``compared.py``) takes the figures, ``judge`` asks every question of them. Each question is one setting of
the configuration's group ``gate``; null switches it off. docs/gate.md says how to read the answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipeline.config.gate import GateConfig
from pipeline.evaluation.beside import against_baseline, against_best, against_incumbent, labels, power_of
from pipeline.evaluation.carried import ask_importance
from pipeline.evaluation.check import WHEN, above, calibration, not_worse, percent, place
from pipeline.evaluation.gate_tasks import ask_tasks
from pipeline.records.gate import HOLD, PASS, Check, GateRecord, ModelFigures
from pipeline.units import printable

WEIGHTS, PREDICTIONS = "finite weights", "finite predictions"  # what no reason lets through
AGE = "age of the labels"
SLICE = "slice: "  # begins the names of checks of single slices


def judge(record: GateRecord, settings: GateConfig) -> GateRecord:
    """``record`` (of ``measure``, with what publishing knows) with checks, verdict, reasons and warnings.

    Publishing knows ``weights_not_finite``, ``coverage``, ``former`` (``former_figures`` of the incumbent),
    ``not_comparable``, and of ``best`` its ``version`` and ``notes``. A HOLD becomes a PASS by ``gate.force``, whose
    reason is recorded under ``forced``, unless values are not finite.
    """
    checks = [*_weights(record), *_rows(record, settings)]
    if record.candidate is not None:
        checks += [*_floors(record.candidate, settings), *against_baseline(record, record.candidate, settings)]
        checks += [*against_incumbent(record, settings), *against_best(record, record.candidate, settings)]
        checks += [*labels(record, settings), *_slices(record, settings), *ask_tasks(record, settings)]
        checks += _serving(record, record.candidate, settings)
    checks += [*_coverage(record, settings), *ask_importance(record)]
    if record.young_labels:
        checks = [Check(AGE, "data.label.window_days", True, record.young_labels, warned=True), *map(_waiting, checks)]
    failed = [check for check in checks if not check.passed]
    reasons = tuple(check.words for check in failed)
    power = None
    if record.change is not None and settings.max_ne_increase is not None:
        power = power_of(record, record.change, settings).record(settings.max_ne_increase)
    judged = replace(
        record,
        verdict=HOLD if reasons else PASS,
        reasons=reasons,
        checks=tuple(checks),
        power=power,
        warnings=tuple(check.words for check in checks if check.warned),
    )
    if reasons and settings.force and not any(check.name in (WEIGHTS, PREDICTIONS) for check in failed):
        forced = f"forced: {settings.force}"
        judged = replace(judged, verdict=PASS, forced=settings.force, reasons=(forced, *reasons))
    return judged


def _waiting(check: Check) -> Check:
    """A question about calibration lets pass what clicks that are still to come may explain."""
    if check.passed or not check.name.startswith(("calibration", f"{SLICE}calibration")):
        return check
    return replace(check, passed=True, warned=True, words=f"{check.words}; not held for, as clicks may still come")


def _weights(record: GateRecord) -> Iterator[Check]:
    """Weights and predictions that are not finite are never let through."""
    bad = {name: count for name, count in record.weights_not_finite.items() if count}
    message = ", ".join(f"{name} {count:,}" for name, count in bad.items())
    words = f"weights are not finite: {message}" if bad else "all weights are finite"
    yield Check(WEIGHTS, "", not bad, words)
    wrong = {name: count for name, count in record.predictions_not_finite.items() if count}
    message = " and ".join(f"{count:,} of the {name}'s" for name, count in wrong.items())
    words = f"{message} predictions are not finite" if wrong else "all predictions are finite"
    yield Check(PREDICTIONS, "", not wrong, words)
    if record.not_comparable:
        words = f"the incumbent cannot be scored on these rows: {record.not_comparable}"
        yield Check("comparable", "", False, words)


def _rows(record: GateRecord, settings: GateConfig) -> Iterator[Check]:
    rows = record.rows
    passed = rows >= settings.min_rows
    words = f"{rows:,} rows scored, {'enough' if passed else 'too few'} for {settings.min_rows:,} (gate.min_rows)"
    yield Check("rows", "gate.min_rows", passed, words)


def _floors(ours: ModelFigures, settings: GateConfig) -> Iterator[Check]:
    """What every model must reach, incumbent or not."""
    yield from above("NE", "max_ne", ours.ne.point, settings.max_ne, "NE is")
    if settings.min_auc is not None:
        passed = ours.auc.point >= settings.min_auc
        words = f"AUC is {ours.auc.point:.4f}, {'not ' if passed else ''}below {settings.min_auc:g} (gate.min_auc)"
        yield Check("AUC", "gate.min_auc", passed, words)
    yield from calibration("calibration", "max_calibration_error", ours, settings.max_calibration_error, "calibration")


def _slices(record: GateRecord, settings: GateConfig) -> Iterator[Check]:
    """Every slice on its own; intervals are wide enough to hold for all of them together."""
    for each in record.slices or ():
        name = f"{each.slice}={printable(each.value)}"
        limit = settings.slice_max_calibration_error
        yield from calibration(
            f"{SLICE}calibration, {name}",
            "slice_max_calibration_error",
            each.candidate,
            limit,
            f"calibration of slice {name} ({each.rows:,} rows)",
        )
        if each.change is not None and each.incumbent is not None and settings.slice_max_ne_increase is not None:
            limit, change = settings.slice_max_ne_increase, each.change.ne
            passed = not_worse(change, limit)
            words = (
                f"NE of slice {name} ({each.rows:,} rows) is {each.candidate.ne.point:.4f}, the incumbent's "
                f"{each.incumbent.ne.point:.4f}: {percent(change)}, {place(change.point, limit, passed)} "
                f"+{limit:.1%} (gate.slice_max_ne_increase)"
            )
            yield Check(f"{SLICE}NE, {name}", "gate.slice_max_ne_increase", passed, words)


def _serving(record: GateRecord, ours: ModelFigures, settings: GateConfig) -> Iterator[Check]:
    """Whether what would be served scores as what was trained: tables in few bits, the exported program."""
    serving, limit = record.serving, settings.max_serving_gap
    if serving is None or limit is None:
        return
    passed = serving.gap <= limit
    words = (
        f"NE as served is {ours.ne.point:.5f}, as trained {serving.trained_ne:.5f}: "
        f"{serving.gap:+.3%}, {'within' if passed else 'beyond'} +{limit:.2%} (gate.max_serving_gap)"
    )
    yield Check("serving", "gate.max_serving_gap", passed, words)


def _coverage(record: GateRecord, settings: GateConfig) -> Iterator[Check]:
    """Ids that no trained row stands for are looked up in the row of unseen ids: the model knows nothing of them."""
    coverage = record.coverage
    if not coverage:
        return
    mean = sum(coverage.values()) / len(coverage)
    if settings.min_coverage is not None:
        passed = mean >= settings.min_coverage
        lowest = min(coverage, key=lambda name: coverage[name])
        words = (
            f"trained rows serve {mean:.1%} of a feature's lookups on average, "
            f"{'not ' if passed else ''}below {settings.min_coverage:.0%} (gate.min_coverage); lowest is feature "
            f"{lowest!r} with {coverage[lowest]:.1%}"
        )
        yield Check("coverage of ids", "gate.min_coverage", passed, words)
    before = record.former.coverage if record.former is not None else {}
    limit = settings.max_coverage_drop
    falls = {name: before[name] - share for name, share in coverage.items() if name in before}
    if limit is not None and falls:
        worst = max(falls, key=lambda name: falls[name])
        passed = falls[worst] <= limit
        words = (
            f"coverage of feature {worst!r} is {coverage[worst]:.1%}, with the incumbent {before[worst]:.1%} {WHEN}: "
            f"{'within' if passed else 'beyond'} {limit:.0%} (gate.max_coverage_drop)"
        )
        yield Check("coverage against former days", "gate.max_coverage_drop", passed, words)
