"""Shifts of slices: what each value of a feature needs on top of the curve of all rows, as far as its rows tell."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluation.calibrators.rows import Floats
from pipeline.evaluation.metrics import sigmoid

_ROUNDS, _STEPS = 5, 50


def slice_shifts(
    logits: Floats, clicked: Floats, weights: Floats, codes: NDArray[np.integer], most: int
) -> dict[int, float]:
    """By code, the shift of the logit of its rows; of the ``most`` codes with the most rows.

    ``logits`` are calibrated on the whole. The shifts are drawn from a normal distribution around 0 whose variance is
    estimated from the slices (DerSimonian and Laird 1986); each is then its most probable value. So a slice of few
    clicks stays with the whole, and without differences between slices there are no shifts at all. The same for any
    order of the rows.
    """
    order = np.lexsort((weights, clicked, logits, codes))
    logits, clicked, weights, codes = logits[order], clicked[order], weights[order], codes[order]
    values, starts, counts = np.unique(codes, return_index=True, return_counts=True)
    kept = np.sort(np.argsort(-counts, kind="stable")[:most])
    inside = np.repeat(np.isin(np.arange(len(values)), kept), counts)
    logits, clicked, weights = logits[inside], clicked[inside], weights[inside]
    counts = counts[kept]
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    shifts, variance = np.zeros(len(kept)), np.inf
    for _ in range(_ROUNDS):
        score, information, noise = _sums(logits, clicked, weights, shifts, starts, counts)
        estimates = shifts + score / information
        variance = _variance(estimates, information**2 / noise)
        if not variance:
            return {}
        shifts = _most_probable(logits, clicked, weights, starts, counts, variance)
    return {int(value): float(shift) for value, shift in zip(values[kept], shifts, strict=True)}


def _sums(
    logits: Floats,
    clicked: Floats,
    weights: Floats,
    shifts: Floats,
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> tuple[Floats, Floats, Floats]:
    """By slice the log likelihood's first derivative by its shift, minus the second, and the first's variance."""
    predicted = sigmoid(logits + np.repeat(shifts, counts))
    spread = predicted * (1 - predicted)
    parts = (weights * (clicked - predicted), weights * spread, weights**2 * spread)
    score, information, noise = (np.add.reduceat(part, starts) for part in parts)
    tiny = np.finfo(np.float64).tiny ** 0.25
    return score, np.maximum(information, tiny), np.maximum(noise, tiny)


def _variance(estimates: Floats, precision: Floats) -> float:
    """Of the true shifts, from ``estimates`` with known ``precision``: the method of moments."""
    total = precision.sum()
    spread = float(precision @ (estimates - precision @ estimates / total) ** 2)
    return max(0.0, (spread - (len(estimates) - 1)) / (total - float(precision @ precision) / total or np.inf))


def _most_probable(
    logits: Floats,
    clicked: Floats,
    weights: Floats,
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    variance: float,
) -> Floats:
    """The shifts at the largest posterior probability, all slices at once: Newton's method with bounded steps."""
    shifts = np.zeros(len(counts))
    for _ in range(_STEPS):
        score, information, _ = _sums(logits, clicked, weights, shifts, starts, counts)
        step = np.clip((score - shifts / variance) / (information + 1 / variance), -1.0, 1.0)
        shifts = shifts + step
        if np.abs(step).max() < 1e-10:
            break
    return shifts
