"""``make bench-search``: whether ``nightjar search`` finds what was planted, and what the model found is worth.

The planted log has 12 features of 24 ids. Half of them have one hidden value for each id, which is all that they do;
the others have 16. 22 of the 66 pairs of features interact by the product of their hidden vectors, each feature with
two wide ones at least. The model to begin with is the default DLRM, whose tables all have width 16. A seed draws
another log. Original and found model train with the same settings, by the ordinary stages, in this process: two passes
over a million rows. In more passes over fewer rows the original learns them by heart (docs/measurements/models.md). The
search takes one pass.

``--log adult`` and ``flights``: real logs, of which nobody knows what is to be found; a seed draws other test rows of
the census, and other initial values everywhere. Original and found model train as ``benchmarks/logs.py`` says.

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
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.harness import (
    ADULT,
    QUIET,
    SET,
    finish,
    means,
    options,
    run,
    run_config,
    silent,
    standard_error,
    test_ne,
    words,
)
from benchmarks.logs import adult, flights, flights_settings
from pipeline.config.compose import compose
from pipeline.plugins.search.architecture_space import ArchitectureSpace
from pipeline.plugins.search.loop import search
from pipeline.plugins.search.search_page import best_experiment
from pipeline.stages.execution import with_resolved_batch
from pipeline.stages.stage_inputs import read_dataset
from pipeline.store import Store

FEATURES, WIDE, IDS, NUMBERS = 12, 16, 24, 2
PAIRS, EFFECT, OWN_EFFECT, NUMBER_EFFECT, BIAS = 22, 0.7, 0.3, 0.3, -1.0
ALL_PAIRS = list(itertools.combinations(range(FEATURES), 2))
PLANTED = ("widths", "interactions", "absent")
FIGURES = ("ratio", "ne_ratio", "trainings", "trainings_wall", "bytes_ratio")
LOGS = ("planted", "adult", "flights")


def main() -> None:
    given = options(
        __doc__,
        seeds=([101, 102], None, {"nargs": "+"}),
        log=("planted", None, {"choices": LOGS}),
        rows=(1_000_000, "of a planted log, a fifth of them to test on"),
        epochs=(2, "of the trainings on a planted log"),
        search_epochs=1,
        trainings=(4, "of either model, each in another order of the rows"),
        threads=1,
        set=SET,
    )
    silent()
    began, found = time.monotonic(), []
    for seed in given.seeds:
        with tempfile.TemporaryDirectory() as folder:
            found.append(run_seed(Path(folder), seed, given))
        print(f"seed {seed}: {json.dumps(found[-1])}", flush=True)
    figures = (*FIGURES, *PLANTED) if given.log == "planted" else FIGURES
    mean = means([{name: each[name] for name in figures} for each in found])
    seconds = time.monotonic() - began
    finish("search", mean.pop("ratio"), **mean, log=given.log, seeds=given.seeds, seconds=seconds)


def run_seed(folder: Path, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """The figures of one seed."""
    truth, log = log_of(folder, seed, given)
    threads = f"train.threads_per_rank={given.threads}"
    searched = words(f"search.name=found search.epochs={given.search_epochs}")
    world = [*log, *QUIET, threads, f"seed={seed}", f"store={folder}/store", "hardware=laptop", *searched, *given.set]
    cpu: dict[str, float] = {}
    before = run([*world, "run=before"], cpu)
    began = time.process_time()
    torch.set_num_threads(given.threads)
    config, store = compose([*world, "run=search"]), Store(f"{folder}/store")
    resolved = with_resolved_batch(config, store, before["ingest"])
    space = ArchitectureSpace.of(resolved, *read_dataset(store, before["ingest"]))
    record = search(space, store, before["ingest"])
    chosen = {name: each.chosen for name, each in record.decisions.items()}
    best = best_experiment(record, space.config, space.configured(chosen), world, None)
    spent = time.process_time() - began
    (folder / "my" / "experiment").mkdir(parents=True)
    (folder / "my" / "experiment" / "best.yaml").write_text(best)
    orders = [seed + 1000 * number for number in range(given.trainings)]
    known = [float(before["evaluate"].summary["ne"])]
    known += [test_ne([*world, f"run=before-{order}", f"seed={order}"]) for order in orders[1:]]
    found = []
    for order in orders:  # as a user runs the experiment
        own = ["experiment=best", f"run=after-{order}", f"seed={order}", f"store={folder}/store", threads]
        found.append(float(run_config(compose(own, str(folder / "my")))["evaluate"].summary["ne"]))
    return {
        "ratio": record.after.step_ms / record.before.step_ms,
        "bytes_ratio": record.after.total / record.before.total,
        **({} if truth is None else judged(chosen, *truth)),
        "ne_ratio": float(np.mean(found) / np.mean(known)),
        "ne_ratio_error": standard_error(np.array(found) / np.array(known)),
        "ne": known,
        "ne_found": found,
        "trainings": spent / cpu["train"],
        "trainings_wall": record.seconds / before["train"].summary["train"]["seconds"],
        "search_cpu_seconds": spent,
    }


def judged(chosen: dict[str, Any], widths: list[int], pairs: list[tuple[int, int]]) -> dict[str, Any]:
    """What was found of what was planted."""
    near = [0.5 <= chosen[f"width of f{place}"] / width <= 2 for place, width in enumerate(widths)]
    kept = {pair: bool(chosen[f"f{pair[0]} x f{pair[1]}"]) for pair in ALL_PAIRS}
    missed = [
        f"f{place}: {chosen[f'width of f{place}']}, planted {width}"
        for place, width in enumerate(widths)
        if not near[place]
    ]
    return {
        "widths": float(np.mean(near)),
        "interactions": float(np.mean([kept[pair] for pair in pairs])),
        "absent": float(np.mean([not kept[pair] for pair in ALL_PAIRS if pair not in pairs])),
        "missed": missed,
    }


def log_of(
    folder: Path, seed: int, given: argparse.Namespace
) -> tuple[tuple[list[int], list[tuple[int, int]]] | None, list[str]]:
    """What is planted in the log of ``seed``, if anything, and the settings to read it and to train on it."""
    if given.log == "adult":
        return None, adult(ADULT, str(folder), seed)
    if given.log == "flights":
        path = flights()
        if path is None:
            raise SystemExit("flights: not here")
        return None, flights_settings(path)
    widths, pairs, log = planted(folder, given.rows, seed)
    return (widths, pairs), [*log, *words(f"train.global_batch=512 train.epochs={given.epochs} train.sparse_lr=0.1")]


def planted(folder: Path, rows: int, seed: int) -> tuple[list[int], list[tuple[int, int]], list[str]]:
    """Write the log of ``seed``: the width of every feature, the pairs that interact, the settings that read it."""
    rng = np.random.default_rng([2110, seed])
    widths = rng.permutation([1, WIDE] * (FEATURES // 2)).tolist()
    wide = [0]
    while min(wide) < 2:  # every feature interacts with two wide ones at least
        pairs = [ALL_PAIRS[place] for place in sorted(rng.choice(len(ALL_PAIRS), PAIRS, replace=False))]
        wide = [0] * FEATURES
        for one, other in pairs:
            wide[one] += widths[other] == WIDE
            wide[other] += widths[one] == WIDE
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
    columns: dict[str, Any] = {f"x{place}": values for place, values in enumerate(numbers)}
    columns |= {f"f{place}": pa.array([f"v{each}" for each in values]) for place, values in enumerate(ids)}
    pq.write_table(pa.table({"label": clicked.astype(int), **columns}), folder / "log.parquet")
    typed = [f"+data.{'dense' if name[0] == 'x' else 'sparse'}.{name}={{}}" for name in columns]
    return (
        widths,
        pairs,
        ["data=parquet", f"data.path={folder}/log.parquet", "data.sparse_defaults.min_count=1", *typed],
    )


if __name__ == "__main__":
    main()
