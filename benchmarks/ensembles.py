"""``make bench-ensembles``: an ensemble from one training against the best single model of equal training time.

Two logs, five seeds: the synthetic log of ``benchmarks.epochs``, with a known truth, and the census log in five folds.
All trainings take the same epochs and the same train and validation rows. A single model has the constant schedule, the
linear one over all epochs, or the linear one anew in every epoch. It goes back to its best weights with lower rates,
ends with the weights of its best look at the validation rows, and stops once nothing gets better; the best of the three
counts, chosen by the mean over the test rows. The ensemble makes ``--count`` snapshots of kind ``--kind`` and keeps
``--keep``.

``ratio``: the larger of the logs' mean test NE of the ensemble over that of the best single model.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks import epochs
from benchmarks.harness import ADULT, finish, options
from benchmarks.logs import adult
from benchmarks.studies import by_variant, per_case, trained

SINGLE = {
    "constant": ["train.schedule=constant", "train.decay_ratio=1"],
    "linear": ["train.schedule=linear", "train.decay_ratio=1", "train.validate.cycle_epochs=null"],
    "cycles": ["train.schedule=linear"],
}
EPOCHS_EACH = {"planted": 1, "adult": 3}  # of a snapshot


def main() -> None:
    logs = (list(EPOCHS_EACH), None, {"choices": EPOCHS_EACH})
    snapshots: dict[str, Any] = {"count": 8, "keep": 4, "kind": "reset"}
    given = options(__doc__, rows=(60_000, "of the synthetic log"), logs=logs, seeds=5, **snapshots)
    began, ratios, figures = time.monotonic(), [], dict[str, Any]()
    for log in given.logs:
        found = per_case(single_and_ensemble, given, [(log, 1 + seed) for seed in range(given.seeds)], jobs=1)
        nes = by_variant(found)
        mean = {name: sum(each) / len(each) for name, each in nes.items()}
        best = min(SINGLE, key=mean.__getitem__)
        ratios.append(mean["ensemble"] / mean[best])
        figures |= {f"{log}_ratio": ratios[-1], **{f"{log}_ne_{name}": each for name, each in mean.items()}}
        pairs = zip(nes["ensemble"], nes[best], strict=True)
        figures[f"{log}_better"] = sum(ensemble < single for ensemble, single in pairs)
    finish("ensembles", max(ratios), **figures, seconds=time.monotonic() - began)


def single_and_ensemble(given: argparse.Namespace, folder: str, log: str, seed: int) -> Any:
    """Test NE of the single models and of the ensemble."""
    if log == "adult":
        world = [each for each in adult(ADULT, folder, seed) if not each.startswith("train.")]
    else:
        world = epochs.base(given.rows, seed)
    world += ["data.split.validation_share=0.2", f"store={folder}/store", f"seed={seed}", "checkpoint.keep_last=1"]
    world += [f"train.epochs={EPOCHS_EACH[log] * given.count}", "train.threads_per_rank=1"]
    world += ["train.guard.collapse=false"]
    snapshots = [f"train.snapshots.{name}={getattr(given, name)}" for name in ("count", "keep", "kind")]
    return trained(world, {**SINGLE, "ensemble": [*snapshots, "train.schedule=linear"]})


if __name__ == "__main__":
    main()
