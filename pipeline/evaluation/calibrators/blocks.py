"""Curves of blocks of rows: cells of consecutive logits, joined until the click rate rises, with a knot in each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluation.calibrators.apply import applied
from pipeline.evaluation.calibrators.line import LEAST_SLOPE, fitted_line
from pipeline.evaluation.calibrators.rows import CalibrationRows, Floats, matching_shift
from pipeline.evaluation.metrics import sigmoid
from pipeline.records import CalibrationCurve


def cells_of(rows: CalibrationRows, least: int) -> NDArray[np.int64]:
    """Where the cells of ``rows`` begin, each with at least ``least`` rows of each class; one where there are too few.

    Equal logits share a cell.
    """
    last = np.append(np.flatnonzero(np.diff(rows.logits)), len(rows.logits) - 1)  # of each run of equal logits
    clicks = np.cumsum(rows.clicked)[last]
    others = last + 1 - clicks
    starts, run = [0], 0
    while True:
        before = (clicks[run - 1], others[run - 1]) if run else (0.0, 0.0)
        run = 1 + max(
            int(np.searchsorted(sums, seen + least)) for sums, seen in zip((clicks, others), before, strict=True)
        )
        if run >= len(last):
            break
        starts.append(int(last[run - 1]) + 1)
    if run > len(last) and len(starts) > 1:  # the rest is too small to be a cell
        starts.pop()
    return np.array(starts)


def curve_of(rows: CalibrationRows, starts: NDArray[np.int64]) -> CalibrationCurve:
    """The curve through the cells that begin at ``starts``, joined where the rate does not rise.

    A knot lies at the logit of a block's mean prediction, where a curve that only shifts logits would meet its rate.
    Beyond the outer knots the curve goes on with the slope of Platt's line. The mean prediction is the click rate.
    """
    slope, _ = fitted_line(rows)
    x, y = _knots(rows, starts)
    for knot in range(1, len(x)):
        y[knot] = max(y[knot], y[knot - 1] + LEAST_SLOPE * (x[knot] - x[knot - 1]))
    curve = CalibrationCurve(x=x.tolist(), y=y.tolist(), slope=slope)
    return curve.shifted(matching_shift(rows, applied(curve, rows.logits)))


def _knots(rows: CalibrationRows, starts: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Logits of mean prediction and of click rate of every block."""
    weights = np.add.reduceat(rows.weights, starts)
    clicks = np.add.reduceat(rows.weights * rows.clicked, starts)
    predicted = np.add.reduceat(rows.weights * sigmoid(rows.logits), starts)
    predicted, clicks, weights = np.array(_pooled(predicted, clicks, weights)).T
    x, y = _logit(predicted / weights), _logit(clicks / weights)
    apart = np.append(True, np.diff(x) > 0)  # predictions that saturate at 0 or 1
    return x[apart], y[apart]


def _pooled(predicted: Floats, clicks: Floats, weights: Floats) -> list[tuple[float, float, float]]:
    """Sums of neighbours joined until the click rate rises from block to block: pool adjacent violators."""
    blocks: list[tuple[float, float, float]] = []
    for cell in zip(predicted.tolist(), clicks.tolist(), weights.tolist(), strict=True):
        blocks.append(cell)
        while len(blocks) > 1 and blocks[-2][1] * blocks[-1][2] >= blocks[-1][1] * blocks[-2][2]:
            above, below = blocks.pop(), blocks.pop()
            blocks.append((below[0] + above[0], below[1] + above[1], below[2] + above[2]))
    return blocks


def _logit(rate: Floats) -> Floats:
    inside = np.clip(rate, 1e-300, 1 - 2.0**-53)
    return np.asarray(np.log(inside) - np.log1p(-inside))
