"""The gate: PASS or HOLD for a candidate, with reasons in words and numbers.

``measure`` (``compared.py``) takes the figures, ``judge`` asks every question of them. Each question is one setting of
the configuration's group ``gate``; null switches it off. docs/gate.md says how to read the answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.config import GateConfig

PASS, HOLD = "PASS", "HOLD"
WHEN = "when it was published"
WEIGHTS, PREDICTIONS = "finite weights", "finite predictions"  # what no reason lets through
SLICE = "slice: "  # begins the names of checks of single slices


@dataclass(frozen=True)
class Check:
    """The answer to one question: ``words`` say it with its numbers, ``setting`` decides it."""

    name: str
    setting: str
    passed: bool
    words: str


def judge(record: dict[str, Any], settings: GateConfig) -> dict[str, Any]:
    """``record`` (of ``measure``, with what publishing knows) with ``checks``, ``verdict`` and ``reasons``.

    Also looked at where they are there: ``weights_not_finite`` {table or parameter: values}, ``coverage`` {feature:
    share of lookups that trained rows serve}, ``former`` (the incumbent's own record), ``not_comparable`` (why it could
    not be scored). A HOLD becomes a PASS by ``gate.force``, whose reason is recorded under ``forced``, unless values
    are not finite.
    """
    checks = [*_weights(record), *_rows(record, settings)]
    if "candidate" in record:
        checks += [*_floors(record, settings), *_against_incumbent(record, settings)]
        checks += [*_labels(record, settings), *_slices(record, settings), *_serving(record, settings)]
    checks += _coverage(record, settings)
    failed = [check for check in checks if not check.passed]
    reasons = [check.words for check in failed]
    verdict = HOLD if reasons else PASS
    judged = {**record, "verdict": verdict, "reasons": reasons, "checks": [asdict(check) for check in checks]}
    if reasons and settings.force and not any(check.name in (WEIGHTS, PREDICTIONS) for check in failed):
        judged |= {"verdict": PASS, "forced": settings.force, "reasons": [f"forced: {settings.force}", *reasons]}
    return judged


def _above(
    name: str, setting: str, value: float, limit: float | None, what: str, shown: str = ".4f"
) -> Iterator[Check]:
    """Whether ``value`` stays at or below ``limit``; nothing where there is no limit. ``shown``: how it is written."""
    if limit is not None:
        passed = value <= limit  # not true of NaN
        words = f"{what} {value:{shown}}, {'within' if passed else 'above'} {limit:g} (gate.{setting})"
        yield Check(name, f"gate.{setting}", passed, words)


def _weights(record: Mapping[str, Any]) -> Iterator[Check]:
    """Weights and predictions that are not finite are never let through."""
    bad = {name: count for name, count in record.get("weights_not_finite", {}).items() if count}
    said = ", ".join(f"{name} {count:,}" for name, count in bad.items())
    words = f"weights that are not finite: {said}" if bad else "all weights are finite"
    yield Check(WEIGHTS, "", not bad, words)
    wrong = {name: count for name, count in record["predictions_not_finite"].items() if count}
    said = " and ".join(f"{count:,} of the {name}'s" for name, count in wrong.items())
    words = f"{said} predictions are not finite" if wrong else "all predictions are finite"
    yield Check(PREDICTIONS, "", not wrong, words)
    if problem := record.get("not_comparable"):
        yield Check("comparable", "", False, f"the incumbent cannot be scored on these rows: {problem}")


def _rows(record: Mapping[str, Any], settings: GateConfig) -> Iterator[Check]:
    rows = record["rows"]
    passed = rows >= settings.min_rows
    words = f"{rows:,} rows scored, {'enough' if passed else 'too few'} for {settings.min_rows:,} (gate.min_rows)"
    yield Check("rows", "gate.min_rows", passed, words)


def _floors(record: Mapping[str, Any], settings: GateConfig) -> Iterator[Check]:
    """What every model must reach, incumbent or not."""
    ours = record["candidate"]
    yield from _above("NE", "max_ne", ours["ne"][0], settings.max_ne, "NE is")
    if settings.min_auc is not None:
        passed = ours["auc"][0] >= settings.min_auc
        words = f"AUC is {ours['auc'][0]:.4f}, {'not ' if passed else ''}below {settings.min_auc:g} (gate.min_auc)"
        yield Check("AUC", "gate.min_auc", passed, words)
    yield from _calibration("calibration", "max_calibration_error", ours, settings.max_calibration_error, "calibration")


def _calibration(
    name: str, setting: str, figures: Mapping[str, Any], limit: float | None, what: str
) -> Iterator[Check]:
    """Whether calibration may be within ``limit`` of 1: its interval must reach that far."""
    if limit is None:
        return
    point, low, high = figures["calibration"]
    passed = low <= 1 + limit and high >= 1 - limit
    words = (
        f"{what} is {point:.4f} [{low:.4f}, {high:.4f}]: predicted clicks are {abs(point - 1):.1%} "
        f"{'above' if point > 1 else 'below'} the observed ones, {_place(abs(point - 1), limit, passed)} {limit:.1%} "
        f"(gate.{setting})"
    )
    yield Check(name, f"gate.{setting}", passed, words)


def _against_incumbent(record: Mapping[str, Any], settings: GateConfig) -> Iterator[Check]:
    """The candidate beside the incumbent on the same rows: worse only counts where chance does not explain it."""
    if "incumbent" not in record:
        return
    ours, theirs, change = record["candidate"], record["incumbent"], record["change"]["ne"]
    if settings.max_ne_increase is not None:
        passed = _not_worse(change, settings.max_ne_increase)
        words = (
            f"NE is {ours['ne'][0]:.4f}, the incumbent's on the same rows {theirs['ne'][0]:.4f}: {_percent(change)}, "
            f"{_place(change[0], settings.max_ne_increase, passed)} +{settings.max_ne_increase:.2%} "
            "(gate.max_ne_increase)"
        )
        yield Check("NE against the incumbent", "gate.max_ne_increase", passed, words)
    shift = record["shift"]
    what = f"predictions moved from the incumbent's by KS {shift['ks']:.3f}, PSI"
    yield from _above("prediction shift", "max_psi", shift["psi"], settings.max_psi, what, ".3f")


def _place(value: float, limit: float, passed: bool) -> str:
    """How a figure lies to its limit, in words."""
    if value <= limit:
        return "within"
    return "by chance perhaps beyond" if passed else "beyond"


def _not_worse(change: list[float], limit: float) -> bool:
    """Whether a rise of NE lies within ``limit``, or may be chance: its interval reaches zero."""
    point, low, _ = change
    return point <= limit or low <= 0


def _percent(interval: list[float]) -> str:
    point, low, high = interval
    return f"{point:+.2%} [{low:+.2%}, {high:+.2%}]"


def _labels(record: Mapping[str, Any], settings: GateConfig) -> Iterator[Check]:
    """Whether these rows are still those the incumbent knew: a model trained on spoilt labels fits spoilt labels.

    The incumbent was checked when it was published. Where today's rows make it look wrong, either the world has changed
    or the labels have; both want a person.
    """
    former = record.get("former")
    if former is None or "incumbent" not in record:
        return
    theirs, ours = record["incumbent"], record["candidate"]
    now, then = theirs["calibration"][0], former["calibration"]
    limit = settings.max_label_shift
    if limit is not None:
        passed = 1 / (1 + limit) <= now / then <= 1 + limit
        words = (
            f"calibration of the incumbent on these rows is {now:.4f}, {then:.4f} {WHEN}: "
            f"{_spoilt(passed)} ({'within' if passed else 'beyond'} {limit:.0%}, gate.max_label_shift)"
        )
        yield Check("click rate", "gate.max_label_shift", passed, words)
        off, before = theirs["calibration_by_prediction"], former["calibration_by_prediction"]
        passed = off - before <= limit
        words = (
            f"calibration of the incumbent by prediction is off by {off:.1%} of the clicks, {before:.1%} {WHEN}: "
            f"{_spoilt(passed)} ({'within' if passed else 'beyond'} {limit:.0%}, gate.max_label_shift)"
        )
        yield Check("labels", "gate.max_label_shift", passed, words)
    if settings.max_ne_drift is not None:
        for whose, figures in (("", ours), (" of the incumbent on these rows", theirs)):
            rise = figures["ne"][0] / former["ne"] - 1
            passed = rise <= settings.max_ne_drift
            words = (
                f"NE{whose} is {figures['ne'][0]:.4f}, the incumbent's was {former['ne']:.4f} {WHEN}: {rise:+.1%}, "
                f"{'within' if passed else 'beyond'} +{settings.max_ne_drift:.0%} (gate.max_ne_drift)"
            )
            yield Check(f"NE{whose} against former days", "gate.max_ne_drift", passed, words)


def _spoilt(passed: bool) -> str:
    return "as before" if passed else "labels are spoilt, or the traffic has changed"


def _slices(record: Mapping[str, Any], settings: GateConfig) -> Iterator[Check]:
    """Every slice on its own; intervals are wide enough to hold for all of them together."""
    for each in record.get("slices", ()):
        name = f"{each['slice']}={each['value']}"
        limit = settings.slice_max_calibration_error
        yield from _calibration(
            f"{SLICE}calibration, {name}", "slice_max_calibration_error", each["candidate"], limit,
            f"calibration of slice {name} ({each['rows']:,} rows)",
        )  # fmt: skip
        if "change" in each and settings.slice_max_ne_increase is not None:
            limit, change = settings.slice_max_ne_increase, each["change"]["ne"]
            passed = _not_worse(change, limit)
            words = (
                f"NE of slice {name} ({each['rows']:,} rows) is {each['candidate']['ne'][0]:.4f}, the incumbent's "
                f"{each['incumbent']['ne'][0]:.4f}: {_percent(change)}, {_place(change[0], limit, passed)} "
                f"+{limit:.1%} (gate.slice_max_ne_increase)"
            )
            yield Check(f"{SLICE}NE, {name}", "gate.slice_max_ne_increase", passed, words)


def _serving(record: Mapping[str, Any], settings: GateConfig) -> Iterator[Check]:
    """Whether what would be served scores as what was trained: tables in few bits, the exported program."""
    serving, limit = record.get("serving"), settings.max_serving_gap
    if serving is None or limit is None:
        return
    passed = serving["gap"] <= limit
    words = (
        f"NE as served is {record['candidate']['ne'][0]:.5f}, as trained {serving['trained_ne']:.5f}: "
        f"{serving['gap']:+.3%}, {'within' if passed else 'beyond'} +{limit:.2%} (gate.max_serving_gap)"
    )
    yield Check("serving", "gate.max_serving_gap", passed, words)


def _coverage(record: Mapping[str, Any], settings: GateConfig) -> Iterator[Check]:
    """Ids that no trained row stands for are looked up in the row of unseen ids: the model knows nothing of them."""
    coverage: Mapping[str, float] = record.get("coverage", {})
    if not coverage:
        return
    mean = sum(coverage.values()) / len(coverage)
    if settings.min_coverage is not None:
        passed = mean >= settings.min_coverage
        lowest = min(coverage, key=lambda name: coverage[name])
        words = (
            f"trained rows serve {mean:.1%} of the lookups of a feature in the mean, "
            f"{'not ' if passed else ''}below {settings.min_coverage:.0%} (gate.min_coverage); lowest is feature "
            f"{lowest!r} with {coverage[lowest]:.1%}"
        )
        yield Check("coverage of ids", "gate.min_coverage", passed, words)
    before: Mapping[str, float] = (record.get("former") or {}).get("coverage", {})
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
