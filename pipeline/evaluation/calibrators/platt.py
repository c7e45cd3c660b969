"""A straight line in logits: Platt scaling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.specs.calibrator import Calibrator

if TYPE_CHECKING:
    from pipeline.evaluation.calibrators.rows import CalibrationRows
    from pipeline.records import CalibrationCurve


@dataclass(frozen=True)
class Platt(Calibrator):
    """Logistic regression on the logit (Platt 1999, "Probabilistic Outputs for Support Vector Machines", section 2)."""

    name: str = "platt"
    doc: str = "a straight line in logits, two parameters; for few clicks."

    def fit(self, rows: CalibrationRows) -> CalibrationCurve:
        """One knot at logit 0, and the slope."""
        from pipeline.evaluation.calibrators.line import fitted_line
        from pipeline.records import CalibrationCurve

        slope, start = fitted_line(rows)
        return CalibrationCurve(x=[0.0], y=[start], slope=slope)


PLATT = Platt()
