"""``make bench-calibration``: how well probabilities are calibrated at a click rate of 0.2 %, with and without a curve.

A model trains on a synthetic log whose rows carry the true probability of a click. Half of its held-out rows fit an
isotonic calibrator (``publish.calibrator``), with shifts by the values of a feature. On the others, predicted clicks
are compared with the sum of the true probabilities, so that the figures have no noise of labels. What is left is the
noise of the clicks that the curve was fitted on: with n of them, the total is off by 1 / sqrt(n) of chance, and that of
a slice with a tenth of them by three times as much. So that a bar of 3 % tests the calibrator and not chance, each row
to fit counts ``--draws`` times, each time with a label of its own: the first is the log's, the others are drawn from
the row's true probability. That is what a log of as many times the rows would show, but for rows that it would not
repeat. ``--draws 1`` fits on the log's own labels alone.

``ratio``: 3 % over the largest error of all seeds, overall and in ten slices (the nine most frequent values of the
feature, and all others together); 1 or more is within the bar. ``auc_change``: the largest, of the curve
alone, which changes no order.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import finish
from pipeline.compose import compose
from pipeline.evaluation import evaluate
from pipeline.evaluation.calibrators.apply import applied, shifts_of
from pipeline.evaluation.calibrators.fit import fit_curve
from pipeline.evaluation.metrics import sigmoid
from pipeline.records import LABEL
from pipeline.specs import CALIBRATORS
from pipeline.specs.stage import StageIO
from pipeline.stages.calibrating import chosen_rows
from pipeline.stages.judging import LOGITS
from pipeline.stages.run import run_stage
from pipeline.stages.steps import steps
from pipeline.store import Store
from pipeline.training.parquet import SplitReader

FEATURE, SLICES, LIMIT = "C1", 10, 0.03


@dataclass(frozen=True)
class Held:
    """The held-out rows: logits, labels, true probabilities, ids of the feature, and which of them fit the curve."""

    logits: NDArray[np.float32]
    labels: NDArray[np.float32]
    truth: NDArray[np.float64]
    codes: NDArray[np.int64]
    fitting: NDArray[np.bool_]


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--rows", type=int, default=2_500_000, help="of a log")
    options.add_argument("--draws", type=int, default=40, help="labels of each row that the curve is fitted on")
    options.add_argument("--rate", type=float, default=0.002, help="share of clicks")
    options.add_argument("--held-out", type=float, default=0.4, help="share of the rows that training does not see")
    options.add_argument("--set", nargs="*", default=[], help="overrides of every run's configuration")
    given = options.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    began, worst, moved = time.monotonic(), {"before": 0.0, "after": 0.0}, 0.0
    total = {"before": 0.0, "after": 0.0}
    for seed in range(1, given.seeds + 1):
        held = _held_out(given, seed)
        before, after, change, clicks = _compared(held, given.draws, seed)
        moved = max(moved, change)
        print(f"seed {seed}: {clicks:,} clicks to fit; predicted over true clicks, all rows and slices", flush=True)
        for name, errors in (("before", before), ("after", after)):
            worst[name], total[name] = max(worst[name], *map(abs, errors)), max(total[name], abs(errors[0]))
            print(f"  {name:<6} " + " ".join(f"{error:+.2%}" for error in errors), flush=True)
    finish(
        "calibration", LIMIT / worst["after"], seconds=time.monotonic() - began, overall=total["after"],
        overall_before=total["before"], worst=worst["after"], worst_before=worst["before"], auc_change=moved,
        draws=given.draws, seeds=given.seeds,
    )  # fmt: skip


def _held_out(given: argparse.Namespace, seed: int) -> Held:
    """A model of one log, trained for one pass, and what it says of the held-out rows."""
    with tempfile.TemporaryDirectory() as folder:
        config = compose([
            "data=synthetic", "model=dlrm_small", f"data.synthetic.rows={given.rows}", "data.synthetic.days=1",
            f"data.synthetic.base_rate={given.rate}", "data.synthetic.ids_per_feature=500", "data.split.by=hash",
            f"data.split.test_share={given.held_out}", "train.global_batch=4096", "train.log_every_steps=1000",
            "train.guard.collapse=false", f"seed={seed}", f"store={folder}/store", "run=calibration", *given.set,
        ])  # fmt: skip
        store = Store(config.store)
        made = {step.name: step for step in steps(config, store)}
        for step in made.values():
            run_stage(step, config, store, StageIO())
        split = SplitReader(store, store.get(made["ingest"].path, "ingest"), "test")
        with store.open(f"{made['evaluate'].path}/{LOGITS}") as source:
            logits = np.load(source, allow_pickle=False)
        truth = split.true_probability()
        assert truth is not None
        return Held(
            logits, split.column(LABEL), truth.astype(np.float64), split.column(FEATURE).astype(np.int64),
            chosen_rows(split, 0.5, seed),
        )  # fmt: skip


def _drawn(held: Held, draws: int, seed: int) -> NDArray[np.float32]:
    """Labels [draws x n] of the n rows that fit the curve: the log's own, then drawn ones, pass after pass."""
    rng, truth = np.random.default_rng(seed), held.truth[held.fitting]
    more = [(rng.random(len(truth)) < truth).astype(np.float32) for _ in range(draws - 1)]
    return np.concatenate([held.labels[held.fitting], *more])


def _compared(held: Held, draws: int, seed: int) -> tuple[list[float], list[float], float, int]:
    """Errors of calibration before and after (overall, then by slice), change of AUC, clicks that the curve has."""
    fit, rest = held.fitting, ~held.fitting
    method, drawn = CALIBRATORS.get("isotonic"), _drawn(held, draws, seed)
    plain = fit_curve(method, drawn, np.tile(held.logits[fit], draws))
    sliced = fit_curve(method, drawn, np.tile(held.logits[fit], draws), None, np.tile(held.codes[fit], draws))
    logits, labels = held.logits[rest], held.labels[rest]
    curve = applied(plain, logits).astype(np.float32)
    served = applied(sliced, logits) + shifts_of(sliced, held.codes[rest])
    change = abs(evaluate(labels, curve)["auc"] - evaluate(labels, logits)["auc"])
    values, counts = np.unique(held.codes, return_counts=True)
    common = values[np.argsort(-counts, kind="stable")][: SLICES - 1]
    slices = np.where(np.isin(held.codes[rest], common), held.codes[rest], -1)
    before, after = (_errors(each, held.truth[rest], slices) for each in (logits, served))
    return before, after, change, plain.clicks


def _errors(logits: NDArray[np.floating], truth: NDArray[np.float64], codes: NDArray[np.int64]) -> list[float]:
    """Predicted clicks over true ones, less 1: of all rows, and of those of each of ``codes``."""
    predicted = sigmoid(logits)
    parts = [np.ones(len(codes), bool), *(codes == code for code in np.unique(codes))]
    return [float(predicted[part].sum() / truth[part].sum() - 1) for part in parts]


if __name__ == "__main__":
    main()
