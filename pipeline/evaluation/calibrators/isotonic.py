"""Rates that rise with the logit, as steep and as uneven as the rows show: isotonic regression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.specs.calibrator import Calibrator

if TYPE_CHECKING:
    from pipeline.evaluation.calibrators.rows import CalibrationRows
    from pipeline.records import CalibrationCurve


@dataclass(frozen=True)
class Isotonic(Calibrator):
    """Pool adjacent violators (Zadrozny and Elkan 2002), then straight lines between the centres of the blocks.

    ``min_clicks``: rows of each class in a block, so that no rate is 0 or 1 and none is of a handful of rows.
    """

    name: str = "isotonic"
    doc: str = "a rising curve of any shape, with a knot for each block of rows that differs from its neighbours."
    min_clicks: int = 50

    def fit(self, rows: CalibrationRows) -> CalibrationCurve:
        """A knot at the centre of each block."""
        from pipeline.evaluation.calibrators.blocks import cells_of, curve_of

        return curve_of(rows, cells_of(rows, self.min_clicks))


ISOTONIC = Isotonic()
