"""A calibrator applied: what a served model does with its logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.records import CalibrationCurve, CalibratorRecord
from pipeline.specs import MAIN_TASK


def calibrated(
    record: CalibratorRecord, tasks: Iterable[str] | None, logits: NDArray[np.float32], ids: Mapping[str, Any]
) -> NDArray[np.float32]:
    """``logits`` [n], or [n, T] of the main task and the further ``tasks``, calibrated where a task has a curve.

    ``ids``: by feature; of the slices' feature the row [n] of its table, or lists of these.
    """
    codes = None if record.slices is None else first_ids(ids[record.slices])
    if logits.ndim == 1:
        return _calibrated(record, MAIN_TASK, logits, codes)
    columns = [
        _calibrated(record, name, logits[:, place], codes) for place, name in enumerate((MAIN_TASK, *(tasks or ())))
    ]
    return np.stack(columns, axis=1)


def first_ids(ids: Any) -> NDArray[np.integer]:
    """A number for each row to slice by: its row in the table, of several the first."""
    return np.asarray(ids.values[ids.offsets[:-1]] if hasattr(ids, "offsets") else ids)


def applied(curve: CalibrationCurve, logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Calibrated logits [n] of ``logits`` [n]: straight lines through the knots, and on beyond the outer ones."""
    values, x, y = logits.astype(np.float64), np.array(curve.x), np.array(curve.y)
    inside = np.interp(values, x, y)
    beyond = np.minimum(values - x[0], 0.0) + np.maximum(values - x[-1], 0.0)
    return np.asarray(inside + curve.slope * beyond)


def shifts_of(curve: CalibrationCurve, codes: NDArray[np.integer]) -> NDArray[np.float64]:
    """What the slices of rows with these ``codes`` [n] add to their logits; 0 for one without a shift of its own."""
    if not curve.shifts:
        return np.zeros(len(codes))
    known = np.array(sorted((int(code), shift) for code, shift in curve.shifts.items()))
    at = np.minimum(np.searchsorted(known[:, 0], codes), len(known) - 1)
    return np.where(known[at, 0] == codes, known[at, 1], 0.0)


def _calibrated(
    record: CalibratorRecord, task: str, logits: NDArray[np.float32], codes: NDArray[np.integer] | None
) -> NDArray[np.float32]:
    curve = record.curves.get(task)
    if curve is None:
        return logits
    values = applied(curve, logits)
    return (values if codes is None else values + shifts_of(curve, codes)).astype(np.float32)
