"""Fits a calibrator on held-out rows: the curve of all rows, then the shifts of slices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluation.calibrators.apply import applied, shifts_of
from pipeline.evaluation.calibrators.rows import CalibrationRows, matching_shift
from pipeline.evaluation.calibrators.slices import slice_shifts
from pipeline.records import CalibrationCurve
from pipeline.specs.calibrator import Calibrator


def fit_curve(
    method: Calibrator,
    labels: NDArray[np.floating],
    logits: NDArray[np.floating],
    weights: NDArray[np.floating] | None = None,
    codes: NDArray[np.integer] | None = None,
    most_slices: int = 1000,
) -> CalibrationCurve:
    """The curve that ``method`` fits to ``logits`` [n] with ``labels`` [n] of 0 and 1; ``weights`` [n] of rows.

    ``codes`` [n]: the slice of each row; then the curve has shifts for the ``most_slices`` largest. float64, and the
    same bits for any order of the rows. Raises DataError for rows of one class, or without any.
    """
    own = np.ones(len(logits)) if weights is None else weights.astype(np.float64)
    rows = CalibrationRows.of(logits, labels, own)
    curve = replace(method.fit(rows), rows=len(rows.logits), clicks=rows.clicks)
    if codes is None:
        return curve
    kept = own > 0
    whole, clicked = applied(curve, logits[kept]), (labels[kept] == 1).astype(np.float64)
    curve = replace(curve, shifts=slice_shifts_by_name(whole, clicked, own[kept], codes[kept], most_slices) or None)
    order = np.lexsort((own[kept], labels[kept], codes[kept], logits[kept]))
    shifted = (whole + shifts_of(curve, codes[kept]))[order]
    return curve.shifted(matching_shift(CalibrationRows(shifted, clicked[order], own[kept][order]), shifted))


def slice_shifts_by_name(
    logits: NDArray[np.float64],
    clicked: NDArray[np.float64],
    weights: NDArray[np.float64],
    codes: NDArray[np.integer],
    most: int,
) -> dict[str, float]:
    """As ``slice_shifts``, with the codes as JSON has them."""
    return {str(code): shift for code, shift in slice_shifts(logits, clicked, weights, codes, most).items()}
