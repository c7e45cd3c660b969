"""``make bench-search``: whether ``nightjar search`` finds what was planted, and what the model found is worth.

The planted log has 12 features of 24 ids. Half of them have one hidden value for each id, which is all that they do;
the others have 16. 22 of the 66 pairs of features interact by the product of their hidden vectors, each feature with
two wide ones at least. The model to begin with is the default DLRM, whose tables all have width 16. A seed draws
another log. Original and found model train with the same settings, by the ordinary stages, in this process: two passes
over a million rows. In more passes over fewer rows the original learns them by heart (docs/measurements/models.md). The
search takes one pass.

``ratio``: predicted step of the model found over that of the original, each with a plan of its own. ``widths``: share
of the tables whose width is within a factor of two of the planted one. ``interactions``: share of the planted pairs
that are kept; ``absent``: of the others, that are dropped. ``ne_ratio``: test NE of the model found over that of the
original, each the mean of ``--trainings`` with the rows in another order, which alone moves NE by some per cent.
``trainings``: CPU seconds of the search over those of the original's train stage (``trainings_wall``: over its loop by
the clock). Both are one process with as many threads, so that CPU seconds are what they take on a machine of their own,
and the load beside does not count. Each is the mean over the seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.common import finish
from benchmarks.runs import run, run_config, silent
from pipeline.config import Config
from pipeline.config.compose import compose
from pipeline.plugins.search.architecture_space import ArchitectureSpace
from pipeline.plugins.search.loop import search
from pipeline.plugins.search.search_page import best_experiment
from pipeline.records import SearchRecord
from pipeline.stages.execution import with_resolved_batch
from pipeline.stages.stage_inputs import read_dataset
from pipeline.store import Artifact, Store

FEATURES, WIDE, IDS, NUMBERS = 12, 16, 24, 2
PAIRS, EFFECT, OWN_EFFECT, NUMBER_EFFECT, BIAS = 22, 0.7, 0.3, 0.3, -1.0
FIGURES = ("ratio", "widths", "interactions", "absent", "ne_ratio", "trainings", "trainings_wall", "bytes_ratio")


@dataclass(frozen=True)
class Planted:
    """The truth of a log: the width of every feature, the pairs that interact."""

    widths: list[int]
    pairs: list[tuple[int, int]]


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, nargs="+", default=[101, 102])
    options.add_argument("--rows", type=int, default=1_000_000, help="of a log, a fifth of them to test on")
    options.add_argument("--epochs", type=int, default=2, help="of the trainings; the search has one")
    options.add_argument("--trainings", type=int, default=4, help="of either model, each in another order of the rows")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--set", nargs="*", default=[], help="overrides of every run's configuration")
    given = options.parse_args()
    began, found = time.monotonic(), []
    for seed in given.seeds:
        with tempfile.TemporaryDirectory() as folder:
            found.append(one(Path(folder), seed, given))
        print(f"seed {seed}: {json.dumps(found[-1])}", flush=True)
    mean = {name: float(np.mean([each[name] for each in found])) for name in FIGURES}
    finish("search", mean.pop("ratio"), **mean, seeds=given.seeds, rows=given.rows, seconds=time.monotonic() - began)


def one(folder: Path, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """The figures of one seed."""
    silent()
    truth, log = planted(given.rows, seed)
    own = [
        *written(folder, log),
        "train.global_batch=512",
        f"train.epochs={given.epochs}",
        "train.sparse_lr=0.1",
        f"seed={seed}",
        f"store={folder}/store",
        "hardware=laptop",
        f"train.threads_per_rank={given.threads}",
        "train.log_every_steps=1000",
        "train.guard.collapse=false",
        "search.name=planted",
        "search.epochs=1",
        *given.set,
    ]
    cpu: dict[str, float] = {}
    before = run([*own, "run=before"], cpu)
    began = time.process_time()
    record, config, best = searched(own, before["ingest"], folder, given.threads)
    spent = time.process_time() - began
    (folder / "my" / "experiment").mkdir(parents=True)
    (folder / "my" / "experiment" / "best.yaml").write_text(best)
    orders = [seed + 1000 * number for number in range(given.trainings)]
    others = (run([*own, f"run=before-{order}", f"seed={order}"]) for order in orders[1:])
    known = [ne_of(each) for each in (before, *others)]
    found = [ne_of(run_found(folder, order, given.threads)) for order in orders]
    ratios = np.array(found) / np.array(known)
    return {
        **scores(truth, record),
        "ne_ratio": float(np.mean(found) / np.mean(known)),
        "ne_ratio_error": float(ratios.std(ddof=1) / len(ratios) ** 0.5) if len(ratios) > 1 else None,
        "ne": known,
        "ne_found": found,
        "trainings": spent / cpu["train"],
        "trainings_wall": record.seconds / before["train"].summary["train"]["seconds"],
        "search_cpu_seconds": spent,
        "missed": missed(truth, record),
    }


def ne_of(stages: dict[str, Artifact]) -> float:
    """The test NE of a run."""
    return float(stages["evaluate"].summary["ne"])


def run_found(folder: Path, order: int, threads: int) -> dict[str, Artifact]:
    """The stages of the model found, as a user runs its experiment, with the rows in this ``order``."""
    own = [f"run=after-{order}", f"seed={order}", f"store={folder}/store", f"train.threads_per_rank={threads}"]
    overrides = ["experiment=best", *own]
    return run_config(compose(overrides, str(folder / "my")))


def searched(overrides: list[str], dataset: Artifact, folder: Path, threads: int) -> tuple[SearchRecord, Config, str]:
    """The record of the search, the configuration to begin with, and the experiment."""
    torch.set_num_threads(threads)
    config = compose([*overrides, "run=search"])
    store = Store(config.store)
    space = ArchitectureSpace.of(with_resolved_batch(config, store, dataset), *read_dataset(store, dataset))
    record = search(space, store, dataset)
    found = space.configured({name: each.chosen for name, each in record.decisions.items()})
    return record, config, best_experiment(record, space.config, found, overrides, None)


def missed(truth: Planted, record: SearchRecord) -> list[str]:
    """The tables whose width is not near the planted one."""
    widths = [record.decisions[f"width of f{place}"].chosen for place in range(FEATURES)]
    wrong = [place for place, width in enumerate(truth.widths) if not 0.5 <= widths[place] / width <= 2]
    return [f"f{place}: {widths[place]}, planted {truth.widths[place]}" for place in wrong]


def scores(truth: Planted, record: SearchRecord) -> dict[str, float]:
    """What of the truth was found, and the predicted cost."""
    chosen = {name: each.chosen for name, each in record.decisions.items()}
    near = [0.5 <= chosen[f"width of f{place}"] / width <= 2 for place, width in enumerate(truth.widths)]
    every = list(itertools.combinations(range(FEATURES), 2))
    kept = {pair: bool(chosen[f"f{pair[0]} x f{pair[1]}"]) for pair in every}
    return {
        "ratio": record.after.step_ms / record.before.step_ms,
        "bytes_ratio": record.after.total / record.before.total,
        "widths": float(np.mean(near)),
        "interactions": float(np.mean([kept[pair] for pair in truth.pairs])),
        "absent": float(np.mean([not kept[pair] for pair in every if pair not in truth.pairs])),
    }


def written(folder: Path, log: dict[str, np.ndarray]) -> list[str]:
    """Write the log and return the settings that read it."""
    columns = {f"x{place}": values for place, values in enumerate(log["numbers"])}
    columns |= {f"f{place}": pa.array([f"v{each}" for each in ids]) for place, ids in enumerate(log["ids"])}
    pq.write_table(pa.table({"label": log["clicked"].astype(int), **columns}), folder / "log.parquet")
    return [
        "data=parquet",
        f"data.path={folder}/log.parquet",
        "data.sparse_defaults.min_count=1",
        *(f"+data.dense.x{place}={{}}" for place in range(NUMBERS)),
        *(f"+data.sparse.f{place}={{}}" for place in range(FEATURES)),
    ]


def planted(rows: int, seed: int) -> tuple[Planted, dict[str, np.ndarray]]:
    """The truth that ``seed`` draws and a log of it: ``ids`` [features, rows], ``numbers``, ``clicked``."""
    rng = np.random.default_rng([2110, seed])
    widths = rng.permutation([1, WIDE] * (FEATURES // 2)).tolist()
    pairs = planted_pairs(rng, widths)
    hidden = [rng.standard_normal((IDS, width)) for width in widths]
    # The one value of a narrow feature lies in a direction of its own.
    latent = [each if each.shape[1] > 1 else each * rng.standard_normal(WIDE) for each in hidden]
    ids, numbers = rng.integers(0, IDS, (FEATURES, rows)), rng.standard_normal((NUMBERS, rows))
    logit = BIAS + NUMBER_EFFECT * numbers.sum(axis=0)
    for feature, values in enumerate(hidden):
        logit += OWN_EFFECT * values[ids[feature], 0]
    for one, other in pairs:
        products = latent[one] @ latent[other].T
        logit += EFFECT * (products / products.std())[ids[one], ids[other]]
    clicked = rng.random(rows) < 1 / (1 + np.exp(-logit))
    return Planted(widths, pairs), {"ids": ids, "numbers": numbers, "clicked": clicked}


def planted_pairs(rng: np.random.Generator, widths: list[int]) -> list[tuple[int, int]]:
    """Pairs of features that interact, every feature with two wide ones at least."""
    every = list(itertools.combinations(range(FEATURES), 2))
    while True:
        pairs = [every[place] for place in sorted(rng.choice(len(every), PAIRS, replace=False))]
        wide = [0] * FEATURES
        for one, other in pairs:
            wide[one] += widths[other] == WIDE
            wide[other] += widths[one] == WIDE
        if min(wide) >= 2:
            return pairs


if __name__ == "__main__":
    main()
