"""Training on a tenth of the rows without a click against training on all: test NE, calibration and seconds.

    python -m benchmarks.negatives [--seeds 3] [--rows 2000000] [--share 0.1] [--base-rate 0.02] [--correct logit]

The synthetic log of a seed is ingested twice, once with ``data.sampling.negatives``, and each dataset trains the same
model with the same settings, one epoch, in turn. The test rows are the same, and all of them are there. NE and
calibration are those expected of the test rows' true probabilities, which the synthetic log knows: the 8,000 clicks of
400,000 rows would move calibration by 1.1 % of chance, as much as the bar of 2 % allows to tell. ``clicked`` has
calibration by the clicks themselves. The ratio of the JSON line: seconds of the training stage, sampled over all, of
the runs of all seeds together.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile

import numpy as np

from benchmarks.harness import finish, means, nightjar, options, result_of, show, words
from pipeline.evaluation.metrics import sigmoid
from pipeline.stages.release_gate import LOGITS
from pipeline.store import Store
from pipeline.training.parquet import SplitReader

SETTINGS = words("""model.embedding_dim=8 model.bottom_mlp=[32] model.top_mlp=[64] train.precision=fp32
                train.log_every_steps=1000 train.warmup_steps=20 train.schedule=linear
                launch.inline=[ingest,plan,partition,train,evaluate]""")


def main() -> None:
    """Train both for each seed, and print the figures."""
    given = options(
        __doc__,
        words="overrides",
        seeds=3,
        rows=2_000_000,
        share=0.1,
        base_rate=0.02,
        correct=("logit", None, {"choices": ("logit", "weights")}),
        batch=512,
    )
    runs = [compare(given, seed + 1) for seed in range(given.seeds)]
    seconds = [sum(run[name]["seconds"] for run in runs) for name in ("sampled", "all")]
    mean = {name: means([run[name] for run in runs]) for name in runs[0]}
    for figures in mean.values():
        figures.pop("seconds")
    changes = [run["sampled"]["ne"] / run["all"]["ne"] - 1 for run in runs]
    worst = {name: max((run[name]["calibration"] for run in runs), key=lambda each: abs(each - 1)) for name in mean}
    finish(
        "negatives",
        seconds[0] / seconds[1],
        share=given.share,
        correct=given.correct,
        ne_change=statistics.fmean(changes),
        worst_ne_change=max(changes),
        calibration=mean["sampled"]["calibration"],
        worst_calibration=worst["sampled"],
        calibration_of_all=mean["all"]["calibration"],
        worst_calibration_of_all=worst["all"],
        seeds=given.seeds,
        figures=mean,
    )


def compare(given: argparse.Namespace, seed: int) -> dict[str, dict[str, float]]:
    """The figures of both trainings of a seed; the datasets are made first, so that trainings follow each other."""
    log = ["data=synthetic", f"data.synthetic.rows={given.rows}", f"data.synthetic.base_rate={given.base_rate}"]
    sampled = [f"data.sampling.negatives={given.share}", f"data.sampling.correct={given.correct}"]
    cases: dict[str, list[str]] = {"all": [], "sampled": sampled}
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        world = [*log, f"seed={seed}", *SETTINGS, f"train.global_batch={given.batch}", *given.overrides]
        world.append(f"store={folder}")
        for name, settings in cases.items():
            nightjar("run", f"run=i{name}", *world, *settings, "stages=[ingest]")
        for name, settings in cases.items():
            nightjar("run", f"run={name}", *world, *settings)
        for name in cases:
            result = result_of(folder, name)
            figures[name] = expected(folder, name) | {
                "auc": result["eval"]["auc"],
                "clicked": result["eval"]["calibration"],
                "rows": result["ingest"]["rows_train"],
                "seconds": result["stages"]["train"]["seconds"],
                "ingest": result_of(folder, f"i{name}")["stages"]["ingest"]["seconds"],
            }
            show(f"seed {seed}, {name}", figures[name])
    return figures


def expected(folder: str, run: str) -> dict[str, float]:
    """NE and calibration that are expected of a run's test rows by their true probabilities, and the NE of these."""
    store = Store(folder)
    paths = {step["name"]: step["path"] for step in store.read_json(f"runs/{run}/steps.json")["steps"]}
    with store.open(f"{paths['evaluate']}/{LOGITS}") as source:
        logits = np.load(source, allow_pickle=False).astype(np.float64)
    column = SplitReader(store, store.get(paths["ingest"], "ingest"), "test").true_probability()
    assert column is not None
    truth = column.astype(np.float64)
    rate, loss = float(truth.mean()), np.logaddexp(0, logits) - truth * logits
    # Entropy of a click with that probability, in nats.
    of_rate, of_truth = (-p * np.log(p) - (1 - p) * np.log1p(-p) for p in (np.array(rate), truth))
    calibration = float(sigmoid(logits).mean()) / rate
    return {"ne": loss.mean() / of_rate, "calibration": calibration, "bayes_ne": of_truth.mean() / of_rate}


if __name__ == "__main__":
    main()
