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

import argparse
import itertools
import tempfile
import time
from dataclasses import dataclass

import numpy as np
from scipy.stats import ttest_rel

from benchmarks.common import finish
from benchmarks.runs import processes, run
from pipeline.core.cpus import available_cpus
from pipeline.specs import TASK_ARCHITECTURES

RARE = "conversion"
SINGLE, CLICK = "single", "click alone"
COMPARED = ("mmoe", "esmm")
TUNING_SEED = 1000
# The grid: learning rate of the tables, passes over the rows.
GRID = tuple(itertools.product((0.02, 0.05, 0.1, 0.2), (1, 2)))


@dataclass(frozen=True)
class Job:
    """One log, of ``seed``, with each of ``ways`` trained by its settings (``grid``: places in GRID)."""

    seed: int
    rows: int
    grid: tuple[tuple[str, int], ...]
    more: tuple[str, ...]


@dataclass(frozen=True)
class Scores:
    """Test NE of the conversion and of the click; NaN for a label that was not learnt."""

    rare: float
    click: float = float("nan")


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--tuning-seeds", type=int, default=2)
    options.add_argument("--rows", type=int, default=100_000, help="of a log, a fifth of them to test on")
    options.add_argument("--ways", nargs="+", default=list(TASK_ARCHITECTURES.names()), help="values of model.tasks")
    options.add_argument("--jobs", type=int, default=available_cpus(), help="processes at a time")
    options.add_argument("--set", nargs="*", default=[], help="overrides of every run's configuration")
    given = options.parse_args()
    began, ways, more = time.monotonic(), [SINGLE, CLICK, *given.ways], tuple(given.set)
    tuning = [
        Job(TUNING_SEED + seed, given.rows, tuple((way, place) for way in ways), more)
        for seed in range(given.tuning_seeds)
        for place in range(len(GRID))
    ]
    best = _tuned(list(zip(tuning, _all(tuning, given.jobs), strict=True)), ways)
    for way, place in best.items():
        print(f"{way}: train.sparse_lr={GRID[place][0]} train.epochs={GRID[place][1]}", flush=True)
    jobs = [Job(1 + seed, given.rows, tuple(best.items()), more) for seed in range(given.seeds)]
    scores = _all(jobs, given.jobs)
    for job, each in zip(jobs, scores, strict=True):
        print(f"seed {job.seed}: " + ", ".join(f"{way} {score.rare:.5f}" for way, score in each.items()), flush=True)
    print(_table(scores), flush=True)
    mean = {way: float(np.mean([each[way].rare for each in scores])) for way in ways if way != CLICK}
    worse = max(mean[way] for way in COMPARED if way in mean)
    base = [each[SINGLE].rare for each in scores]
    p_values = (
        {
            way: float(ttest_rel([each[way].rare for each in scores], base, alternative="less").pvalue)
            for way in given.ways
        }
        if given.seeds > 1
        else {}
    )
    finish(
        "tasks",
        mean[SINGLE] / worse,
        seconds=time.monotonic() - began,
        p_values={way: round(p, 6) for way, p in p_values.items()},
        ne={way: round(ne, 5) for way, ne in mean.items()},
    )


def _all(jobs: list[Job], at_once: int) -> list[dict[str, Scores]]:
    with processes(at_once) as pool:
        return list(pool.map(run_job, jobs))


def _tuned(done: list[tuple[Job, dict[str, Scores]]], ways: list[str]) -> dict[str, int]:
    """By way, the place in GRID with the lowest mean NE of the conversion; of the click for its own model."""

    def mean(way: str, place: int) -> float:
        chosen = [scores[way] for job, scores in done if (way, place) in job.grid]
        return float(np.mean([each.click if way == CLICK else each.rare for each in chosen]))

    return {way: min(range(len(GRID)), key=lambda place: mean(way, place)) for way in ways}


def run_job(job: Job) -> dict[str, Scores]:
    """Scores by way."""
    with tempfile.TemporaryDirectory() as folder:
        return {way: _train(way, place, job, f"{folder}/store") for way, place in job.grid}


def _train(way: str, place: int, job: Job, store: str) -> Scores:
    rate, epochs = GRID[place]
    own = {SINGLE: [f"data.label.column={RARE}"], CLICK: []}
    labels = own.get(way, [f"+data.tasks.{RARE}={{given: click}}", f"model.tasks={way}"])
    made = run(
        [
            "data=synthetic",
            "model=dlrm_small",
            f"data.synthetic.rows={job.rows}",
            "data.synthetic.days=1",
            "data.synthetic.ids_per_feature=500",
            "data.synthetic.base_rate=0.2",
            "data.synthetic.conversion_rate=0.1",
            "data.synthetic.conversion_overlap=0.5",
            "train.global_batch=512",
            f"train.sparse_lr={rate}",
            f"train.epochs={epochs}",
            f"seed={job.seed}",
            f"store={store}",
            "train.threads_per_rank=1",
            "train.precision=fp32",
            "train.log_every_steps=1000",
            "train.guard.collapse=false",
            f"run={way.split()[0]}",
            *labels,
            *job.more,
        ]
    )
    figures = made["evaluate"].summary
    if way == SINGLE:
        return Scores(figures["ne"])
    return Scores(figures["tasks"][RARE]["ne"] if way != CLICK else float("nan"), figures["ne"])


def _table(scores: list[dict[str, Scores]]) -> str:
    """The means over the seeds, as Markdown."""
    lines = [f"\nmean of {len(scores)} seeds", "| model | NE of the conversion | NE of the click |", "|---|---|---|"]
    for way in scores[0]:
        rare, click = (float(np.mean([getattr(each[way], name) for each in scores])) for name in ("rare", "click"))
        shown = [f"{value:.5f}" if np.isfinite(value) else "-" for value in (rare, click)]
        lines.append(f"| {way} | {' | '.join(shown)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
