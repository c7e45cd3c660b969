"""``nightjar calibrate``: this machine's figures, measured through the real kernels and the real training step."""

from __future__ import annotations

from pipeline.calibration.measure import Calibration, calibrate
from pipeline.calibration.trial import Trial, make_dataset, measure_training

__all__ = ["Calibration", "Trial", "calibrate", "make_dataset", "measure_training"]
