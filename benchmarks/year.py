"""``make bench-year``: a simulated year of nights on the gate alone, with ten kinds of harm and some better models.

A click model (a logistic regression by ids and crosses of two, AdaGrad) is trained on every day's rows of a made-up log
whose tastes drift, from the version that serves. On some days something goes wrong, in the log or in the model, and on
some the candidate learns a cross that the models before it lacked. The gate sees what it would see at night: the scored
rows of the day as they arrived, and the records of former nights. The truth is the click probability of fresh rows
without any fault.

A promotion is *wrong* where the candidate's true NE is above the incumbent's by more than the limit, on all rows or in
a slice. A hold is *needless* where nothing went wrong that night and the true change is within the limits. ``ratio``:
the wrong promotions that the budget allows in so many nights over those made (at least one counts as made).
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, timedelta

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import finish, options, show
from pipeline.config import GateConfig
from pipeline.evaluation import ScoredRows, SliceColumn, measure
from pipeline.evaluation.gate.budget import LedgerFile, judge_within_budget
from pipeline.evaluation.gate.measure import former_figures
from pipeline.evaluation.metrics import sigmoid
from pipeline.records.error_budget import YEAR
from pipeline.records.gate import PASS, GateRecord
from pipeline.store.files import Files

# Ids of each feature. The first is the hour of the day, the second the country, by which the rows are sliced, the last
# one carries nothing: a leak will.
SIZES = (24, 10, 40, 40, 200, 1000, 5000, 20_000, 64)
HOUR, COUNTRY, SITE, USER, SPARE = 0, 1, 4, 7, 8
# Spread of the weights of each feature's ids.
SPREADS = (0.25, 0.3, 0.3, 0.3, 0.5, 0.3, 0.3, 0.3, 0.0)
# Pairs of features whose crosses matter. The model of the first night knows none of them.
CROSSES = tuple((one, other) for one in range(1, 6) for other in range(one + 1, 7))
CROSS_ROWS = 1 << 13
# The rows of the one table that all features and crosses share: where each feature's and each cross' begin, and all.
*STARTS, TABLE_ROWS = np.cumsum((0, *SIZES, *(CROSS_ROWS for _ in CROSSES))).tolist()
TRAIN_ROWS, TEST_ROWS, CLEAN_ROWS = 100_000, 60_000, 300_000
FIRST_DAYS = 10  # that the version learnt from which serves when the year begins
BATCH, RATE, FIRST_SQUARE = 1024, 0.08, 0.1
BETTER, BETTER_SHARE = "better", 0.05
DRIFT = 0.04  # share of its spread that a taste changes by in a day: its correlation over a month is 0.98
FORGET = 0.03  # what a day forgets of AdaGrad's sums, so that the model still follows after a year
LEAST_SEVERE = 0.3  # a harm is as large as written below, or as little as this share of it
HARMS = ["labels turned", "feature dropped", "doubled rows", "clock shifted", "stale ids", "leak", "miscalibration"]
HARMS += ["bad slice", "sampling changed", "worse model"]
GATE = GateConfig(
    budget=1.0,
    max_ne_increase=0.002,
    slice_max_ne_increase=0.02,
    max_ne_fall=0.01,
    max_label_shift=0.1,
    slices=["country"],
)

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


class World:
    """People whose clicks follow from a row's ids and crosses, and whose tastes drift from day to day."""

    def __init__(self, rng: np.random.Generator, spreads: Sequence[float] = SPREADS) -> None:
        self.rng, self.spreads = rng, spreads
        self.weights = [rng.normal(0, spread, size) for size, spread in zip(SIZES, spreads, strict=True)]
        self.crosses = [rng.normal(0, 0.16, CROSS_ROWS) for _ in CROSSES]
        self.mood = 0.0

    def pass_day(self) -> None:
        """Change all tastes a little, and the mood of the day."""
        for weights, spread in zip(self.weights, self.spreads, strict=True):
            weights *= math.sqrt(1 - DRIFT**2)
            weights += DRIFT * self.rng.normal(0, spread, len(weights))
        self.mood = float(self.rng.normal(0, 0.03))

    def draw_rows(self, rows: int) -> tuple[Ids, Floats]:
        """Ids [rows, features] and the logits [rows] of their clicks."""
        ids = np.stack([(size * self.rng.random(rows) ** 2).astype(np.int64) for size in SIZES], axis=1)
        logits = np.full(rows, -1.9 + self.mood)
        for feature, weights in enumerate(self.weights):
            logits += weights[ids[:, feature]]
        for pair, weights in zip(CROSSES, self.crosses, strict=True):
            logits += weights[cross_rows(ids, pair)]
        return ids, logits


