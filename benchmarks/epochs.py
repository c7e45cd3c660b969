"""``make bench-epochs``: a training that stops by itself against the best number of epochs, found by hand.

The log has 60,000 rows of 10 columns, the largest of them with 5,000 ids, and the model learns it by heart within a few
epochs. ``ratio``: test NE of what a training of ten epochs publishes, over the best test NE of trainings of 1, 2, .. 10
epochs, each with a schedule of its own and the same train rows. ``ratio_all_rows``: the same, where those train on the
validation rows too. By hand the best number of epochs is chosen by the test rows themselves.
"""

from __future__ import annotations

import tempfile
import time

import numpy as np

from benchmarks.harness import SET, finish, means, options, processes, result, show, words
from pipeline.config.synthetic import SyntheticConfig
from pipeline.core.cpus import available_cpus
from pipeline.ingest.ground_truth import SPARSE, feature_sizes

COLUMNS, IDS = 10, 5_000


def main() -> None:
    jobs = (available_cpus(), "processes at a time")
    given = options(__doc__, rows=60_000, seeds=3, epochs=10, jobs=jobs, set=SET)
    began = time.monotonic()
    seeds = [run_seed(given.rows, 1 + seed, given.epochs, given.jobs, given.set) for seed in range(given.seeds)]
    mean = means(seeds)
    finish(
        "epochs",
        mean["ratio"],
        seconds=time.monotonic() - began,
        ratio_all_rows=mean["ratio_all_rows"],
        worst=max(seed["ratio"] for seed in seeds),
        seeds=seeds,
    )


def run_seed(rows: int, seed: int, epochs: int, jobs: int, more: list[str]) -> dict[str, float]:
    """The figures of one synthetic log."""
    validated, only_last = "data.split.validation_share=0.1", f"train.validate.every_steps={10**9}"
    runs = {"stops": [f"train.epochs={epochs}", validated]}
    for number in range(1, epochs + 1):
        runs[f"all-{number}"] = [f"train.epochs={number}"]
        runs[f"same-{number}"] = [f"train.epochs={number}", validated, only_last]
    with tempfile.TemporaryDirectory() as folder, processes(jobs) as pool:
        world = [*base(rows, seed), f"seed={seed}", "train.guard.collapse=false", "train.threads_per_rank=1"]
        settings = [[*world, f"store={folder}/{name}", f"run={name}", *own, *more] for name, own in runs.items()]
        done = dict(zip(runs, pool.map(result, settings), strict=True))
    by_hand = {kind: [done[f"{kind}-{n}"]["eval"]["ne"] for n in range(1, epochs + 1)] for kind in ("all", "same")}
    stops, validation = done["stops"], done["stops"]["train"].get("validation") or {}
    figures = {
        "ratio": stops["eval"]["ne"] / min(by_hand["same"]),
        "ratio_all_rows": stops["eval"]["ne"] / min(by_hand["all"]),
        "ne": stops["eval"]["ne"],
        "best_by_hand": min(by_hand["same"]),
        "last_epoch": by_hand["same"][-1],
        "steps": float(stops["train"]["steps"]),
        "best_epoch": validation.get("best_epoch", 0.0),
    }
    show(f"seed {seed}", figures, ".4f")
    return figures


def base(rows: int, seed: int) -> list[str]:
    """The log, and a model that can learn it by heart."""
    sizes = feature_sizes(SyntheticConfig(rows=rows, ids_per_feature=IDS))
    chosen = set(np.argsort(sizes)[np.linspace(0, SPARSE - 1, COLUMNS).astype(int)].tolist())
    removed = [f"~data.sparse.C{number + 1}" for number in range(SPARSE) if number not in chosen]
    removed += [f"~data.dense.I{number}" for number in range(1, 14)]
    log = f"""data=synthetic data.synthetic.rows={rows} data.synthetic.days=1 data.synthetic.ids_per_feature={IDS}
        data.synthetic.zipf=0.8 data.synthetic.dense_effect=0 data.synthetic.first_order_effect=2"""
    model = "model=dlrm model.embedding_dim=32 model.bottom_mlp=[64,32] model.top_mlp=[256,128] train.global_batch=512"
    return [*words(log), *removed, *words(model)]


if __name__ == "__main__":
    main()
