"""``calibrator.json`` of a version: the curves from its program's logits to calibrated ones."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from pipeline.records.record import Record, absent

CALIBRATOR = "calibrator.json"


@dataclass(frozen=True, kw_only=True)
class CalibrationCurve(Record):
    """Straight lines through the knots (``x``, ``y``), both rising; beyond the outer ones, lines of ``slope``.

    ``x`` and ``y`` are logits. ``rows``, ``clicks``: those it was fitted on. ``shifts``: by slice, what is added to the
    calibrated logit.
    """

    x: list[float]
    y: list[float]
    slope: float
    rows: int = 0
    clicks: int = 0
    shifts: dict[str, float] | None = absent()

    def shifted(self, shift: float) -> CalibrationCurve:
        """The curve with ``shift`` added to every value."""
        return replace(self, y=[value + shift for value in self.y])


@dataclass(frozen=True, kw_only=True)
class CalibratorRecord(Record):
    """The curve of every task whose labels are 0 and 1, by name; ``click``: the main one.

    ``slices``: the feature by whose row of its table (of several ids, the first one's) the shifts are told apart.
    """

    FILE: ClassVar[str] = CALIBRATOR
    KIND: ClassVar[str] = "calibrator"
    VERSION: ClassVar[str] = "nightjar-calibrator-1"
    REMEDY: ClassVar[str] = "publish it again"

    format: str = VERSION
    method: str
    share: float
    slices: str | None = absent()
    curves: dict[str, CalibrationCurve] = field(default_factory=dict)
