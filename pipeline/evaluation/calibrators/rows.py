"""The rows that a calibrator is fitted on, in one order for every permutation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import DataError
from pipeline.evaluation.metrics import sigmoid

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
        """Sorted rows with a weight above 0; DataError unless there are some of both classes."""
        own = np.ones(len(logits)) if weights is None else weights.astype(np.float64)
        kept = own > 0
        values, clicked, own = logits[kept].astype(np.float64), (labels[kept] == 1).astype(np.float64), own[kept]
        order = np.lexsort((own, clicked, values))
        rows = CalibrationRows(values[order], clicked[order], own[order])
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
    """The sum of the product of arrays [n]; unlike a BLAS product, the same bits for any number of threads."""
    product = factors[0]
    for each in factors[1:]:
        product = product * each
    return float(product.sum())


def matching_shift(rows: CalibrationRows, logits: Floats) -> float:
    """What ``logits`` [n] need on top so that their mean prediction is the rows' click rate.

    Newton's method on the logit of the mean prediction, whose derivative lies in (0, 1].
    """
    weight, clicks = total(rows.weights), total(rows.weights, rows.clicked)
    target, shift = np.log(clicks) - np.log(weight - clicks), 0.0
    for _ in range(_STEPS):
        predicted = sigmoid(logits + shift)
        rest = 1 - predicted
        if not rest.any():  # a model that takes every row for a click
            rest = sigmoid(-logits - shift)
        expected, others = (max(total(rows.weights, each), _TINY) for each in (predicted, rest))
        rise = max(total(rows.weights, predicted, rest) * weight / (expected * others), _TINY)
        step = float(np.clip((target - np.log(expected) + np.log(others)) / rise, -_LONGEST, _LONGEST))
        shift += step
        if abs(step) < 1e-12:
            break
    return shift
