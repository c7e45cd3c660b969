"""``make bench-ranking``: GAUC and NE of trainings with a ranking loss beside the log loss, against the log loss alone.

The log is made up: users see requests of twelve items each. Which item they click depends on its quality and on the
user's taste, a product of hidden vectors; how often they click depends on the user, and even more on the request, by
what no feature tells. So little of the log loss is about the order of a request's items, which GAUC is about: it is
that within a request. All trainings have the same rows, model and settings, in the order of the log, so that a batch
holds whole requests, or shuffled as rows or as groups; the last fifth of the requests are test rows. A seed draws
another log and other initial values.

``ratio``: the mean of 1 - GAUC without a ranking loss over that of the best way with one, among those whose NE is at
most ``NE_BAR`` above. ``p_values``: of each way having the higher GAUC, by a one-sided paired t-test over the seeds.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.harness import PLAIN, SET, finish, options, p_lower, processes, run, show, words
from pipeline.core.cpus import available_cpus
from pipeline.evaluation.metrics import sigmoid

USERS, ITEMS, SHOWN, DIM = 2000, 500, 12, 4
# Standard deviations of what users, requests, items and tastes add to the log odds.
ACTIVITY, MOOD, QUALITY, TASTE = 1.0, 2.0, 0.8, 0.8
BIAS = -2.5
FIRST_SECOND = 1_767_225_600
NE_BAR = 0.002
WAYS = {
    "log loss": [],
    "pairwise, batch": ["train.rank_loss.kind=pairwise"],
    "listwise, batch": ["train.rank_loss.kind=listwise"],
    "pairwise, user": ["train.rank_loss.kind=pairwise", "train.rank_loss.group_by=user"],
    "listwise, user": ["train.rank_loss.kind=listwise", "train.rank_loss.group_by=user"],
    "log loss, shuffled": ["train.shuffle=true"],
    "listwise, user, shuffled": [
        "train.shuffle=true",
        "train.rank_loss.kind=listwise",
        "train.rank_loss.group_by=user",
    ],
    "listwise, user, groups shuffled": [
        "train.shuffle=true",
        "train.rank_loss.kind=listwise",
        "train.rank_loss.group_by=user",
        "train.rank_loss.keep_groups=true",
    ],
}
Figures = dict[str, dict[str, float]]  # by way NE, calibration, AUC and GAUC of the test rows


def main() -> None:
    given = options(
        __doc__,
        seeds=6,
        requests=(20_000, "of a log, twelve rows each, a fifth of which are test rows"),
        weights=([1.0], "values of train.rank_loss.weight"),
        ways=([*WAYS], "ways to train", {"choices": [*WAYS]}),
        jobs=(available_cpus(), "processes at a time"),
        set=SET,
    )
    began = time.monotonic()
    # The log loss alone is what all others are compared with.
    ways = list(dict.fromkeys(["log loss", *given.ways]))
    jobs = [(1 + seed, given.requests, ways, given.weights, given.set) for seed in range(given.seeds)]
    with processes(given.jobs) as pool:
        found = list(pool.map(train, *zip(*jobs, strict=True)))
    names, mean = [*found[0]], Figures()
    for name in names:
        mean[name] = {figure: float(np.mean([each[name][figure] for each in found])) for figure in found[0][name]}
        show(name, mean[name])
    plain = mean["log loss"]
    ranked = [name for name in names if "log loss" not in name and mean[name]["ne"] <= plain["ne"] * (1 + NE_BAR)]
    lost = {name: [1 - each[name]["gauc"] for each in found] for name in names}
    p_values = {}
    if given.seeds > 1:
        p_values = {name: round(p_lower(lost[name], lost["log loss"]), 6) for name in names[1:]}
    best = min((float(np.mean(lost[name])) for name in ranked), default=None)
    finish(
        "ranking",
        None if best is None else float(np.mean(lost["log loss"])) / best,
        seconds=time.monotonic() - began,
        p_values=p_values,
        figures={name: {figure: round(value, 5) for figure, value in mean[name].items()} for name in names},
    )


def train(seed: int, requests: int, ways: list[str], weights: list[float], more: list[str]) -> Figures:
    """The log of ``seed``, trained in each way."""
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        write_log(Path(folder, "log.csv"), requests, seed)
        # All requests but one share a row of their table, since no model could use them later; GAUC tells them apart.
        features = "{user: {rows: 2100}, item: {rows: 600}, hour: {rows: 30}, request: {rows: 3}}"
        world = words(f"""data=csv data.path={folder}/log.csv data.label.column=clicked data.timestamp=time
            data.split.by=time data.split.test_share=0.2 model=dlrm_small train.shuffle=false train.global_batch=1024
            train.sparse_lr=0.1 evaluate.group_by=request seed={seed} store={folder}/store""")
        world.append(f"+data.sparse={features}")
        for way in ways:
            ranked = "log loss" not in way
            for weight in weights if ranked else [1.0]:
                name = f"{way} x {weight:g}" if ranked else way
                chosen = [*WAYS[way], *([f"train.rank_loss.weight={weight}"] if ranked else [])]
                place = f"run={name.replace(',', '').replace(' ', '-')}"
                summary = run([*world, *PLAIN, *chosen, place, *more])["evaluate"].summary
                figures[name] = {each: summary[each] for each in ("ne", "calibration", "auc", "gauc")}
    return figures


def write_log(path: Path, requests: int, seed: int) -> None:
    """Write a CSV of ``requests`` requests, one after the other."""
    random = np.random.default_rng(seed)
    activity, quality = ACTIVITY * random.normal(size=USERS), QUALITY * random.normal(size=ITEMS)
    tastes = random.normal(size=(USERS, DIM))
    items = TASTE / np.sqrt(DIM) * random.normal(size=(ITEMS, DIM))
    hours = 0.3 * random.normal(size=24)
    user = np.repeat(random.integers(0, USERS, requests), SHOWN)
    mood = np.repeat(MOOD * random.normal(size=requests), SHOWN)
    request = np.repeat(np.arange(requests), SHOWN)
    hour = request * 240 // requests % 24
    item = random.integers(0, ITEMS, len(user))
    logit = BIAS + activity[user] + mood + hours[hour] + quality[item] + (tastes[user] * items[item]).sum(1)
    clicked = random.random(len(user)) < sigmoid(logit)
    with path.open("w") as log:
        log.write("clicked,user,item,hour,request,time\n")
        for row in zip(clicked, user, item, hour, request, FIRST_SECOND + request, strict=True):
            log.write("{:d},u{},i{},h{},r{},{}\n".format(*row))


if __name__ == "__main__":
    main()
