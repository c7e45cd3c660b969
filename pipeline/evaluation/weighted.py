"""NE, AUC, log loss and calibration of rows with weights, in float64, the same for any order of the rows."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluation.metrics import entropy_of_rate, sigmoid

Floats = NDArray[np.floating]


def weighted_figures(clicked: NDArray[np.bool_], logits: Floats, weights: Floats) -> dict[str, float]:
    """``ne``, ``auc``, ``logloss`` and ``calibration`` of rows [n], each of which counts as ``weights`` rows.

    NE is not defined where one class has no weight; then it is NaN, as is AUC.
    """
    order = np.lexsort((weights, clicked, logits))  # rows that are equal in all three are alike
    y, x, w = clicked[order], logits[order].astype(np.float64), weights[order].astype(np.float64)
    total, clicks = math.fsum(w), math.fsum(w[y])
    losses = np.logaddexp(0.0, np.where(y, -x, x))
    loss = math.fsum(w * losses) / total
    both = 0 < clicks < total
    entropy = float(entropy_of_rate(clicks / total, math.log, math.log1p)) if both else math.nan
    return {
        "ne": loss / entropy,
        "auc": _auc(y, x, w) if both else math.nan,
        "logloss": loss,
        "calibration": math.fsum(w * sigmoid(x)) / clicks if clicks else math.nan,
    }


def _auc(clicked: NDArray[np.bool_], ordered: Floats, weights: Floats) -> float:
    """The weight of pairs of a clicked row above another one, ties counting one half; rows by rising score."""
    first = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    clicks, others = (np.add.reduceat(weights * side, first) for side in (clicked, ~clicked))
    below = np.cumsum(others) - others
    return float((clicks * (below + 0.5 * others)).sum() / (clicks.sum() * others.sum()))
