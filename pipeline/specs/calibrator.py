"""The protocol of a calibrator: how a curve from a model's logits to calibrated ones is fitted on held-out rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.records import CalibrationCurve


class Calibrator(ABC):
    """A kind of calibrator, of ``evaluation/calibrators.py``, which imports NumPy inside its methods.

    Its curve goes in straight lines through knots and on beyond them, in logits on both axes. It rises strictly, so it
    changes no order of rows. ``least_clicks``: rows of each class that a fit needs.
    """

    name: str
    doc: str
    least_clicks = 1

    @abstractmethod
    def fit(self, rows: Any) -> CalibrationCurve:
        """The curve of ``rows`` (``evaluation.calibrators.rows.Rows``), which are sorted and of both classes.

        float64, the same for equal rows.
        """
