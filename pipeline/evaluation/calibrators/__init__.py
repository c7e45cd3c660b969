"""The kinds of calibrators: ``SPECS`` lists them. No NumPy at import."""

from __future__ import annotations

from pipeline.evaluation.calibrators.histogram import HISTOGRAM
from pipeline.evaluation.calibrators.isotonic import ISOTONIC
from pipeline.evaluation.calibrators.platt import PLATT

SPECS = (PLATT, ISOTONIC, HISTOGRAM)
