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
    """PSI: sum of (f - e) * ln(f / e) over bins that hold equal shares of ``expected``; 0.25 is called a major shift.

    Half a row is added to every bin, so that an empty one costs much, not infinity.
    """
    edges = np.unique(np.quantile(expected, np.linspace(0, 1, bins + 1)[1:-1]))
    shares = []
    for values in (expected, actual):
        counts = np.bincount(np.searchsorted(edges, values, "right"), minlength=len(edges) + 1) + 0.5
        shares.append(counts / counts.sum())
    e, f = shares
    return float(((f - e) * np.log(f / e)).sum())


def kolmogorov_smirnov(one: NDArray[np.floating], other: NDArray[np.floating]) -> float:
    """The largest gap between the two distribution functions, in [0, 1]."""
    first, second = np.sort(one), np.sort(other)
    points = np.concatenate([first, second])
    gaps = np.searchsorted(first, points, "right") / len(first) - np.searchsorted(second, points, "right") / len(second)
    return float(np.abs(gaps).max())


def histogram(logits: Mapping[str, NDArray[np.floating]], bins: int = HISTOGRAM_BINS) -> Histogram:
    """Shares of rows by predicted probability, in ``bins`` equal steps up to the largest."""
    probabilities = {name: sigmoid(values) for name, values in logits.items()}
    top = max(float(values.max()) for values in probabilities.values()) or 1.0
    edges = np.linspace(0, top, bins + 1)
    counts = {name: np.histogram(values, edges)[0] / len(values) for name, values in probabilities.items()}
    return Histogram(edges=edges.tolist(), **{name: shares.tolist() for name, shares in counts.items()})


def calibration_by_prediction(curve: Curve) -> tuple[float, float]:
    """How far bins of predictions lie from their observed clicks, as a share of all clicks, and its standard error.

    ``curve``: what ``reliability`` gives. What chance alone would leave (every bin binomial) is taken off: 0 is as good
    as calibrated. Labels that were mixed up show here while predicted and observed clicks still agree in total. The
    error takes every bin as binomial at the observed or the predicted rate, whichever has the larger variance: a bin
    without clicks has chance errors too. Both are NaN without clicks.
    """
    predicted, observed, rows = (np.asarray(each, np.float64) for each in (curve.predicted, curve.observed, curve.rows))
    clicks = float((observed * rows).sum())
    if not clicks:
        return math.nan, math.nan
    gaps = float((np.abs(predicted - observed) * rows).sum())
    chance = float(np.sqrt(2 / math.pi * rows * predicted * (1 - predicted)).sum())
    variance = rows * np.maximum(predicted * (1 - predicted), observed * (1 - observed))
    return max(0.0, gaps - chance) / clicks, float(np.sqrt(variance.sum())) / clicks
