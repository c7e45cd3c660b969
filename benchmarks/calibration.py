"""``make bench-calibration``: how well probabilities are calibrated at a click rate of 0.2 %, with and without a curve.

What a calibrator gets is planted: a model's logits, ids of a feature with ten values, and clicks that are drawn from
true probabilities. The model knows part of what decides a click, and says it wrongly: its logits are too high, too far
apart above a bend, and off by a constant for each value. An isotonic calibrator (``publish.calibrator``) with shifts by
the feature is fitted on ``--rows`` of them. On as many other rows as make no noise, predicted clicks are compared with
the sum of the true probabilities. What is left is chance among the clicks that the curve was fitted on: of n clicks the
total is off by 1 / sqrt(n), so a bar of 3 % in each of ten slices needs some ten thousand clicks a slice, and 40
million rows. Nothing is ingested or trained for that.

``ratio``: 3 % over the largest error, overall and in ten slices; 1 or more is within the bar. ``auc_change``: of the
curve alone, which changes no order. ``chance``: one standard error of a slice's figure.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import finish, options
from pipeline.evaluation import evaluate
from pipeline.evaluation.calibration_curves import applied, fit_curve, shifts_of
from pipeline.evaluation.metrics import sigmoid
from pipeline.specs import CALIBRATORS

SLICES, LIMIT = 10, 0.03
TEST_ROWS = 4_000_000
BEND = -4.5  # of the planted model's logits


@dataclass(frozen=True)
class Rows:
    """Logits of a model, labels, true probabilities and values of the feature, [n] each."""

    logits: NDArray[np.float32]
    labels: NDArray[np.float32]
    truth: NDArray[np.float32]
    values: NDArray[np.int8]

    def errors(self, logits: NDArray[np.floating]) -> list[float]:
        """Clicks that ``logits`` predict over true ones, less 1: of all rows, and of each value of the feature."""
        predicted = sigmoid(logits)
        parts = [np.ones(len(self.values), bool), *(self.values == value for value in range(SLICES))]
        return [float(predicted[part].sum() / self.truth[part].sum(dtype=np.float64) - 1) for part in parts]


def main() -> None:
    given = options(
        __doc__,
        rows=(40_000_000, "that the curve is fitted on"),
        rate=(0.002, "share of clicks"),
        seed=1,
    )
    began = time.monotonic()
    fit, rest = planted(given.rows, given.rate, given.seed, 0), planted(TEST_ROWS, given.rate, given.seed, 1)
    curve = fit_curve(CALIBRATORS.get("isotonic"), fit.labels, fit.logits, None, fit.values)
    bare = applied(curve, rest.logits)
    aucs = [evaluate(rest.labels, logits.astype(np.float32))["auc"] for logits in (bare, rest.logits)]
    before, after = rest.errors(rest.logits), rest.errors(bare + shifts_of(curve, rest.values))
    for when, errors in (("before", before), ("after", after)):
        print(f"{when:<6} " + " ".join(f"{error:+.2%}" for error in errors), flush=True)
    worst = max(map(abs, after))
    finish(
        "calibration",
        LIMIT / worst,
        seconds=time.monotonic() - began,
        rows=given.rows,
        clicks=curve.clicks,
        overall=abs(after[0]),
        overall_before=abs(before[0]),
        worst=worst,
        worst_before=max(map(abs, before)),
        auc_change=abs(aucs[0] - aucs[1]),
        chance=(SLICES / curve.clicks) ** 0.5,
    )


def planted(rows: int, rate: float, seed: int, part: int) -> Rows:
    """Rows of one truth; other ones for another ``part``."""
    effects = np.random.default_rng(seed).normal(0, 0.3, (2, SLICES)).astype(np.float32)  # of a value, and the error
    rng = np.random.default_rng([seed, part])
    values = rng.integers(0, SLICES, rows, dtype=np.int8)
    known = rng.standard_normal(rows, np.float32)
    known += effects[0][values]
    spread = 1.0 + 0.25 + 0.3**2  # variance of the logit: the mean probability is about exp(start + spread / 2)
    truth = sigmoid(known + rng.standard_normal(rows, np.float32) / 2 + np.float32(np.log(rate) - spread / 2))
    labels = (rng.random(rows, np.float32) < truth).astype(np.float32)
    logits = 1.2 * known + np.float32(np.log(rate) + 0.2) + effects[1][values]
    logits = logits + 0.4 * np.maximum(logits - BEND, 0)
    return Rows(logits.astype(np.float32), labels, truth.astype(np.float32), values)


if __name__ == "__main__":
    main()
