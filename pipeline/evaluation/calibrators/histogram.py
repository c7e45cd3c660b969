"""A fixed number of bins with as many clicks each: histogram binning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.specs.calibrator import Calibrator

if TYPE_CHECKING:
    from pipeline.evaluation.calibrators.rows import CalibrationRows
    from pipeline.records import CalibrationCurve


@dataclass(frozen=True)
class Histogram(Calibrator):
    """Bins of equally many clicks (Zadrozny and Elkan 2001), joined where the rate falls; lines between the centres."""

    name: str = "histogram"
    doc: str = "the click rates of `bins` bins, smoother than isotonic."
    bins: int = 20

    def fit(self, rows: CalibrationRows) -> CalibrationCurve:
        """A knot at the centre of each bin."""
        from pipeline.evaluation.calibrators.blocks import cells_of, curve_of

        return curve_of(rows, cells_of(rows, -(-rows.least // self.bins)))


HISTOGRAM = Histogram()
