"""Answers of the gate that several checks give: a figure within a limit, in words that all of them share."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pipeline.evaluation.gate.power import Level, Power
from pipeline.records.gate import Check, Figures, Interval

WHEN = "when it was published"


def check_limit(name: str, setting: str, value: float, limit: float | None, what: str) -> Iterator[Check]:
    """Check that ``value`` is at most ``limit``.

    Args:
        name: The answer's name.
        setting: The limit's, within group ``gate``.
        value: The figure; NaN does not pass.
        limit: None: there is no answer.
        what: Begins the words: ``NE is``.
    """
    if limit is not None:
        passed = value <= limit
        verdict = "within" if passed else "above"
        yield Check(name, f"gate.{setting}", passed, f"{what} {value:.4f}, {verdict} {limit:g} (gate.{setting})")


def check_auc(name: str, setting: str, value: float, least: float | None, what: str) -> Iterator[Check]:
    """Check that the AUC ``value`` is at least ``least``; no answer for None. The rest is as for ``check_limit``."""
    if least is not None:
        passed = value >= least
        verdict = "not below" if passed else "below"
        yield Check(name, f"gate.{setting}", passed, f"{what} is {value:.4f}, {verdict} {least:g} (gate.{setting})")


def check_calibration(name: str, setting: str, figures: Figures, limit: float | None, what: str) -> Iterator[Check]:
    """Check that calibration may be within ``limit`` of 1, which its interval must reach; no answer for None."""
    if limit is None:
        return
    point = figures.calibration.point
    if not math.isfinite(figures.calibration.low):
        words = f"{what} cannot be told: rows with label 1 lie in too few blocks of rows (gate.blocks, gate.{setting})"
        yield Check(name, f"gate.{setting}", False, words)
        return
    passed = may_be_calibrated(figures.calibration, limit)
    side = "above" if point > 1 else "below"
    words = (
        f"{what} is {with_ends(figures.calibration)}: the predicted rate is {abs(point - 1):.1%} {side} the observed "
        f"one, {place(abs(point - 1), limit, passed)} {limit:.1%} (gate.{setting})"
    )
    yield Check(name, f"gate.{setting}", passed, words)


def may_be_calibrated(calibration: Interval, limit: float) -> bool:
    """Return whether the interval of a calibration reaches within ``limit`` of 1; False for NaN."""
    return calibration.low <= 1 + limit and calibration.high >= 1 - limit


def not_worse(change: Interval, limit: float) -> bool:
    """Return whether a rise of NE is within ``limit``, or may be chance: its interval reaches zero.

    So the best of the last versions, slices and tasks hold a model only if it is clearly worse (docs/gate.md). The
    comparison with the incumbent is a test of non-inferiority, in which doubt holds the model: see ``bound``.
    """
    return change.point <= limit or change.low <= 0


def explain_rise(power: Power, level: Level, limit: float, passed: bool, rows: str) -> str:
    """Say what the rows tell about a rise of NE.

    Args:
        power: What they tell.
        level: How sure it must be.
        limit: The largest rise that passes.
        passed: Whether the bound of ``power`` lies within it.
        rows: How many rows would tell ``limit``, in words.
    """
    if passed:
        return f"at most {power.bound:+.2%} with {level.words}, within {limit:+.2%}"
    if power.surely_above(limit):
        return f"a rise with at least {level.words}, beyond {limit:+.2%}"
    testable = power.testable_limit(limit)
    if testable is not None:
        return (
            f"too few rows to tell: a rise of up to {power.bound:+.2%} is not ruled out with {level.words}, the limit "
            f"is {limit:+.2%}; use {rows}, or a limit that {power.rows:,} rows can resolve: {testable:g}"
        )
    return f"possibly as much as {power.bound:+.2%}, beyond {limit:+.2%}"


def place(value: float, limit: float, passed: bool) -> str:
    """Say where a figure lies: within its limit, beyond it, or, if it passed, not clearly beyond it."""
    if value <= limit:
        return "within"
    # The figure is beyond the limit, but its interval is not. The words must not contradict the verdict.
    if passed:
        return "not clearly beyond"
    return "beyond"


def percent(share: Interval) -> str:
    """Format an interval of a share, as ``+0.10% [-0.20%, +0.40%]``."""
    return f"{share.point:+.2%} [{share.low:+.2%}, {share.high:+.2%}]"


def with_ends(figure: Interval) -> str:
    """Format an interval of a figure, as ``0.9973 [0.9800, 1.0146]``."""
    return f"{figure.point:.4f} [{figure.low:.4f}, {figure.high:.4f}]"
