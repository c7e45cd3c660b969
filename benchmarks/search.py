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
``trainings``: CPU seconds of the search over those of the original's train stage. Both are one process with as many
threads, so that CPU seconds are what they take on a machine of their own, and the load beside does not count. Each is
the mean over the seeds.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import QUIET, SET, finish, means, options, run, run_config, words
from benchmarks.logs import clicked, written
from benchmarks.studies import per_case
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


def main() -> None:
    given = options(
        __doc__,
        seeds=([101, 102], None, {"nargs": "+"}),
        rows=(1_000_000, "of a log, a fifth of them to test on"),
        epochs=2,
        search_epochs=1,
        trainings=(4, "of either model, each in another order of the rows"),
        set=SET,
    )
    began = time.monotonic()
    mean = means(per_case(original_and_found, given, [(seed,) for seed in given.seeds], jobs=1))
    finish("search", mean.pop("ratio"), seeds=given.seeds, seconds=time.monotonic() - began, **mean)


def original_and_found(given: argparse.Namespace, folder: str, seed: int) -> dict[str, float]:
    """The figures of one seed."""
    widths, pairs, log = planted(folder, given.rows, seed)
    place = [f"store={folder}/store", "train.threads_per_rank=1"]
    world = words(f"""train.global_batch=512 train.epochs={given.epochs} train.sparse_lr=0.1 hardware=laptop
        search.name=found search.epochs={given.search_epochs} seed={seed}""")
    world = [*log, *QUIET, *world, *place, *given.set]
    cpu: dict[str, float] = {}
    before = run([*world, "run=before"], cpu)
    began = time.process_time()
    torch.set_num_threads(1)
    store = Store(f"{folder}/store")
    resolved = with_resolved_batch(compose([*world, "run=search"]), store, before["ingest"])
    space = ArchitectureSpace.of(resolved, *read_dataset(store, before["ingest"]))
    record = search(space, store, before["ingest"])
    chosen = {name: each.chosen for name, each in record.decisions.items()}
    experiment = Path(folder, "my/experiment/best.yaml")
    experiment.parent.mkdir(parents=True)
    experiment.write_text(best_experiment(record, space.config, space.configured(chosen), world, None))
    spent = time.process_time() - began
    nes: dict[str, list[float]] = {"before": [], "after": []}
    for order in (seed + 1000 * number for number in range(given.trainings)):
        own = [f"seed={order}", *place]
        original = compose([*world, *own, "run=before" if order == seed else f"run=before-{order}"])
        best = compose(["experiment=best", *own, f"run=after-{order}"], f"{folder}/my")  # as a user runs it
        for name, config in (("before", original), ("after", best)):
            nes[name].append(float(run_config(config)["evaluate"].summary["ne"]))
    return {
        "ratio": record.after.step_ms / record.before.step_ms,
        "ne_ratio": float(np.mean(nes["after"]) / np.mean(nes["before"])),
        "trainings": spent / cpu["train"],
        **judged(chosen, widths, pairs),
    }


def judged(chosen: dict[str, Any], widths: list[int], pairs: list[tuple[int, int]]) -> dict[str, float]:
    """What was found of what was planted."""
    near = [0.5 <= chosen[f"width of f{place}"] / width <= 2 for place, width in enumerate(widths)]
    kept = {pair: bool(chosen[f"f{pair[0]} x f{pair[1]}"]) for pair in ALL_PAIRS}
    return {
        "widths": float(np.mean(near)),
        "interactions": float(np.mean([kept[pair] for pair in pairs])),
        "absent": float(np.mean([not kept[pair] for pair in ALL_PAIRS if pair not in pairs])),
    }


def planted(folder: str, rows: int, seed: int) -> tuple[list[int], list[tuple[int, int]], list[str]]:
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
    logits = BIAS + NUMBER_EFFECT * numbers.sum(axis=0)
    for feature, values in enumerate(hidden):
        logits += OWN_EFFECT * values[ids[feature], 0]
    for one, other in pairs:
        products = latent[one] @ latent[other].T
        logits += EFFECT * (products / products.std())[ids[one], ids[other]]
    columns = {f"x{place}": values for place, values in enumerate(numbers)}
    columns |= {f"f{place}": values for place, values in enumerate(ids)}
    return widths, pairs, written(folder, clicked(rng, logits), columns)


if __name__ == "__main__":
    main()
