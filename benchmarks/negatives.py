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
import contextlib
import io
import json
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import finish
from pipeline.cli import main as nightjar
from pipeline.evaluation.metrics import sigmoid
from pipeline.stages.release_gate import LOGITS
from pipeline.store import Store
from pipeline.training.parquet import SplitReader

FIGURES = ("ne", "auc", "calibration", "clicked", "bayes_ne")


def main() -> None:
    """Train both for each seed, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--base-rate", type=float, default=0.02)
    parser.add_argument("--correct", default="logit", choices=("logit", "weights"))
    parser.add_argument("overrides", nargs="*", help="settings of both trainings, such as train.lr=0.01")
    parser.add_argument("--batch", type=int, default=512)
    args = parser.parse_args()
    print(f"{'seed':<6}{'rows':<10}{'trained on':>11}{'NE':>10}{'AUC':>9}{'calibration':>13}{'seconds':>9}")
    runs = [compared(args, seed + 1) for seed in range(args.seeds)]
    seconds = [sum(run[name]["seconds"] for run in runs) for name in ("sampled", "all")]
    mean = {
        name: {figure: statistics.fmean(run[name][figure] for run in runs) for figure in (*FIGURES, "rows", "ingest")}
        for name in runs[0]
    }
    changes = [run["sampled"]["ne"] / run["all"]["ne"] - 1 for run in runs]
    finish(
        "negatives",
        seconds[0] / seconds[1],
        share=args.share,
        correct=args.correct,
        ne_change=statistics.fmean(changes),
        worst_ne_change=max(changes),
        calibration=mean["sampled"]["calibration"],
        worst_calibration=_worst(run["sampled"]["calibration"] for run in runs),
        calibration_of_all=mean["all"]["calibration"],
        worst_calibration_of_all=_worst(run["all"]["calibration"] for run in runs),
        seeds=args.seeds,
        figures=mean,
    )


def _worst(calibrations: Iterable[float]) -> float:
    """The one that is furthest from 1."""
    return max(calibrations, key=lambda each: abs(each - 1))


def compared(args: argparse.Namespace, seed: int) -> dict[str, dict[str, float]]:
    """The figures of both trainings of a seed; the datasets are made first, so that trainings follow each other."""
    settings = [
        "data=synthetic",
        f"data.synthetic.rows={args.rows}",
        f"data.synthetic.base_rate={args.base_rate}",
        f"seed={seed}",
        "model.embedding_dim=8",
        "model.bottom_mlp=[32]",
        "model.top_mlp=[64]",
        "train.precision=fp32",
        "train.log_every_steps=1000",
        "train.warmup_steps=20",
        "train.schedule=linear",
        f"train.global_batch={args.batch}",
        "launch.inline=[ingest,plan,partition,train,evaluate]",
        *args.overrides,
    ]
    cases = {"all": [], "sampled": [f"data.sampling.negatives={args.share}", f"data.sampling.correct={args.correct}"]}
    with tempfile.TemporaryDirectory() as folder:
        common = [*settings, f"store={folder}"]
        ingested = {name: _run(folder, f"i{name}", [*common, *own, "stages=[ingest]"]) for name, own in cases.items()}
        made = {name: _run(folder, name, [*common, *own]) for name, own in cases.items()}
        expected = {name: _expected(folder, name) for name in made}
    figures = {}
    for name, result in made.items():
        trained = result["ingest"]["rows_train"]
        figures[name] = expected[name] | {
            "auc": result["eval"]["auc"],
            "clicked": result["eval"]["calibration"],
            "rows": trained,
            "seconds": result["stages"]["train"]["seconds"],
            "ingest": ingested[name]["stages"]["ingest"]["seconds"],
        }
        one = figures[name]
        print(
            f"{seed:<6}{name:<10}{trained:>11,}{one['ne']:>10.5f}{one['auc']:>9.5f}{one['calibration']:>13.4f}"
            f"{one['seconds']:>9.1f}",
            flush=True,
        )
    return figures


def _expected(folder: str, run: str) -> dict[str, float]:
    """NE and calibration that are expected of a run's test rows by their true probabilities, and the NE of these."""
    store = Store(folder)
    paths = {step["name"]: step["path"] for step in store.read_json(f"runs/{run}/steps.json")["steps"]}
    with store.open(f"{paths['evaluate']}/{LOGITS}") as source:
        logits = np.load(source, allow_pickle=False).astype(np.float64)
    column = SplitReader(store, store.get(paths["ingest"], "ingest"), "test").true_probability()
    assert column is not None
    truth = column.astype(np.float64)
    rate, loss = float(truth.mean()), np.logaddexp(0, logits) - truth * logits
    entropy = float(_entropy(np.array(rate)))
    return {
        "ne": float(loss.mean()) / entropy,
        "calibration": float(sigmoid(logits).mean()) / rate,
        "bayes_ne": float(_entropy(truth).mean()) / entropy,
    }


def _entropy(rate: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of a click with that probability, in nats."""
    return -rate * np.log(rate) - (1 - rate) * np.log1p(-rate)


def _run(folder: str, run: str, settings: list[str]) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = nightjar(["run", f"run={run}", *settings])
    result: dict[str, Any] = json.loads(Path(folder, f"runs/{run}/result.json").read_text())
    if code:
        raise SystemExit(f"{run}: {result['error']['message']}")
    return result


if __name__ == "__main__":
    main()
