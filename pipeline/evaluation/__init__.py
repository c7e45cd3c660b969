"""Figures of a model on held-out rows: exact, and the same for any order of the rows."""

from pipeline.evaluation.metrics import evaluate
from pipeline.evaluation.reliability import reliability

__all__ = ["evaluate", "reliability"]