def cross_rows(ids: Ids, pair: tuple[int, int]) -> Ids:
    """The row of each id of a cross, by a hash."""
    one, other = pair
    mixed = (ids[:, one] * 1_000_003 + ids[:, other] * 7_919 + 31 * one + other).astype(np.uint64)
    return ((mixed * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(51)).astype(np.int64)


@dataclass
class Day:
    """A day's log as it arrives: its first rows train, the last ones are held out."""

    ids: Ids
    clicked: NDArray[np.bool_]
    held_out: int = TEST_ROWS


@dataclass
class ClickModel:
    """A weight for each id and for each row of the crosses it knows, with AdaGrad's state."""

    crosses: int = 0
    weights: Floats = field(default_factory=lambda: np.zeros(TABLE_ROWS + 1))
    squares: Floats = field(default_factory=lambda: np.full(TABLE_ROWS + 1, FIRST_SQUARE))
    offset: float = 0.0
    noise: Callable[[Ids], Floats] | None = None

    def go_on(self) -> ClickModel:
        """The model that the next night trains further; what went wrong as this one was exported is not in it."""
        squares = FIRST_SQUARE + (1 - FORGET) * (self.squares - FIRST_SQUARE)
        return replace(self, weights=self.weights.copy(), squares=squares, offset=0.0, noise=None)

    def rows_of(self, ids: Ids) -> Ids:
        """Rows [n, features + crosses] of the one table."""
        columns = [*ids.T, *(cross_rows(ids, pair) for pair in CROSSES[: self.crosses])]
        return np.stack(columns, axis=1) + STARTS[: len(columns)]

    def train(self, ids: Ids, clicked: NDArray[np.bool_]) -> None:
        rows = self.rows_of(ids)
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            error = sigmoid(self.weights[batch].sum(1) + self.weights[-1]) - clicked[start : start + BATCH]
            gradient = np.bincount(batch.ravel(), np.repeat(error, batch.shape[1]), TABLE_ROWS + 1)
            gradient[-1] = error.sum()
            touched = np.flatnonzero(gradient)
            change = gradient[touched] / math.sqrt(BATCH)
            self.squares[touched] += change**2
            self.weights[touched] -= RATE * change / np.sqrt(self.squares[touched])

    def score(self, ids: Ids) -> NDArray[np.float32]:
        logits = self.weights[self.rows_of(ids)].sum(1) + self.weights[-1] + self.offset
        if self.noise is not None:
            logits += self.noise(ids)
        return logits.astype(np.float32)

    def coverage(self, ids: Ids) -> dict[str, float]:
        """By feature, the share of lookups that find a trained row."""
        trained = self.squares[self.rows_of(ids)[:, : len(SIZES)]] > FIRST_SQUARE
        return {f"feature {number}": float(share) for number, share in enumerate(trained.mean(0))}


def spoil_log(harm: str, day: Day, severity: float, rng: np.random.Generator) -> Day:
    """The day's log as a fault upstream leaves it; the same log where the harm is another one."""
    ids, clicked = day.ids.copy(), day.clicked.copy()
    if harm == "labels turned":
        turned = rng.random(len(clicked)) < 0.15 * severity
        clicked[turned] = ~clicked[turned]
    elif harm == "feature dropped":
        ids[rng.random(len(ids)) < severity, SITE] = 0
    elif harm == "clock shifted":
        ids[:, HOUR] = (ids[:, HOUR] + round(6 * severity)) % SIZES[HOUR]
    elif harm == "stale ids":
        stale = np.flatnonzero(rng.random(len(ids)) < severity)
        ids[stale[:, None], [SITE, USER]] = ids[rng.permutation(stale)[:, None], [SITE, USER]]
    elif harm == "leak":
        known = rng.random(len(ids)) < 0.7 * severity
        ids[known, SPARE] = rng.integers(0, 32, int(known.sum())) + 32 * clicked[known]
    elif harm == "doubled rows":
        times = 1 + (rng.random(len(ids)) < severity)
        return Day(np.repeat(ids, times, axis=0), np.repeat(clicked, times), int(times[-day.held_out :].sum()))
    elif harm == "sampling changed":
        kept = clicked | (rng.random(len(clicked)) < 1 - 0.6 * severity)
        return Day(ids[kept], clicked[kept], int(kept[-day.held_out :].sum()))
    return Day(ids, clicked, day.held_out)


def spoil_model(harm: str, model: ClickModel, severity: float, rng: np.random.Generator) -> None:
    """Do to a trained candidate what a fault of its training or export does."""
    if harm == "miscalibration":
        model.offset += 0.3 * severity
    elif harm == "bad slice":
        errors = rng.normal(0, 0.7 * severity, SIZES[USER])
        model.noise = lambda ids: np.where(ids[:, COUNTRY] == 1, errors[ids[:, USER]], 0.0)
    elif harm == "worse model":
        model.weights += rng.normal(0, 0.06 * severity, len(model.weights))


@dataclass
class Night:
    """What happened in a night, what the gate said, and the true change of NE: of all rows, the worst of a country."""

    what: str
    record: GateRecord
    change: float
    worst_change: float

    @property
    def passed(self) -> bool:
        return self.record.verdict == PASS

    @property
    def is_worse(self) -> bool:
        """Whether the candidate is truly worse than the limits allow."""
        return self.change > (GATE.max_ne_increase or 0.0) or self.worst_change > (GATE.slice_max_ne_increase or 0.0)


def true_changes(ids: Ids, probabilities: Floats, candidate: ClickModel, incumbent: ClickModel) -> tuple[float, float]:
    """Of all rows, and of the worst country, by the expected log loss, so that chance of labels plays no part."""
    losses = []
    for model in (candidate, incumbent):
        logits = model.score(ids).astype(np.float64)
        losses.append(np.logaddexp(0, logits) - probabilities * logits)
    theirs, before = (np.bincount(ids[:, COUNTRY], loss) for loss in losses)
    return float(losses[0].sum() / losses[1].sum() - 1), float((theirs / before - 1).max())


def plan_year(nights: int, each: int, rng: np.random.Generator) -> list[str]:
    """What each night brings: a harm, "better", or "" for nothing out of the ordinary."""
    special = [BETTER] * round(BETTER_SHARE * nights) + [*HARMS] * each
    year = special + [""] * (nights - len(special))
    return [year[number] for number in rng.permutation(len(year))]


class Year:
    """The nights one after the other, each from the version that serves by then."""

    def __init__(self, folder: str, seed: int) -> None:
        self.rng, self.ledger = np.random.default_rng(seed), LedgerFile(Files(folder), "looks.json")
        self.world, self.serving = World(self.rng), ClickModel()
        for _ in range(FIRST_DAYS):
            self.world.pass_day()
            self.serving.train(*self.draw_clicks(TRAIN_ROWS))
        ids, clicked = self.draw_clicks(TEST_ROWS)
        first = measure(ScoredRows(labels=clicked.astype(np.float32), candidate=self.serving.score(ids)), GATE)
        # What the next nights know of a version that was published.
        self.former = former_figures(replace(first, coverage=self.serving.coverage(ids)))

    def draw_clicks(self, rows: int) -> tuple[Ids, NDArray[np.bool_]]:
        ids, logits = self.world.draw_rows(rows)
        return ids, self.rng.random(rows) < sigmoid(logits)

    def run_night(self, day: date, what: str) -> Night:
        self.world.pass_day()
        severity = self.rng.uniform(LEAST_SEVERE, 1.0)
        log = spoil_log(what, Day(*self.draw_clicks(TRAIN_ROWS + TEST_ROWS)), severity, self.rng)
        candidate = self.serving.go_on()
        candidate.crosses += what == BETTER
        candidate.train(log.ids[: -log.held_out], log.clicked[: -log.held_out])
        spoil_model(what, candidate, severity, self.rng)
        ids = log.ids[-log.held_out :]
        scored = ScoredRows(
            labels=log.clicked[-log.held_out :].astype(np.float32),
            candidate=candidate.score(ids),
            incumbent=self.serving.score(ids),
            slices={"country": SliceColumn(codes=ids[:, COUNTRY])},
        )
        measured = measure(scored, GATE, seed=day.toordinal())
        record = replace(measured, coverage=candidate.coverage(ids), former=self.former)
        record = judge_within_budget(record, GATE, scored, self.ledger, day, str(day))
        clean, logits = self.world.draw_rows(CLEAN_ROWS)
        night = Night(what, record, *true_changes(clean, sigmoid(logits), candidate, self.serving))
        if night.passed:
            self.serving, self.former = candidate, former_figures(record)
        return night


def main() -> None:
    asked = options(__doc__, nights=365, each_harm=(3, "nights with each of the ten harms"), seed=0)
    began, nights = time.perf_counter(), list[Night]()
    with tempfile.TemporaryDirectory() as folder:
        year = Year(folder, asked.seed)
        for number, what in enumerate(plan_year(asked.nights, asked.each_harm, year.rng)):
            nights.append(year.run_night(date(2026, 1, 1) + timedelta(days=number), what))
            if (number + 1) % 30 == 0:
                print(f"{number + 1} of {asked.nights} nights", file=sys.stderr, flush=True)
    for title, some in (("passed", [night for night in nights if night.passed]), ("all", nights)):
        show(title, Counter(night.what or "ordinary" for night in some))
    wrong_kinds = sorted(night.what for night in nights if night.passed and night.is_worse)
    fine = [night for night in nights if night.what not in HARMS and not night.is_worse]
    better = [night for night in nights if night.what == BETTER]
    finish(
        "year",
        (GATE.budget or 0.0) * asked.nights / YEAR / max(len(wrong_kinds), 1),
        nights=len(nights),
        rows=TEST_ROWS,
        wrong=len(wrong_kinds),
        wrong_kinds=wrong_kinds,
        spent=sum(night.record.budget.alpha for night in nights if night.record.budget),
        needless_share=sum(not night.passed for night in fine) / max(len(fine), 1),
        better_passed=sum(night.passed for night in better) / max(len(better), 1),
        seconds=time.perf_counter() - began,
    )


if __name__ == "__main__":
    main()
