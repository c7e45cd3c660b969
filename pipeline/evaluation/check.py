"""Questions that the gate asks more than once, and the words that answers share."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.records.gate import Check, Figures, Interval

WHEN = "when it was published"


def above(name: str, setting: str, value: float, limit: float | None, what: str) -> Iterator[Check]:
    """Whether ``value`` stays at or below ``limit``; nothing where there is no limit."""
    if limit is not None:
        passed = value <= limit  # not true of NaN
        words = f"{what} {value:.4f}, {'within' if passed else 'above'} {limit:g} (gate.{setting})"
        yield Check(name, f"gate.{setting}", passed, words)


def calibration(name: str, setting: str, figures: Figures, limit: float | None, what: str) -> Iterator[Check]:
    """Whether calibration may be within ``limit`` of 1: its interval must reach that far."""
    if limit is None:
        return
    point, low, high = figures.calibration
    passed = low <= 1 + limit and high >= 1 - limit
    words = (
        f"{what} is {point:.4f} [{low:.4f}, {high:.4f}]: predicted clicks are {abs(point - 1):.1%} "
        f"{'above' if point > 1 else 'below'} the observed ones, {place(abs(point - 1), limit, passed)} {limit:.1%} "
        f"(gate.{setting})"
    )
    yield Check(name, f"gate.{setting}", passed, words)


def place(value: float, limit: float, passed: bool) -> str:
    """How a figure lies to its limit, in words."""
    if value <= limit:
        return "within"
    return "not clearly beyond" if passed else "beyond"


def not_worse(change: Interval, limit: float) -> bool:
    """Whether a rise of NE lies within ``limit``, or may be chance: its interval reaches zero."""
    return change.point <= limit or change.low <= 0


def percent(interval: Interval) -> str:
    """An interval of a share, as ``+0.10% [-0.20%, +0.40%]``."""
    point, low, high = interval
    return f"{point:+.2%} [{low:+.2%}, {high:+.2%}]"
