"""Curves from logits to calibrated logits: how they are fitted to rows, by slice, and applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.core.errors import DataError
from pipeline.evaluation.metrics import fill_weights, sigmoid
from pipeline.records.model_version import CalibrationCurve, CalibratorRecord
from pipeline.specs.calibrator import Calibrator
from pipeline.specs.label_kind import MAIN_TASK

Floats = NDArray[np.float64]
_STEPS, _LONGEST = 100, 4.0
_TINY = float(np.finfo(np.float64).tiny ** 0.25)


@dataclass(frozen=True)
class CalibrationRows:
    """``logits``, ``clicked`` (0 or 1) and ``weights``, float64 [n] each, by rising logit."""

    logits: Floats
    clicked: Floats
    weights: Floats

    @staticmethod
    def of(
        logits: NDArray[np.floating], labels: NDArray[np.floating], weights: NDArray[np.floating] | None
    ) -> CalibrationRows:
        """Sort rows with a weight above 0; DataError unless there are some of both classes."""
        row_weights = fill_weights(labels, weights)
        counted = row_weights > 0
        values, clicked = logits[counted].astype(np.float64), (labels[counted] == 1).astype(np.float64)
        row_weights = row_weights[counted]
        # Sort by all three, so that sums do not depend on the order of the rows, not even by rounding.
        order = np.lexsort((row_weights, clicked, values))
        rows = CalibrationRows(values[order], clicked[order], row_weights[order])
        if not rows.least:
            raise DataError(
                f"the calibrator has {len(values):,} rows, {int(clicked.sum()):,} of them with a click, expected "
                "both classes",
                hint="publish.calibrator.share=<a larger share>, or publish.calibrator.method=null",
            )
        return rows

    @property
    def clicks(self) -> int:
        """Rows with a click."""
        return int(self.clicked.sum())

    @property
    def least(self) -> int:
        """Rows of the rarer class."""
        return min(self.clicks, len(self.clicked) - self.clicks)


def total(*factors: Floats) -> float:
    """Return the sum of the product of arrays [n]."""
    # Avoid a BLAS product, whose bits differ with the number of threads.
    product = factors[0]
    for factor in factors[1:]:
        product = product * factor
    return float(product.sum())


def matching_shift(rows: CalibrationRows, logits: Floats) -> float:
    """Return what ``logits`` [n] need on top so that their mean prediction is the rows' click rate."""
    # Use Newton's method on the logit of the mean prediction, whose derivative lies in (0, 1].
    weight, clicks = total(rows.weights), total(rows.weights, rows.clicked)
    target, shift = np.log(clicks) - np.log(weight - clicks), 0.0
    for _ in range(_STEPS):
        predicted = sigmoid(logits + shift)
        rest = 1 - predicted
        if not rest.any():
            # The model takes every row for a click: 1 - predicted is rounded to 0 for all rows.
            rest = sigmoid(-logits - shift)
        expected, others = max(total(rows.weights, predicted), _TINY), max(total(rows.weights, rest), _TINY)
        rise = max(total(rows.weights, predicted, rest) * weight / (expected * others), _TINY)
        step = float(np.clip((target - np.log(expected) + np.log(others)) / rise, -_LONGEST, _LONGEST))
        shift += step
        if abs(step) < 1e-12:
            break
    return shift


def calibrated(
    record: CalibratorRecord, tasks: Iterable[str] | None, logits: NDArray[np.float32], ids: Mapping[str, Any]
) -> NDArray[np.float32]:
    """Return calibrated logits; logits of a task without a curve stay as they are.

    Args:
        record: The curves, by task.
        tasks: The further tasks, in the order of their logits.
        logits: [n], or [n, T] of the main task and the further ones.
        ids: By feature; for the slices' feature each row's row of its table, [n], or lists of these.
    """
    codes: NDArray[np.integer] | None = None
    if record.slices is not None:
        slice_ids = ids[record.slices]
        if hasattr(slice_ids, "offsets"):
            # The first id of a list decides which slice the row belongs to.
            slice_ids = slice_ids.values[slice_ids.offsets[:-1]]
        codes = np.asarray(slice_ids)
    if logits.ndim == 1:
        return _calibrated(record, MAIN_TASK, logits, codes)
    columns = []
    for place, name in enumerate((MAIN_TASK, *(tasks or ()))):
        columns.append(_calibrated(record, name, logits[:, place], codes))
    return np.stack(columns, axis=1)


