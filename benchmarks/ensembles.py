"""``make bench-ensembles``: an ensemble from one training against the best single model of equal training time.

Two logs, five seeds: the synthetic log of ``benchmarks.epochs``, with a known truth, and the census log in five folds.
All trainings take the same epochs and the same train and validation rows. A single model has the constant schedule, the
linear one over all epochs, or the linear one anew in every epoch. It goes back to its best weights with lower rates,
ends with the weights of its best look at the validation rows, and stops once nothing gets better; the best of the three
counts, chosen by the mean over the test rows. The ensemble makes ``--count``
snapshots of kind ``--kind`` and keeps ``--keep``.

``ratio``: the larger of the logs' mean test NE of the ensemble over that of the best single model. ``selection``: the
larger of the logs' mean test NE of the chosen members over that of as many newest ones with equal weights.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks import adult, epochs
from benchmarks.common import finish
from benchmarks.runs import run

SINGLE = {
    "constant": ("train.schedule=constant", "train.decay_ratio=1"),
    "linear": ("train.schedule=linear", "train.decay_ratio=1", "train.validate.cycle_epochs=null"),
    "cycles": ("train.schedule=linear",),
}
EPOCHS_EACH = {"planted": 1, "adult": 3}  # of a snapshot
CHOSEN_ANEW = {  # from the same snapshots
    "last": ("train.snapshots.choose=last", "train.snapshots.weights=equal"),
    "equal": ("train.snapshots.weights=equal",),
    "all": ("train.snapshots.keep=64",),
}
Figures = dict[str, float]


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=60_000, help="rows of the synthetic log")
    options.add_argument("--adult", type=Path, default=Path("../shared/data/adult.data"))
    options.add_argument("--logs", default="planted,adult")
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--first", type=int, default=1, help="the first seed")
    options.add_argument("--count", type=int, default=8)
    options.add_argument("--keep", type=int, default=4)
    options.add_argument("--kind", default="reset")
    given = options.parse_args()
    began, logs = time.monotonic(), given.logs.split(",")
    found = {log: [run_seed(given, log, given.first + seed) for seed in range(given.seeds)] for log in logs}
    figures: dict[str, float] = {}
    for log, seeds in found.items():
        figures |= {f"{log}_{name}": value for name, value in summary(seeds).items()}
    finish(
        "ensembles",
        max(figures[f"{log}_ratio"] for log in logs),
        selection=max(figures[f"{log}_selection"] for log in logs),
        **figures,
        seconds=time.monotonic() - began,
    )


def summary(seeds: list[Figures]) -> Figures:
    """The means of a log's figures, and the ratios of the means."""
    mean = {name: float(np.mean([each[name] for each in seeds])) for name in seeds[0]}
    single = min(SINGLE, key=lambda name: mean[name])
    return {
        "ratio": mean["ensemble"] / mean[single],
        "selection": mean["ensemble"] / mean["last"],
        "better": float(sum(each["ensemble"] < each[single] for each in seeds)),
        "selection_better": float(sum(each["ensemble"] < each["last"] for each in seeds)),
        **{f"ne_{name}": value for name, value in mean.items()},
    }


def run_seed(given: argparse.Namespace, log: str, seed: int) -> Figures:
    """Test NE of the single models, of the ensemble, and of others made of the same snapshots."""
    length = f"train.epochs={EPOCHS_EACH[log] * given.count}"
    snapshots = [f"train.snapshots.count={given.count}", f"train.snapshots.keep={given.keep}"]
    snapshots += [f"train.snapshots.kind={given.kind}", "train.schedule=linear"]
    with tempfile.TemporaryDirectory() as folder:
        own = LOGS[log](given, folder, seed)
        common = [*own, length, "data.split.validation_share=0.2", f"store={folder}/store", f"seed={seed}"]
        common += ["train.threads_per_rank=1", "train.guard.collapse=false", "checkpoint.keep_last=1"]
        found = {}
        for name, settings in SINGLE.items():
            found[name] = _ne([*common, *settings, f"run={name}"])
            shutil.rmtree(f"{folder}/store/runs/{name}")
        found["ensemble"] = _ne([*common, *snapshots, "run=ensemble"])
        for name, settings in CHOSEN_ANEW.items():
            found[name] = _ne([*common, *snapshots, *settings, "run=ensemble"])
    print(f"{log} seed {seed}: " + "  ".join(f"{name} {value:.5f}" for name, value in found.items()), flush=True)
    return found


def _ne(settings: list[str]) -> float:
    return float(run(settings)["evaluate"].summary["ne"])


def _planted(given: argparse.Namespace, folder: str, seed: int) -> list[str]:
    return [each for each in epochs.base(given.rows, seed) if not each.startswith(("seed=", "train.guard", "train.th"))]


def _adult(given: argparse.Namespace, folder: str, seed: int) -> list[str]:
    return [each for each in adult.overrides(given.adult, folder, seed) if not each.startswith("train.")]


LOGS: dict[str, Callable[[argparse.Namespace, str, int], list[str]]] = {"planted": _planted, "adult": _adult}


if __name__ == "__main__":
    main()
