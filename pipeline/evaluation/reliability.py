"""Reliability: predicted against observed click rate in bins of equal size, for the report's calibration plot."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipeline.evaluation.metrics import check_labels, check_logits, sigmoid
from pipeline.records import Curve


def reliability(
    labels: ArrayLike, logits: ArrayLike, bins: int = 20, weights: NDArray[np.floating] | None = None
) -> Curve:
    """Mean predicted probability, observed click rate and rows of each bin, by rising prediction.

    ``labels`` [n], ``logits`` [n]; bins hold about n / ``bins`` rows each. Rows with the same logit share a bin, so
    there may be fewer bins. The same for any order of the rows. With ``weights`` [n], means are weighted, and rows
    without weight are left out. Raises DataError as ``evaluate`` does.
    """
    if bins < 1:
        raise ValueError(f"bins is {bins}, expected at least 1")
    clicked = check_labels(labels)
    values = check_logits(logits, len(clicked))
    if weights is not None:
        return _weighted(clicked[weights > 0], values[weights > 0], weights[weights > 0].astype(np.float64), bins)
    ordered, of_clicks = np.sort(values), np.sort(values[clicked])
    starts = _bin_starts(ordered, bins)
    rows = np.diff(np.append(starts, len(ordered)))
    predicted = np.add.reduceat(sigmoid(ordered), starts) / rows
    # Equal logits share a bin, so a bin has the clicks from its first logit to that of the next one.
    clicks_before = np.searchsorted(of_clicks, ordered[starts], side="left")
    observed = np.diff(np.append(clicks_before, len(of_clicks))) / rows
    return Curve(predicted=predicted.tolist(), observed=observed.tolist(), rows=rows.tolist())


def _weighted(
    clicked: NDArray[np.bool_], values: NDArray[np.floating], weights: NDArray[np.float64], bins: int
) -> Curve:
    order = np.lexsort((weights, clicked, values))
    values, clicked, weights = values[order], clicked[order], weights[order]
    starts = _bin_starts(values, bins)
    totals = np.add.reduceat(weights, starts)
    predicted = np.add.reduceat(weights * sigmoid(values), starts) / totals
    observed = np.add.reduceat(weights * clicked, starts) / totals
    rows = np.diff(np.append(starts, len(values)))
    return Curve(predicted=predicted.tolist(), observed=observed.tolist(), rows=rows.tolist())


def _bin_starts(values: np.ndarray, bins: int) -> np.ndarray:
    """First index of each bin of sorted ``values``: equal cuts, moved back to the first of a run of equal values."""
    cuts = np.arange(min(bins, len(values))) * len(values) // min(bins, len(values))
    return np.unique(np.searchsorted(values, values[cuts], side="left"))
