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

from benchmarks.harness import finish, options
from pipeline.config import GateConfig
from pipeline.evaluation import ScoredRows, SliceColumn, measure
from pipeline.evaluation.gate.budget import LedgerFile, judge_within_budget
from pipeline.evaluation.gate.measure import former_figures
from pipeline.evaluation.gate.power import error_of
from pipeline.evaluation.metrics import sigmoid
from pipeline.records.error_budget import YEAR
from pipeline.records.gate import PASS, Former, GateRecord
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
TRAIN_ROWS, TEST_ROWS, CLEAN_ROWS = 100_000, 60_000, 300_000
# Days that the version learnt from which serves when the year begins.
FIRST_DAYS = 10
BATCH, RATE, FIRST_SQUARE = 1024, 0.08, 0.1
BETTER_SHARE = 0.05
# Share of its spread that a taste changes by in a day: its correlation over a month is 0.98.
DRIFT = 0.04
# What a day forgets of AdaGrad's sums, so that the model still follows after a year.
FORGET = 0.03
# A harm is as large as written below, or as little as this share of it.
LEAST_SEVERE = 0.3
HARMS = (
    "labels turned",
    "feature dropped",
    "doubled rows",
    "clock shifted",
    "stale ids",
    "leak",
    "miscalibration",
    "bad slice",
    "sampling changed",
    "worse model",
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
        """Rows [n, features + crosses] of the one table that all features share."""
        columns = [ids[:, feature] + start for feature, start in enumerate(STARTS)]
        for number, pair in enumerate(CROSSES[: self.crosses]):
            columns.append(cross_rows(ids, pair) + STARTS[-1] + SIZES[-1] + number * CROSS_ROWS)
        return np.stack(columns, axis=1)

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


STARTS = tuple(int(start) for start in np.cumsum((0, *SIZES[:-1])))
TABLE_ROWS = sum(SIZES) + len(CROSSES) * CROSS_ROWS


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


@dataclass(frozen=True)
class Truth:
    """The change of NE from incumbent to candidate on clean rows, of all and by country."""

    all_rows: float
    countries: tuple[float, ...]

    def is_wrong(self, settings: GateConfig) -> bool:
        most, most_slice = settings.max_ne_increase or 0.0, settings.slice_max_ne_increase or 0.0
        return self.all_rows > most or max(self.countries) > most_slice


def compare_truly(ids: Ids, probabilities: Floats, candidate: ClickModel, incumbent: ClickModel) -> Truth:
    """Compare by the expected log loss, so that chance of labels plays no part."""
    losses = []
    for model in (candidate, incumbent):
        logits = model.score(ids).astype(np.float64)
        losses.append(np.logaddexp(0, logits) - probabilities * logits)
    countries = []
    for country in range(SIZES[COUNTRY]):
        rows = ids[:, COUNTRY] == country
        countries.append(float(losses[0][rows].sum() / losses[1][rows].sum() - 1))
    return Truth(float(losses[0].sum() / losses[1].sum() - 1), tuple(countries))


@dataclass
class Night:
    """What happened in a night, and what the gate said."""

    what: str
    severity: float
    record: GateRecord
    truth: Truth

    @property
    def passed(self) -> bool:
        return self.record.verdict == PASS


def plan_year(nights: int, each: int, rng: np.random.Generator) -> list[str]:
    """What each night brings: a harm, "better", or "" for nothing out of the ordinary."""
    special = ["better"] * round(BETTER_SHARE * nights) + [*HARMS] * each
    if len(special) > nights:
        raise SystemExit(f"{len(special)} nights are out of the ordinary, more than --nights {nights}; --each-harm 0")
    year = special + [""] * (nights - len(special))
    return [year[number] for number in rng.permutation(len(year))]


class Year:
    """The nights one after the other, each from the version that serves by then."""

    def __init__(self, settings: GateConfig, ledger: LedgerFile, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.settings, self.ledger, self.world = settings, ledger, World(self.rng)
        self.serving = ClickModel()
        for _ in range(FIRST_DAYS):
            self.world.pass_day()
            ids, clicked = self.draw_clicks(TRAIN_ROWS)
            self.serving.train(ids, clicked)
        ids, clicked = self.draw_clicks(TEST_ROWS)
        first = ScoredRows(labels=clicked.astype(np.float32), candidate=self.serving.score(ids))
        self.former = self.former_of(measure(first, settings), self.serving, ids)

    def draw_clicks(self, rows: int) -> tuple[Ids, NDArray[np.bool_]]:
        ids, logits = self.world.draw_rows(rows)
        return ids, self.rng.random(rows) < sigmoid(logits)

    def former_of(self, record: GateRecord, model: ClickModel, ids: Ids) -> Former | None:
        """What the next nights know of a version that was published."""
        return former_figures(replace(record, coverage=model.coverage(ids)))

    def run_night(self, day: date, what: str) -> Night:
        self.world.pass_day()
        severity = self.rng.uniform(LEAST_SEVERE, 1.0)
        log = spoil_log(what, Day(*self.draw_clicks(TRAIN_ROWS + TEST_ROWS)), severity, self.rng)
        candidate = self.serving.go_on()
        if what == "better":
            candidate.crosses += 1
        candidate.train(log.ids[: -log.held_out], log.clicked[: -log.held_out])
        spoil_model(what, candidate, severity, self.rng)
        ids, clicked = log.ids[-log.held_out :], log.clicked[-log.held_out :]
        scored = ScoredRows(
            labels=clicked.astype(np.float32),
            candidate=candidate.score(ids),
            incumbent=self.serving.score(ids),
            slices={"country": SliceColumn(codes=ids[:, COUNTRY])},
        )
        record = replace(
            measure(scored, self.settings, seed=day.toordinal()),
            coverage=candidate.coverage(ids),
            former=self.former,
        )
        record = judge_within_budget(record, self.settings, scored, self.ledger, day, str(day))
        clean, logits = self.world.draw_rows(CLEAN_ROWS)
        truth = compare_truly(clean, sigmoid(logits), candidate, self.serving)
        if record.verdict == PASS:
            self.serving, self.former = candidate, self.former_of(record, candidate, ids)
        return Night(what, severity, record, truth)


def show_year(year: list[Night], settings: GateConfig) -> None:
    """Print a line for each kind of night."""
    print(f"{'night':18} {'nights':>6} {'passed':>6} {'truly worse':>11} {'wrong':>5}  held by")
    for what in sorted({night.what for night in year}, key=lambda what: (what in HARMS, what)):
        nights = [night for night in year if night.what == what]
        passed = [night for night in nights if night.passed]
        by = Counter(check.name for night in nights for check in night.record.checks if not check.passed)
        worse = sum(night.truth.is_wrong(settings) for night in nights)
        wrong = sum(night.truth.is_wrong(settings) for night in passed)
        reasons = ", ".join(f"{name} {count}" for name, count in by.most_common(4))
        print(f"{what or 'ordinary':18} {len(nights):6} {len(passed):6} {worse:11} {wrong:5}  {reasons}")


def main() -> None:
    asked = options(
        __doc__,
        nights=365,
        budget=1.0,
        limit=(0.002, "gate.max_ne_increase"),
        slice_limit=(0.02, "gate.slice_max_ne_increase"),
        fall=(0.01, "gate.max_ne_fall"),
        label_shift=(0.1, "gate.max_label_shift"),
        each_harm=(3, "nights with each of the ten harms"),
        seed=0,
    )
    settings = GateConfig(
        budget=asked.budget,
        max_ne_increase=asked.limit,
        slice_max_ne_increase=asked.slice_limit,
        max_ne_fall=asked.fall,
        max_label_shift=asked.label_shift,
        slices=["country"],
    )
    began = time.perf_counter()
    nights = list[Night]()
    with tempfile.TemporaryDirectory() as folder:
        year = Year(settings, LedgerFile(Files(folder), "looks.json"), asked.seed)
        for number, what in enumerate(plan_year(asked.nights, asked.each_harm, year.rng)):
            nights.append(year.run_night(date(2026, 1, 1) + timedelta(days=number), what))
            if (number + 1) % 30 == 0:
                print(f"{number + 1} of {asked.nights} nights", file=sys.stderr, flush=True)
    show_year(nights, settings)
    for night in nights:
        if night.passed and night.truth.is_wrong(settings):
            print(f"wrong: {night.what}, severity {night.severity:.2f}: {night.truth}")
    wrong = [night for night in nights if night.passed and night.truth.is_wrong(settings)]
    fine = [night for night in nights if night.what not in HARMS and not night.truth.is_wrong(settings)]
    needless = [night for night in fine if not night.passed]
    better = [night for night in nights if night.what == "better"]
    errors = [error_of(night.record.change.ne, settings.confidence) for night in fine if night.record.change]
    finish(
        "year",
        asked.budget * asked.nights / YEAR / max(len(wrong), 1),
        nights=len(nights),
        rows=TEST_ROWS,
        wrong=len(wrong),
        wrong_kinds=sorted(night.what for night in wrong),
        spent=sum(night.record.budget.alpha for night in nights if night.record.budget),
        needless_share=len(needless) / max(len(fine), 1),
        better_passed=sum(night.passed for night in better) / max(len(better), 1),
        better_change=float(np.mean([night.truth.all_rows for night in better])) if better else None,
        standard_error=float(np.median(errors)) if errors else None,
        seconds=time.perf_counter() - began,
    )


if __name__ == "__main__":
    main()
