"""``make bench-negatives``: training on a tenth of the rows without a click, against all: NE, calibration, seconds.

The synthetic log of a seed is ingested twice, once with ``data.sampling.negatives``, and each dataset trains the same
model with the same settings, one epoch, in turn. The test rows are the same, and all of them are there. NE and
calibration are those expected of the test rows' true probabilities, which the synthetic log knows: the 8,000 clicks of
400,000 rows would move calibration by 1.1 % of chance, as much as the bar of 2 % allows to tell.

``ratio``: seconds of the training stage, sampled over all, of the runs of all seeds together.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np

from benchmarks.harness import finish, nightjar, options, result_of, run, words
from benchmarks.studies import Figures, mean_of, per_case
from pipeline.evaluation.metrics import sigmoid
from pipeline.stages.release_gate import LOGITS
from pipeline.store import Artifact, Store
from pipeline.training.parquet import SplitReader

SETTINGS = words("""model.embedding_dim=8 model.bottom_mlp=[32] model.top_mlp=[64] train.precision=fp32
    train.log_every_steps=1000 train.warmup_steps=20 train.schedule=linear train.global_batch=512
    launch.inline=[ingest,plan,partition,train,evaluate]""")


def main() -> None:
    given = options(__doc__, "overrides", seeds=3, rows=2_000_000, share=0.1, base_rate=0.02)
    found = per_case(compare, given, [(seed + 1,) for seed in range(given.seeds)], jobs=1)
    mean = mean_of(found)
    seconds = {name: each.pop("seconds") for name, each in mean.items()}
    changes = [each["sampled"]["ne"] / each["all"]["ne"] - 1 for each in found]
    worst = {name: max((each[name]["calibration"] for each in found), key=lambda c: abs(c - 1)) for name in mean}
    finish(
        "negatives",
        seconds["sampled"] / seconds["all"],
        share=given.share,
        ne_change=statistics.fmean(changes),
        worst_ne_change=max(changes),
        calibration=mean["sampled"]["calibration"],
        worst_calibration=worst["sampled"],
        calibration_of_all=mean["all"]["calibration"],
        worst_calibration_of_all=worst["all"],
        seeds=given.seeds,
        figures=mean,
    )


def compare(given: argparse.Namespace, folder: str, seed: int) -> Figures:
    """The figures of both trainings of a seed; the datasets are made first, so that trainings follow each other."""
    log = ["data=synthetic", f"data.synthetic.rows={given.rows}", f"data.synthetic.base_rate={given.base_rate}"]
    world = [*log, f"store={folder}", f"seed={seed}", *SETTINGS, *given.overrides]
    cases, figures = {"all": world, "sampled": [*world, f"data.sampling.negatives={given.share}"]}, {}
    for name, settings in cases.items():
        nightjar("run", f"run=i{name}", *settings, "stages=[ingest]")
    for name, settings in cases.items():
        nightjar("run", f"run={name}", *settings)
    for name, settings in cases.items():
        figures[name] = expected(Store(folder), run([*settings, f"run={name}"]))
        figures[name]["seconds"] = result_of(folder, name)["stages"]["train"]["seconds"]
    return figures


def expected(store: Store, made: dict[str, Artifact]) -> dict[str, float]:
    """NE and calibration that are expected of a run's test rows by their true probabilities, and the NE of these."""
    with store.open(f"{made['evaluate'].path}/{LOGITS}") as source:
        logits = np.load(source, allow_pickle=False).astype(np.float64)
    column = SplitReader(store, made["ingest"], "test").true_probability()
    assert column is not None
    truth = column.astype(np.float64)
    rate, loss = truth.mean(), np.logaddexp(0, logits) - truth * logits
    # Entropy of a click with that probability, in nats.
    of_rate, of_truth = (-p * np.log(p) - (1 - p) * np.log1p(-p) for p in (rate, truth))
    calibration, bayes_ne = sigmoid(logits).mean() / rate, of_truth.mean() / of_rate
    return {"ne": float(loss.mean() / of_rate), "calibration": float(calibration), "bayes_ne": float(bayes_ne)}


if __name__ == "__main__":
    main()
