"""Which models of several become members of an ensemble, and what their logits count, by the rows of one split.

An ensemble's logit is the weighted sum of its members'. NE of the mean falls with the members' own NE and with their
distance from each other, so a choice by it is one of good and diverse members (SEERL, arXiv 2001.05209, section 3.3).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluation.metrics import counts_of, ne_of, sigmoid

# What draws weights to equal ones counts as much as so many rows.
RIDGE_ROWS = 1000
_NEWTON_STEPS = 20
Floats = NDArray[np.floating]


def choose(logits: Floats, labels: Floats, weights: Floats | None, keep: int) -> list[int]:
    """The places of ``keep`` of the models with ``logits`` [m, n]: each next one brings the smallest NE of the mean.

    Of equal ones the newest is taken.
    """
    chosen: list[int] = []
    total = np.zeros(logits.shape[1])
    while len(chosen) < min(keep, len(logits)):
        left = [at for at in reversed(range(len(logits))) if at not in chosen]
        best = min(left, key=lambda at: ne_of((total + logits[at]) / (len(chosen) + 1), labels, weights))
        total += logits[best]
        chosen.append(best)
    return chosen


def fitted_weights(logits: Floats, labels: Floats, weights: Floats | None = None) -> NDArray[np.float64]:
    """What the logits [m, n] of an ensemble's members count: [m], by logistic regression with a ridge.

    The mean of logits is nearer to the base rate than each of its members, so the weights may add up to more than 1.
    The ridge draws them towards 1 / m. Newton's method; the loss is convex.
    """
    rows, counted = logits.astype(np.float64), counts_of(labels, weights)
    counted = counted / counted.sum()
    equal, ridge = np.full(len(rows), 1.0 / len(rows)), RIDGE_ROWS / rows.shape[1]
    fitted = equal.copy()
    for _ in range(_NEWTON_STEPS):
        chance = sigmoid(fitted @ rows)
        slope = rows @ ((chance - labels) * counted) + ridge * (fitted - equal)
        bend = (rows * (chance * (1 - chance) * counted)) @ rows.T + ridge * np.eye(len(rows))
        step = np.linalg.solve(bend, slope)
        fitted -= step
        if np.abs(step).max() < 1e-12:
            break
    return fitted
