"""How far two sets of predictions for the same rows lie apart, and how far predictions lie from what was observed."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluation.metrics import sigmoid
from pipeline.records.gate import Curve, Histogram

BINS = 10
HISTOGRAM_BINS = 24


def population_stability(expected: NDArray[np.floating], actual: NDArray[np.floating], bins: int = BINS) -> float:
    """Return the PSI: the sum of (f - e) * ln(f / e) over bins that hold equal shares of ``expected``.

    Args:
        expected: Predictions [n], or logits: any rising function of them gives the same bins.
        actual: Predictions [m] of the same kind.
        bins: How many; fewer where values repeat.

    Returns:
        0 for equal shares; 0.25 is called a major shift.
    """
    edges = np.unique(np.quantile(expected, np.linspace(0, 1, bins + 1)[1:-1]))
    shares = []
    for values in (expected, actual):
        # Half a row more in each bin, so that an empty one costs much, not infinity.
        counts = np.bincount(np.searchsorted(edges, values, "right"), minlength=len(edges) + 1) + 0.5
        shares.append(counts / counts.sum())
    e, f = shares
    return float(((f - e) * np.log(f / e)).sum())


def kolmogorov_smirnov(one: NDArray[np.floating], other: NDArray[np.floating]) -> float:
    """Return the largest gap between the distribution functions of two samples, in [0, 1]."""
    first, second = np.sort(one), np.sort(other)
    points = np.concatenate([first, second])
    gaps = np.searchsorted(first, points, "right") / len(first) - np.searchsorted(second, points, "right") / len(second)
    return float(np.abs(gaps).max())


def histogram(logits: Mapping[str, NDArray[np.floating]], bins: int = HISTOGRAM_BINS) -> Histogram:
    """Return shares of rows by predicted probability, in ``bins`` equal steps up to the largest of all models."""
    probabilities = {name: sigmoid(values) for name, values in logits.items()}
    top = max(float(values.max()) for values in probabilities.values()) or 1.0
    edges = np.linspace(0, top, bins + 1)
    counts = {name: np.histogram(values, edges)[0] / len(values) for name, values in probabilities.items()}
    return Histogram(edges=edges.tolist(), **{name: shares.tolist() for name, shares in counts.items()})


def calibration_by_prediction(curve: Curve) -> tuple[float, float]:
    """Return how far bins of predictions are off their observed clicks, and the standard error of that.

    Labels that were mixed up show here while predicted and observed clicks still agree in total.

    Args:
        curve: What ``reliability`` returns.

    Returns:
        Shares of all clicks: 0 is as good as calibrated. Both are NaN without clicks.
    """
    predicted, observed = np.asarray(curve.predicted, np.float64), np.asarray(curve.observed, np.float64)
    rows = np.asarray(curve.rows, np.float64)
    clicks = float((observed * rows).sum())
    if not clicks:
        return math.nan, math.nan
    gaps = float((np.abs(predicted - observed) * rows).sum())
    # What chance alone leaves, each bin being binomial, is taken off.
    chance = float(np.sqrt(2 / math.pi * rows * predicted * (1 - predicted)).sum())
    # At the observed or the predicted rate, whichever varies more: a bin without clicks has chance errors, too.
    variance = rows * np.maximum(predicted * (1 - predicted), observed * (1 - observed))
    return max(0.0, gaps - chance) / clicks, float(np.sqrt(variance.sum())) / clicks
