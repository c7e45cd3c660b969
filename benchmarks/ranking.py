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

import argparse
import time

import numpy as np
import polars as pl

from benchmarks.harness import PLAIN, finish, options, show, words
from benchmarks.logs import clicked
from benchmarks.studies import MACHINE, Figures, mean_of, p_values, per_case, rounded, trained

USERS, ITEMS, SHOWN, DIM = 2000, 500, 12, 4
# Standard deviations of what users, requests, items and tastes add to the log odds.
ACTIVITY, MOOD, QUALITY, TASTE = 1.0, 2.0, 0.8, 0.8
BIAS = -2.5
FIRST_SECOND = 1_767_225_600
NE_BAR = 0.002
BASE = "log loss"
PAIRS, LISTS = "train.rank_loss.kind=pairwise", "train.rank_loss.kind=listwise"
USER, SHUFFLED = "train.rank_loss.group_by=user", "train.shuffle=true"
WAYS = {
    BASE: [],
    "pairwise, batch": [PAIRS],
    "listwise, batch": [LISTS],
    "pairwise, user": [PAIRS, USER],
    "listwise, user": [LISTS, USER],
    "log loss, shuffled": [SHUFFLED],
    "listwise, user, shuffled": [LISTS, USER, SHUFFLED],
    "listwise, user, groups shuffled": [LISTS, USER, SHUFFLED, "train.rank_loss.keep_groups=true"],
}


def main() -> None:
    given = options(
        __doc__,
        seeds=6,
        requests=(20_000, "of a log, twelve rows each, a fifth of which are test rows"),
        weights=([1.0], "values of train.rank_loss.weight"),
        **MACHINE,
    )
    began = time.monotonic()
    found = per_case(every_way, given, [(1 + seed,) for seed in range(given.seeds)])
    mean = mean_of(found)
    for name, figures in mean.items():
        show(name, figures)
    most = mean[BASE]["ne"] * (1 + NE_BAR)
    lost = {name: [1 - each[name]["gauc"] for each in found] for name in mean}
    best = min(float(np.mean(lost[name])) for name in mean if BASE not in name and mean[name]["ne"] <= most)
    finish(
        "ranking",
        float(np.mean(lost[BASE])) / best,
        seconds=time.monotonic() - began,
        p_values=p_values(lost, BASE),
        figures=rounded(mean),
    )


def every_way(given: argparse.Namespace, folder: str, seed: int) -> Figures:
    """NE, calibration, AUC and GAUC of the log of ``seed``, trained in each way."""
    write_log(f"{folder}/log.csv", given.requests, seed)
    # All requests but one share a row of their table, since no model could use them later; GAUC tells them apart.
    features = "{user: {rows: 2100}, item: {rows: 600}, hour: {rows: 30}, request: {rows: 3}}"
    world = words(f"""data=csv data.path={folder}/log.csv data.label.column=clicked data.timestamp=time
        data.split.by=time data.split.test_share=0.2 model=dlrm_small train.shuffle=false train.global_batch=1024
        train.sparse_lr=0.1 evaluate.group_by=request seed={seed} store={folder}/store""")
    ways = {}
    for way, settings in WAYS.items():
        if BASE in way:
            ways[way] = settings
        else:
            ways |= {f"{way} x {each:g}": [*settings, f"train.rank_loss.weight={each}"] for each in given.weights}
    ways = {way: [*settings, *given.set] for way, settings in ways.items()}
    return trained([*world, f"+data.sparse={features}", *PLAIN], ways, ("ne", "calibration", "auc", "gauc"))


def write_log(path: str, requests: int, seed: int) -> None:
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
    logits = BIAS + activity[user] + mood + hours[hour] + quality[item] + (tastes[user] * items[item]).sum(1)
    ids = {"user": user, "item": item, "hour": hour, "request": request}
    rows = pl.DataFrame({"clicked": clicked(random, logits).astype(int), **ids, "time": FIRST_SECOND + request})
    rows.with_columns(pl.format(f"{name[0]}{{}}", name).alias(name) for name in ids).write_csv(path)


if __name__ == "__main__":
    main()
