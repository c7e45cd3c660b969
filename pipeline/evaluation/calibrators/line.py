"""Logistic regression on one logit: the curve of Platt scaling, and the slope of every curve beyond its knots."""

from __future__ import annotations

import numpy as np

from pipeline.evaluation.calibrators.rows import CalibrationRows, matching_shift, total
from pipeline.evaluation.metrics import sigmoid

LEAST_SLOPE = 0.05  # a curve must rise, and steeply enough for float32 to tell two logits apart
_STEPS = 100


def fitted_line(rows: CalibrationRows) -> tuple[float, float]:
    """Slope and value at logit 0 of the line that fits ``rows`` best, by Newton's method with halved steps.

    The targets are Platt's, a little inside of 0 and 1, so that rows which a threshold separates have a finite line.
    A model that ranks clicks below other rows gets the smallest slope.
    """
    clicks, others = rows.clicks, len(rows.clicked) - rows.clicks
    targets = np.where(rows.clicked == 1, (clicks + 1) / (clicks + 2), 1 / (others + 2))
    line = np.array([1.0, 0.0])
    loss = _loss(rows, targets, line)
    for _ in range(_STEPS):
        predicted = sigmoid(line[0] * rows.logits + line[1])
        off, spread = rows.weights * (targets - predicted), rows.weights * predicted * (1 - predicted)
        first = np.array([total(off, rows.logits), total(off)])
        mixed = total(spread, rows.logits)
        second = np.array([[total(spread, rows.logits, rows.logits), mixed], [mixed, total(spread)]])
        step = np.linalg.lstsq(second, first, rcond=None)[0]
        while (now := _loss(rows, targets, line + step)) > loss and np.abs(step).max() > 1e-12:
            step = step / 2
        line, loss = line + step, now
        if np.abs(step).max() < 1e-10:
            break
    slope = max(float(line[0]), LEAST_SLOPE)
    return slope, matching_shift(rows, slope * rows.logits)


def _loss(rows: CalibrationRows, targets: np.ndarray, line: np.ndarray) -> float:
    values = line[0] * rows.logits + line[1]
    return total(rows.weights, np.logaddexp(0, values) - targets * values)
