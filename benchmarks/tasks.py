"""``make bench-tasks``: test NE of a rare label, learnt alone or together with the label that it depends on.

The logs are synthetic: a click, and a conversion that only clicks can have and whose truth is correlated with that of
clicks (``data.synthetic.conversion_*``). ``single`` is a model of the conversion alone; the others learn click and
conversion with ``model.tasks``. All have the same rows, ranking model and grid of settings, from which each takes the
ones with the lowest NE of the conversion on logs of other seeds than those that are compared. A seed draws other logs,
initial values and orders of the rows. A second single model, of the click, shows what sharing costs the main task.

``ratio``: mean NE of ``single`` over that of the worse of MMoE and ESMM; ``p_values``: of each architecture having the
lower NE, by a one-sided paired t-test over the seeds.
"""

from __future__ import annotations

import itertools
import tempfile
import time

import numpy as np

from benchmarks.harness import PLAIN, SET, finish, options, p_lower, processes, run, show, words
from pipeline.core.cpus import available_cpus
from pipeline.specs import TASK_ARCHITECTURES

RARE = "conversion"
SINGLE, CLICK = "single", "click alone"
COMPARED = ("mmoe", "esmm")
TUNING_SEED = 1000
# The grid: learning rate of the tables, passes over the rows.
GRID = tuple(itertools.product((0.02, 0.05, 0.1, 0.2), (1, 2)))
Scores = dict[str, dict[str, float]]  # by way the test NE of each label that was learnt


def main() -> None:
    given = options(
        __doc__,
        seeds=5,
        tuning_seeds=2,
        rows=(100_000, "of a log, a fifth of them to test on"),
        ways=(list(TASK_ARCHITECTURES.names()), "values of model.tasks", {"nargs": "+"}),
        jobs=(available_cpus(), "processes at a time"),
        set=SET,
    )
    began, ways = time.monotonic(), [SINGLE, CLICK, *given.ways]

    def train_all(seeds_and_settings: list[tuple[int, dict[str, tuple[float, int]]]]) -> list[Scores]:
        jobs = [(seed, given.rows, settings, given.set) for seed, settings in seeds_and_settings]
        with processes(given.jobs) as pool:
            return list(pool.map(train, *zip(*jobs, strict=True)))

    seeds = [TUNING_SEED + seed for seed in range(given.tuning_seeds)]
    tuned = {place: train_all([(seed, dict.fromkeys(ways, place)) for seed in seeds]) for place in GRID}
    best = {}
    for way in ways:
        label = "click" if way == CLICK else RARE
        best[way] = min(GRID, key=lambda place: float(np.mean([each[way][label] for each in tuned[place]])))
        print(f"{way}: train.sparse_lr={best[way][0]} train.epochs={best[way][1]}", flush=True)
    scores = train_all([(1 + seed, best) for seed in range(given.seeds)])
    for way in ways:
        show(f"{way}, mean NE", {name: float(np.mean([each[way][name] for each in scores])) for name in scores[0][way]})
    rare = {way: [each[way][RARE] for each in scores] for way in ways if way != CLICK}
    mean = {way: float(np.mean(nes)) for way, nes in rare.items()}
    compared = given.ways if given.seeds > 1 else []
    finish(
        "tasks",
        mean[SINGLE] / max(mean[way] for way in COMPARED if way in mean),
        seconds=time.monotonic() - began,
        p_values={way: round(p_lower(rare[way], rare[SINGLE]), 6) for way in compared},
        ne={way: round(ne, 5) for way, ne in mean.items()},
    )


def train(seed: int, rows: int, settings: dict[str, tuple[float, int]], more: list[str]) -> Scores:
    """One log, of ``seed``, with each way trained by its settings: rate of the tables, and epochs."""
    scores = {}
    with tempfile.TemporaryDirectory() as folder:
        world = words(f"""data=synthetic model=dlrm_small data.synthetic.rows={rows} data.synthetic.days=1
            data.synthetic.ids_per_feature=500 data.synthetic.base_rate=0.2 data.synthetic.conversion_rate=0.1
            data.synthetic.conversion_overlap=0.5 train.global_batch=512 seed={seed} store={folder}/store""")
        for way, (rate, epochs) in settings.items():
            both = [f"+data.tasks.{RARE}={{given: click}}", f"model.tasks={way}"]
            labels = {SINGLE: [f"data.label.column={RARE}"], CLICK: []}.get(way, both)
            chosen = [f"train.sparse_lr={rate}", f"train.epochs={epochs}", f"run={way.split()[0]}"]
            figures = run([*world, *PLAIN, *chosen, *labels, *more])["evaluate"].summary
            scores[way] = {RARE: figures["ne"]} if way == SINGLE else {"click": figures["ne"]}
            if way not in (SINGLE, CLICK):
                scores[way][RARE] = figures["tasks"][RARE]["ne"]
    return scores


if __name__ == "__main__":
    main()
