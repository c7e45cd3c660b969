"""``make bench-epochs``: a training that stops by itself against the best number of epochs, found by hand.

The log has 60,000 rows of 10 columns, the largest of them with 5,000 ids, and the model learns it by heart within a few
epochs. ``ratio``: test NE of what a training of ten epochs publishes, over the best test NE of trainings of 1, 2, .. 10
epochs, each with a schedule of its own and the same train rows. ``ratio_all_rows``: the same, where those train on the
validation rows too. By hand the best number of epochs is chosen by the test rows themselves.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.common import finish
from benchmarks.runs import processes, run
from pipeline.config.synthetic import SyntheticConfig
from pipeline.core.cpus import available_cpus
from pipeline.ingest.ground_truth import SPARSE, feature_sizes

COLUMNS, IDS = 10, 5_000


@dataclass(frozen=True)
class Trained:
    """Test NE of a training, the steps it took, and what it says about its validation rows."""

    ne: float
    steps: int
    seconds: float
    validation: dict[str, float] | None


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=60_000)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--epochs", type=int, default=10)
    options.add_argument("--jobs", type=int, default=available_cpus(), help="processes at a time")
    options.add_argument("--set", nargs="*", default=[], help="overrides of every run's configuration")
    given = options.parse_args()
    began = time.monotonic()
    seeds = [run_seed(given.rows, 1 + seed, given.epochs, given.jobs, tuple(given.set)) for seed in range(given.seeds)]
    finish(
        "epochs",
        float(np.mean([seed["ratio"] for seed in seeds])),
        seconds=time.monotonic() - began,
        ratio_all_rows=float(np.mean([seed["ratio_all_rows"] for seed in seeds])),
        worst=max(seed["ratio"] for seed in seeds),
        seeds=seeds,
    )


def run_seed(rows: int, seed: int, epochs: int, jobs: int, more: tuple[str, ...]) -> dict[str, float]:
    """The figures of one synthetic log."""
    every = range(1, epochs + 1)
    runs = {f"all-{n}": [f"train.epochs={n}"] for n in every}
    only_last = f"train.validate.every_steps={10**9}"
    runs |= {f"same-{n}": [f"train.epochs={n}", "data.split.validation_share=0.1", only_last] for n in every}
    runs["stops"] = [f"train.epochs={epochs}", "data.split.validation_share=0.1"]
    with tempfile.TemporaryDirectory() as folder, processes(jobs) as pool:
        settings = [[*base(rows, seed), f"store={folder}/{name}", *own, *more] for name, own in runs.items()]
        results = dict(zip(runs, pool.map(train, settings, list(runs)), strict=True))
    best = {kind: min(results[f"{kind}-{n}"].ne for n in every) for kind in ("all", "same")}
    stops = results["stops"]
    looked = stops.validation or {}
    by_hand = " ".join(f"{results[f'same-{n}'].ne:.4f}" for n in every)
    print(
        f"seed {seed}: by hand, epochs 1 to {epochs}: {by_hand}; stops after step {stops.steps:,}, "
        f"epoch {looked.get('best_epoch', 0):.2f} published: {stops.ne:.4f}, {stops.ne / best['same']:.4f} of the "
        f"best, {stops.ne / best['all']:.4f} of that with all rows",
        flush=True,
    )
    return {
        "ratio": stops.ne / best["same"],
        "ratio_all_rows": stops.ne / best["all"],
        "ne": stops.ne,
        "best_by_hand": best["same"],
        "last_epoch": results[f"same-{epochs}"].ne,
        "steps": float(stops.steps),
        "best_epoch": looked.get("best_epoch", 0.0),
        "seconds_of_looks": looked.get("seconds", 0.0),
        "seconds": stops.seconds,
    }


def base(rows: int, seed: int) -> list[str]:
    """The log, and a model that can learn it by heart."""
    log = SyntheticConfig(rows=rows, ids_per_feature=IDS)
    chosen = set(np.argsort(feature_sizes(log))[np.linspace(0, SPARSE - 1, COLUMNS).astype(int)].tolist())
    others = [f"~data.sparse.C{number + 1}" for number in range(SPARSE) if number not in chosen]
    return [
        "data=synthetic",
        f"data.synthetic.rows={rows}",
        "data.synthetic.days=1",
        f"data.synthetic.ids_per_feature={IDS}",
        "data.synthetic.zipf=0.8",
        "data.synthetic.dense_effect=0",
        *others,
        *(f"~data.dense.I{number}" for number in range(1, 14)),
        f"seed={seed}",
        "data.synthetic.first_order_effect=2",
        "model=dlrm",
        "model.embedding_dim=32",
        "model.bottom_mlp=[64,32]",
        "model.top_mlp=[256,128]",
        "train.global_batch=512",
        "train.guard.collapse=false",
        "train.threads_per_rank=1",
    ]


def train(settings: list[str], name: str) -> Trained:
    """One run up to its evaluation; in a process of one rank."""
    made = run([*settings, f"run={name}"])
    figures = made["train"].summary["train"]
    return Trained(made["evaluate"].summary["ne"], figures["steps"], figures["seconds"], figures.get("validation"))


if __name__ == "__main__":
    main()
