"""``make bench-ensembles``: an ensemble from one training against the best single model of equal training time.

Two logs, five seeds: the synthetic log of ``benchmarks.epochs``, with a known truth, and the census log in five folds.
All trainings take the same epochs and the same train and validation rows. A single model has the constant schedule, the
linear one over all epochs, or the linear one anew in every epoch. It goes back to its best weights with lower rates,
ends with the weights of its best look at the validation rows, and stops once nothing gets better; the best of the three
counts, chosen by the mean over the test rows. The ensemble makes ``--count`` snapshots of kind ``--kind`` and keeps
``--keep``.

``ratio``: the larger of the logs' mean test NE of the ensemble over that of the best single model. ``selection``: the
larger of the logs' mean test NE of the chosen members over that of as many newest ones with equal weights.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time

from benchmarks import epochs
from benchmarks.harness import ADULT, finish, means, options, show, test_ne
from benchmarks.logs import adult

SINGLE = {
    "constant": ["train.schedule=constant", "train.decay_ratio=1"],
    "linear": ["train.schedule=linear", "train.decay_ratio=1", "train.validate.cycle_epochs=null"],
    "cycles": ["train.schedule=linear"],
}
EPOCHS_EACH = {"planted": 1, "adult": 3}  # of a snapshot
ENSEMBLES = {  # all but the first choose anew from the same snapshots
    "ensemble": [],
    "last": ["train.snapshots.choose=last", "train.snapshots.weights=equal"],
    "equal": ["train.snapshots.weights=equal"],
    "all": ["train.snapshots.keep=64"],
}


def main() -> None:
    given = options(
        __doc__,
        rows=(60_000, "rows of the synthetic log"),
        adult=ADULT,
        logs="planted,adult",
        seeds=5,
        first=(1, "the first seed"),
        count=8,
        keep=4,
        kind="reset",
    )
    began, logs = time.monotonic(), given.logs.split(",")
    figures: dict[str, float] = {}
    for log in logs:
        seeds = [run_seed(given, log, given.first + seed) for seed in range(given.seeds)]
        mean = means(seeds)
        single = min(SINGLE, key=lambda name: mean[name])
        summary = {
            "ratio": mean["ensemble"] / mean[single],
            "selection": mean["ensemble"] / mean["last"],
            "better": float(sum(each["ensemble"] < each[single] for each in seeds)),
            "selection_better": float(sum(each["ensemble"] < each["last"] for each in seeds)),
            **{f"ne_{name}": value for name, value in mean.items()},
        }
        figures |= {f"{log}_{name}": value for name, value in summary.items()}
    worst = {what: max(figures[f"{log}_{what}"] for log in logs) for what in ("ratio", "selection")}
    finish("ensembles", worst["ratio"], selection=worst["selection"], **figures, seconds=time.monotonic() - began)


def run_seed(given: argparse.Namespace, log: str, seed: int) -> dict[str, float]:
    """Test NE of the single models, of the ensemble, and of others made of the same snapshots."""
    snapshots = [f"train.snapshots.{name}={getattr(given, name)}" for name in ("count", "keep", "kind")]
    with tempfile.TemporaryDirectory() as folder:
        if log == "adult":
            world = [each for each in adult(given.adult, folder, seed) if not each.startswith("train.")]
        else:
            world = epochs.base(given.rows, seed)
        world += ["data.split.validation_share=0.2", f"store={folder}/store", f"seed={seed}", "checkpoint.keep_last=1"]
        world += [f"train.epochs={EPOCHS_EACH[log] * given.count}", "train.threads_per_rank=1"]
        world += ["train.guard.collapse=false"]
        found = {}
        for name, settings in SINGLE.items():
            found[name] = test_ne([*world, *settings, f"run={name}"])
            shutil.rmtree(f"{folder}/store/runs/{name}")
        for name, settings in ENSEMBLES.items():
            found[name] = test_ne([*world, *snapshots, "train.schedule=linear", *settings, "run=ensemble"])
    show(f"{log} seed {seed}", found)
    return found


if __name__ == "__main__":
    main()
