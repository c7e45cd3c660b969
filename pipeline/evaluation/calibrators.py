"""The kinds of calibrators: ``SPECS`` lists them. No NumPy at import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.specs.calibrator import Calibrator

if TYPE_CHECKING:
    from pipeline.evaluation.calibration_curves import CalibrationRows
    from pipeline.records.model_version import CalibrationCurve


@dataclass(frozen=True)
class Platt(Calibrator):
    """Logistic regression on the logit (Platt 1999, "Probabilistic Outputs for Support Vector Machines", section 2)."""

    name: str = "platt"
    doc: str = "a straight line in logits, two parameters; for few clicks."

    def fit(self, rows: CalibrationRows) -> CalibrationCurve:
        from pipeline.evaluation.calibration_curves import fitted_line
        from pipeline.records.model_version import CalibrationCurve

        slope, start = fitted_line(rows)
        return CalibrationCurve(x=[0.0], y=[start], slope=slope)


PLATT = Platt()


@dataclass(frozen=True)
class Isotonic(Calibrator):
    """Pool adjacent violators (Zadrozny and Elkan 2002), then straight lines between the centres of the blocks.

    ``min_clicks``: rows of each class in a block, so that no rate is 0 or 1 and none is of a handful of rows.
    """

    name: str = "isotonic"
    doc: str = "a rising curve of any shape, with a knot for each block of rows that differs from its neighbours."
    min_clicks: int = 50

    def fit(self, rows: CalibrationRows) -> CalibrationCurve:
        from pipeline.evaluation.calibration_curves import cells_of, curve_of

        return curve_of(rows, cells_of(rows, self.min_clicks))


ISOTONIC = Isotonic()


@dataclass(frozen=True)
class Histogram(Calibrator):
    """Bins of equally many clicks (Zadrozny and Elkan 2001), joined where the rate falls; lines between the centres."""

    name: str = "histogram"
    doc: str = "the click rates of `bins` bins, smoother than isotonic."
    bins: int = 20

    def fit(self, rows: CalibrationRows) -> CalibrationCurve:
        from pipeline.evaluation.calibration_curves import cells_of, curve_of

        return curve_of(rows, cells_of(rows, -(-rows.least // self.bins)))


HISTOGRAM = Histogram()


SPECS = (PLATT, ISOTONIC, HISTOGRAM)