def applied(curve: CalibrationCurve, logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return ``logits`` [n] calibrated: straight lines through the knots, and on beyond the outer ones."""
    values, x, y = logits.astype(np.float64), np.array(curve.x), np.array(curve.y)
    inside = np.interp(values, x, y)
    beyond = np.minimum(values - x[0], 0.0) + np.maximum(values - x[-1], 0.0)
    return np.asarray(inside + curve.slope * beyond)


def shifts_of(curve: CalibrationCurve, codes: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return what slices add to the logits of rows with these ``codes``.

    Args:
        codes: The slice of each row, [n].

    Returns:
        [n]; 0 for a slice without its own shift.
    """
    if not curve.shifts:
        return np.zeros(len(codes))
    # Sort as numbers for the search: JSON's keys are text, in which 10 comes before 9.
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
    if codes is not None:
        values = values + shifts_of(curve, codes)
    return values.astype(np.float32)


# A curve must rise, and steeply enough for float32 to tell two logits apart.
LEAST_SLOPE = 0.05
_NEWTON_STEPS = 100


def fitted_line(rows: CalibrationRows) -> tuple[float, float]:
    """Return slope and value at logit 0 of the line that fits ``rows`` best.

    A model that ranks clicks below other rows gets the smallest slope.
    """
    clicks, others = rows.clicks, len(rows.clicked) - rows.clicks
    # Platt's targets lie slightly inside 0 and 1, so that rows which a threshold separates have a finite line.
    targets = np.where(rows.clicked == 1, (clicks + 1) / (clicks + 2), 1 / (others + 2))
    line = np.array([1.0, 0.0])
    loss = _loss(rows, targets, line)
    # Use Newton's method, and halve a step that overshoots.
    for _ in range(_NEWTON_STEPS):
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


def cells_of(rows: CalibrationRows, least: int) -> NDArray[np.int64]:
    """Return where cells of rows begin, each with ``least`` rows of each class or more; one if there are too few."""
    # Find the last row of each run of equal logits, which share a cell.
    last = np.append(np.flatnonzero(np.diff(rows.logits)), len(rows.logits) - 1)
    clicks = np.cumsum(rows.clicked)[last]
    others = last + 1 - clicks
    starts, run = [0], 0
    while True:
        clicks_before, others_before = 0.0, 0.0
        if run:
            clicks_before, others_before = clicks[run - 1], others[run - 1]
        enough_clicks = int(np.searchsorted(clicks, clicks_before + least))
        enough_others = int(np.searchsorted(others, others_before + least))
        run = 1 + max(enough_clicks, enough_others)
        if run >= len(last):
            break
        starts.append(int(last[run - 1]) + 1)
    if run > len(last) and len(starts) > 1:
        # The rest is too small for a cell, so it joins the one before it.
        starts.pop()
    return np.array(starts)


def curve_of(rows: CalibrationRows, starts: NDArray[np.int64]) -> CalibrationCurve:
    """Return the curve through the cells that begin at ``starts``, joined where the rate does not rise.

    Beyond the outer knots the curve goes on with the slope of Platt's line. The mean prediction is the click rate.
    """
    slope, _ = fitted_line(rows)
    x, y = _knots(rows, starts)
    for knot in range(1, len(x)):
        y[knot] = max(y[knot], y[knot - 1] + LEAST_SLOPE * (x[knot] - x[knot - 1]))
    curve = CalibrationCurve(x=x.tolist(), y=y.tolist(), slope=slope)
    return curve.shifted(matching_shift(rows, applied(curve, rows.logits)))


def _knots(rows: CalibrationRows, starts: NDArray[np.int64]) -> tuple[Floats, Floats]:
    # A knot lies at the logit of a block's mean prediction, where a curve that only shifts logits would meet the
    # block's rate.
    weights = np.add.reduceat(rows.weights, starts)
    clicks = np.add.reduceat(rows.weights * rows.clicked, starts)
    predicted = np.add.reduceat(rows.weights * sigmoid(rows.logits), starts)

    # Pool adjacent violators: join neighbours until the click rate rises from block to block.
    blocks: list[tuple[float, float, float]] = []
    for cell in zip(predicted.tolist(), clicks.tolist(), weights.tolist(), strict=True):
        blocks.append(cell)
        while len(blocks) > 1 and blocks[-2][1] * blocks[-1][2] >= blocks[-1][1] * blocks[-2][2]:
            above, below = blocks.pop(), blocks.pop()
            blocks.append((below[0] + above[0], below[1] + above[1], below[2] + above[2]))
    predicted, clicks, weights = np.array(blocks).T

    logits = []
    for rate in (predicted / weights, clicks / weights):
        inside = np.clip(rate, 1e-300, 1 - 2.0**-53)
        logits.append(np.log(inside) - np.log1p(-inside))
    x, y = logits
    # Predictions that saturate at 0 or 1 give several blocks the same logit.
    rises = np.append(True, np.diff(x) > 0)
    return x[rises], y[rises]


_ROUNDS, _SLICE_STEPS = 5, 50


def slice_shifts(
    logits: Floats, clicked: Floats, weights: Floats, codes: NDArray[np.integer], most: int
) -> dict[int, float]:
    """Return by code the shift of the logit of its rows, the same for any order of the rows.

    A slice of few clicks stays with the whole, and without differences between slices there are no shifts at all.

    Args:
        logits: Calibrated on the whole, [n].
        clicked: 0 or 1, [n].
        weights: The rows' weights, [n].
        codes: The slice of each row, [n].
        most: How many slices have a shift: those with the most rows.
    """
    # Assume that the shifts come from a normal distribution around 0 whose variance is estimated from the slices
    # (DerSimonian and Laird 1986). Each shift is then its most probable value.
    order = np.lexsort((weights, clicked, logits, codes))
    logits, clicked, weights, codes = logits[order], clicked[order], weights[order], codes[order]
    values, starts, counts = np.unique(codes, return_index=True, return_counts=True)
    largest = np.sort(np.argsort(-counts, kind="stable")[:most])
    inside = np.repeat(np.isin(np.arange(len(values)), largest), counts)
    logits, clicked, weights = logits[inside], clicked[inside], weights[inside]
    counts = counts[largest]
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    shifts, variance = np.zeros(len(largest)), np.inf
    for _ in range(_ROUNDS):
        # 1. Estimate the variance of the true shifts by the method of moments: the spread of the estimates beyond what
        #    their known precision explains. It is 0 if chance explains all of it.
        score, information, noise = _sums(logits, clicked, weights, shifts, starts, counts)
        estimates = shifts + score / information
        precision = information**2 / noise
        whole = precision.sum()
        spread = float(precision @ (estimates - precision @ estimates / whole) ** 2)
        freedom = whole - float(precision @ precision) / whole
        variance = max(0.0, (spread - (len(estimates) - 1)) / (freedom or np.inf))
        if not variance:
            return {}

        # 2. Find the most probable shifts with that variance, where the next round takes its estimates.
        shifts = _most_probable(logits, clicked, weights, starts, counts, variance)
    return {int(value): float(shift) for value, shift in zip(values[largest], shifts, strict=True)}


def _sums(
    logits: Floats,
    clicked: Floats,
    weights: Floats,
    shifts: Floats,
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> tuple[Floats, Floats, Floats]:
    """Return per slice the log likelihood's first and minus second derivative by shift, and the first's variance."""
    predicted = sigmoid(logits + np.repeat(shifts, counts))
    spread = predicted * (1 - predicted)
    score = np.add.reduceat(weights * (clicked - predicted), starts)
    information = np.add.reduceat(weights * spread, starts)
    noise = np.add.reduceat(weights**2 * spread, starts)
    # Both are divisors, and would be 0 if all predictions of a slice were rounded to 0 or 1.
    return score, np.maximum(information, _TINY), np.maximum(noise, _TINY)


def _most_probable(
    logits: Floats,
    clicked: Floats,
    weights: Floats,
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    variance: float,
) -> Floats:
    """Find the most probable shifts of all slices at once, by Newton's method with bounded steps."""
    shifts = np.zeros(len(counts))
    for _ in range(_SLICE_STEPS):
        score, information, _ = _sums(logits, clicked, weights, shifts, starts, counts)
        step = np.clip((score - shifts / variance) / (information + 1 / variance), -1.0, 1.0)
        shifts = shifts + step
        if np.abs(step).max() < 1e-10:
            break
    return shifts


def fit_curve(
    method: Calibrator,
    labels: NDArray[np.floating],
    logits: NDArray[np.floating],
    weights: NDArray[np.floating] | None = None,
    codes: NDArray[np.integer] | None = None,
    most_slices: int = 1000,
) -> CalibrationCurve:
    """Fit a curve, in float64 and with the same bits for any order of the rows.

    Args:
        method: The kind of curve.
        labels: 0 or 1, [n].
        logits: The logits of the same rows, [n].
        weights: How many rows each row counts as, [n]; None: one.
        codes: The slice of each row, [n]; None: the curve has no shifts of slices.
        most_slices: How many slices have a shift: the largest.

    Raises:
        DataError: There are no rows, or one class only.
    """
    row_weights = fill_weights(labels, weights)
    rows = CalibrationRows.of(logits, labels, row_weights)
    curve = replace(method.fit(rows), rows=len(rows.logits), clicks=rows.clicks)
    if codes is None:
        return curve
    counted = row_weights > 0
    labels, logits, codes, row_weights = labels[counted], logits[counted], codes[counted], row_weights[counted]
    whole, clicked = applied(curve, logits), (labels == 1).astype(np.float64)
    shifts = slice_shifts(whole, clicked, row_weights, codes, most_slices)
    # JSON's keys are text.
    curve = replace(curve, shifts={str(code): shift for code, shift in shifts.items()} or None)
    order = np.lexsort((row_weights, labels, codes, logits))
    shifted = (whole + shifts_of(curve, codes))[order]
    return curve.shifted(matching_shift(CalibrationRows(shifted, clicked[order], row_weights[order]), shifted))
