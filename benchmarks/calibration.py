"""``make bench-calibration``: how well probabilities are calibrated at a click rate of 0.2 %, with and without a curve.

What a calibrator gets is planted: a model's logits, ids of a feature with ten values, and clicks that are drawn from
true probabilities. The model knows part of what decides a click, and says it wrongly: its logits are too high, too far
apart above a bend, and off by a constant for each value. An isotonic calibrator (``publish.calibrator``) with shifts by
the feature is fitted on ``--rows`` of them. On as many other rows as make no noise, predicted clicks are compared with
the sum of the true probabilities. What is left is chance among the clicks that the curve was fitted on: of n clicks the
total is off by 1 / sqrt(n), so a bar of 3 % in each of ten slices needs some ten thousand clicks a slice, and 40
million rows. Nothing is ingested or trained for that.

``ratio``: 3 % over the largest error, overall and in ten slices; 1 or more is within the bar. ``auc_change``: of the
curve alone, which changes no order. ``chance``: one standard error of a slice's figure. ``--trained ROWS`` adds a model
that is trained on a synthetic log of so many rows; half of its held-out rows fit the curve, and chance is larger.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import finish, options, run_config, silent, words
from pipeline.config.compose import compose
from pipeline.evaluation import evaluate
from pipeline.evaluation.calibration_curves import applied, fit_curve, shifts_of
from pipeline.evaluation.metrics import sigmoid
from pipeline.records import LABEL
from pipeline.specs import CALIBRATORS
from pipeline.stages.release_gate import LOGITS, chosen_rows
from pipeline.store import Store
from pipeline.training.parquet import SplitReader

FEATURE, SLICES, LIMIT = "C1", 10, 0.03
TEST_ROWS = 4_000_000
BEND = -4.5  # of the planted model's logits


@dataclass(frozen=True)
class Rows:
    """Logits of a model, labels, true probabilities and ids of the feature, [n] each."""

    logits: NDArray[np.float32]
    labels: NDArray[np.float32]
    truth: NDArray[np.floating]
    codes: NDArray[np.integer]

    def of(self, chosen: NDArray[np.bool_]) -> Rows:
        """The ``chosen`` ones."""
        return Rows(self.logits[chosen], self.labels[chosen], self.truth[chosen], self.codes[chosen])


@dataclass(frozen=True)
class Errors:
    """Predicted over true clicks, less 1, overall and by slice; the change of AUC; clicks that the curve has."""

    before: list[float]
    after: list[float]
    auc_change: float
    clicks: int

    def show(self, name: str) -> None:
        """As lines."""
        print(f"{name}: {self.clicks:,} clicks to fit; predicted over true clicks, all rows and slices", flush=True)
        for when, errors in (("before", self.before), ("after", self.after)):
            print(f"  {when:<6} " + " ".join(f"{error:+.2%}" for error in errors), flush=True)


def main() -> None:
    given = options(
        __doc__,
        rows=(40_000_000, "planted rows that the curve is fitted on"),
        rate=(0.002, "share of clicks"),
        seed=1,
        trained=(0, "rows of a log that a model is trained on too"),
        set=([], "overrides of that training's configuration"),
    )
    silent()
    began = time.monotonic()
    planted = _compared(_planted(given.rows, given.rate, given.seed), _planted(TEST_ROWS, given.rate, given.seed, 1))
    planted.show("planted")
    figures = {"chance": (SLICES / planted.clicks) ** 0.5}
    if given.trained:
        held, fitting = _held_out(given)
        trained = _compared(held.of(fitting), held.of(~fitting))
        trained.show("trained")
        figures |= {"trained_overall": abs(trained.after[0]), "trained_before": abs(trained.before[0])}
    worst = max(map(abs, planted.after))
    finish(
        "calibration",
        LIMIT / worst,
        seconds=time.monotonic() - began,
        rows=given.rows,
        clicks=planted.clicks,
        overall=abs(planted.after[0]),
        overall_before=abs(planted.before[0]),
        worst=worst,
        worst_before=max(map(abs, planted.before)),
        auc_change=planted.auc_change,
        **figures,
    )


def _planted(rows: int, rate: float, seed: int, part: int = 0) -> Rows:
    """Rows of one truth; other ones for another ``part``."""
    effects = np.random.default_rng(seed).normal(0, 0.3, (2, SLICES)).astype(np.float32)  # of a value, and the error
    rng = np.random.default_rng([seed, part])
    codes = rng.integers(0, SLICES, rows, dtype=np.int8)
    known = rng.standard_normal(rows, np.float32)
    known += effects[0][codes]
    spread = 1.0 + 0.25 + 0.3**2  # variance of the logit: the mean probability is about exp(start + spread / 2)
    truth = sigmoid(known + rng.standard_normal(rows, np.float32) / 2 + np.float32(np.log(rate) - spread / 2))
    labels = (rng.random(rows, np.float32) < truth).astype(np.float32)
    logits = 1.2 * known + np.float32(np.log(rate) + 0.2) + effects[1][codes]
    logits = logits + 0.4 * np.maximum(logits - BEND, 0)
    return Rows(logits.astype(np.float32), labels, truth.astype(np.float32), codes)


def _held_out(given: argparse.Namespace) -> tuple[Rows, NDArray[np.bool_]]:
    """What a model of a synthetic log, trained for one pass, says of held-out rows; which of them fit the curve."""
    with tempfile.TemporaryDirectory() as folder:
        config = compose(
            [
                *words(f"""data=synthetic model=dlrm_small data.synthetic.rows={given.trained} data.synthetic.days=1
                data.synthetic.base_rate={given.rate} data.synthetic.ids_per_feature=500 data.split.by=hash
                data.split.test_share=0.7 train.global_batch=4096 train.log_every_steps=1000
                train.guard.collapse=false seed={given.seed} store={folder}/store run=calibration"""),
                *given.set,
            ]
        )
        store, made = Store(config.store), run_config(config)
        split = SplitReader(store, made["ingest"], "test")
        with store.open(f"{made['evaluate'].path}/{LOGITS}") as source:
            logits = np.load(source, allow_pickle=False)
        truth = split.true_probability()
        assert truth is not None
        rows = Rows(logits, split.column(LABEL), truth, split.column(FEATURE).astype(np.int64))
        return rows, chosen_rows(split, 0.5, given.seed)


def _compared(fit: Rows, rest: Rows) -> Errors:
    """A curve fitted on some rows, judged by others."""
    curve = fit_curve(CALIBRATORS.get("isotonic"), fit.labels, fit.logits, None, fit.codes)
    bare = applied(curve, rest.logits)
    change = evaluate(rest.labels, bare.astype(np.float32))["auc"] - evaluate(rest.labels, rest.logits)["auc"]
    values, counts = np.unique(rest.codes, return_counts=True)
    common = values[np.argsort(-counts, kind="stable")][: SLICES - (len(values) > SLICES)]
    slices = np.where(np.isin(rest.codes, common), rest.codes, -1)
    before, after = (_errors(each, rest.truth, slices) for each in (rest.logits, bare + shifts_of(curve, rest.codes)))
    return Errors(before, after, abs(change), curve.clicks)


def _errors(logits: NDArray[np.floating], truth: NDArray[np.floating], codes: NDArray[np.integer]) -> list[float]:
    """Predicted clicks over true ones, less 1: of all rows, and of those of each of ``codes``."""
    predicted = sigmoid(logits)
    parts = [np.ones(len(codes), bool), *(codes == code for code in np.unique(codes))]
    return [float(predicted[part].sum() / truth[part].sum(dtype=np.float64) - 1) for part in parts]


if __name__ == "__main__":
    main()
