"""Figures of predictions of numbers (counts, values) in float64, the same for any order of the rows."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import DataError

Floats = NDArray[np.floating]


def evaluate_numbers(labels: Floats, predictions: Floats, weights: Floats | None = None) -> dict[str, float]:
    """``samples``, ``rmse``, ``calibration`` (sum of predictions / sum of labels) and ``unexplained``.

    ``unexplained``: the mean square error over the variance of the labels, 1 for always predicting their mean; below
    it is better, as with NE. Calibration is NaN where the labels add up to 0, ``unexplained`` where all are equal.
    Raises DataError for predictions that are not finite.
    """
    if bad := int((~np.isfinite(predictions)).sum()):
        raise DataError(
            f"{bad:,} of {len(labels):,} predictions are not finite: the model diverged",
            hint="train again with lower rates (train.lr=0.0005 train.sparse_lr=0.01) or train.precision=fp32",
        )
    y, p = labels.astype(np.float64), predictions.astype(np.float64)
    w = np.ones(len(y)) if weights is None else weights.astype(np.float64)
    total = math.fsum(w)
    mean = math.fsum(w * y) / total
    square, variance = math.fsum(w * (p - y) ** 2) / total, math.fsum(w * (y - mean) ** 2) / total
    return {
        "samples": len(y),
        "rmse": math.sqrt(square),
        "calibration": math.fsum(w * p) / (mean * total) if mean else math.nan,
        "unexplained": square / variance if variance else math.nan,
    }
