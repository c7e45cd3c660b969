"""The protocol of a calibrator, which maps a model's predictions to probabilities that hold in the mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from pipeline.core.registry import Registry, expect_instance

if TYPE_CHECKING:
    from pipeline.records.model_version import CalibrationCurve


class Calibrator(ABC):
    """How a curve from a model's logits to calibrated ones is fitted on held-out rows: ``evaluation/calibrators.py``.

    Its curve goes in straight lines through knots and on beyond them, in logits on both axes. It rises strictly, so it
    changes no order of rows. ``least_clicks``: rows of each class that a fit needs. Methods import NumPy inside.
    """

    name: str
    doc: str
    least_clicks = 1

    @abstractmethod
    def fit(self, rows: Any) -> CalibrationCurve:
        """Fit the curve of ``rows`` (``evaluation.calibration_curves.CalibrationRows``), sorted and of both classes.

        The curve is float64, and the same for equal rows.
        """


CALIBRATORS: Registry[Calibrator] = Registry(
    "calibrator",
    setting="publish.calibrator.method",
    home="pipeline.evaluation.calibrators",
    group="nightjar.calibrators",
    problem=expect_instance(Calibrator),
)


def calibrator_docs() -> str:
    """Return the documentation of the calibrators."""
    return " ".join(f"{each.name}: {each.doc}" for each in CALIBRATORS)
