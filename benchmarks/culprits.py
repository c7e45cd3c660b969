"""``make bench-culprits``: nights with ten kinds of harm, and whether ``nightjar bisect`` names what spoilt them.

The harms are those of ``make bench-year``, whose world draws the logs. Nights are real: `nightjar nightly` from the
day's log to the verdict, a few good ones, and then one with a harm, each harm after the same good ones and on the same
rows, which are published if nothing is done to them. Where the gate holds the night, `nightjar bisect` looks for the
culprit with its default limit of four replays. The culprit is *right* if it is what ``CULPRITS`` says, no more and no
less, and took two replays or fewer.

``CASES`` also says beforehand which harms nothing can show: a feature that is wrong in less than half of the rows still
tells more than it misleads, so a model without it is worse, whatever the fault costs. These, and harms that the gate
never held, are counted apart. ``ratio``: the share of the other held nights whose culprit is right, over 0.9.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.harness import finish, nightjar, options, silent, words
from benchmarks.year import COUNTRY, SPREADS, Day, World, spoil_log
from pipeline.core.errors import SIGNALLED, GateHeldError
from pipeline.evaluation.metrics import sigmoid
from pipeline.records.bisection import BISECT, FEATURES, LABELS, ROWS, SETTINGS, BisectRecord
from pipeline.records.record import read
from pipeline.store import Store

COLUMNS = ("hour", "country", "channel", "device", "site", "advert", "campaign", "user", "spare")
# Clicks follow the hour more than in the year on the gate alone, so that a shifted clock costs something.
HOURLY = (0.5, *SPREADS[1:])
FIRST, MODEL = date(2026, 1, 1), "clicks"
WITHIN, GOOD_SHARE = 2, 0.9
# The country whose clicks are lost, and how often the rows of a file come that is sent again and again.
BAD_COUNTRY, TIMES = 1, 20
NIGHT = words(f"""data=csv publish.model={MODEL} data.split.test_share=0.3 model.embedding_dim=8 model.top_mlp=[32,16]
    train.precision=fp32 train.threads_per_rank=1 gate.slices=[country] gate.max_ne_increase=0.005
    gate.max_ne_drift=0.02 gate.max_ne_fall=0.03 gate.max_label_shift=0.1 nightly.wait_minutes=0 hardware=laptop
    launch.inline=[ingest,plan,partition,train,evaluate,publish]""")
NIGHT.append(f"+data.sparse={{{', '.join(f'{name}: {{}}' for name in COLUMNS)}}}")
# By harm, the kinds of culprits that are right, several where the records cannot tell them apart, and their names:
# features, of which any are right, as each is spoilt; or settings; or the slice whose rows alone are spoilt.
CULPRITS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "labels turned": ((LABELS,), ()),
    "feature dropped": ((FEATURES,), ("site",)),
    "doubled rows": ((ROWS,), ()),
    "clock shifted": ((FEATURES,), ("hour",)),
    "stale ids": ((FEATURES,), ("site", "user")),
    "leak": ((FEATURES,), ("spare",)),
    "miscalibration": ((SETTINGS,), ("train.label_smoothing",)),
    "bad slice": ((LABELS, ROWS), (f"country={BAD_COUNTRY}",)),
    "sampling changed": ((LABELS, ROWS), ()),  # clicks that are added look like other rows that are left out
    "worse model": ((SETTINGS,), ("train.lr",)),
}


@dataclass(frozen=True)
class Case:
    """A night with a harm of ``benchmarks.year``: how large it is in ``words``, and for what spoils the log.

    ``settings``: overrides of the night. ``seen``: something can show what spoilt it.
    """

    harm: str
    words: str
    severity: float = 0.0
    settings: tuple[str, ...] = ()
    seen: bool = True


HARMLESS = ("train.decay_ratio=0.6", "train.clip.dense_norm=100")
CASES = (
    Case("labels turned", "15 % of the labels", 1.0),
    Case("labels turned", "30 % of the labels", 2.0),
    Case("feature dropped", "site is 0 in all rows", 1.0),
    Case("feature dropped", "site is 0 in 90 % of the rows", 0.9),
    Case("feature dropped", "site is 0 in 40 % of the rows", 0.4, seen=False),
    Case("doubled rows", "every row twice", 1.0),
    Case("doubled rows", "a twentieth of the rows 20 times", 0.05),
    Case("clock shifted", "the hour is 6 ahead", 1.0),
    Case("clock shifted", "the hour is 12 ahead", 2.0),
    Case("stale ids", "site and user of another row, in all rows", 1.0),
    Case("stale ids", "site and user of another row, in 80 %", 0.8),
    Case("stale ids", "site and user of another row, in 40 %", 0.4, seen=False),
    Case("leak", "spare tells the label in 70 % of the rows", 1.0),
    Case("leak", "spare tells the label in 35 % of the rows", 0.5),
    Case("miscalibration", "train.label_smoothing=0.2", settings=("train.label_smoothing=0.2",)),
    Case("miscalibration", "train.label_smoothing=0.1", settings=("train.label_smoothing=0.1",)),
    Case("bad slice", "80 % of the clicks of a country are lost", 0.8),
    Case("bad slice", "50 % of the clicks of a country are lost", 0.5),
    Case("sampling changed", "60 % of the rows without a click are gone", 1.0),
    Case("sampling changed", "30 % of the rows without a click are gone", 0.5),
    Case("worse model", "train.lr=0.3", settings=("train.lr=0.3",)),
    Case("worse model", "train.lr=0.3, and two changes without harm", settings=("train.lr=0.3", *HARMLESS)),
)


@dataclass(frozen=True)
class Night:
    """A night with a harm: exit code, and what ``bisect`` found and named, where the gate held it."""

    case: Case
    code: int
    found: BisectRecord | None
    named: bool

    @property
    def right(self) -> bool:
        return self.named and self.found is not None and len(self.found.replays) <= WITHIN

    @property
    def counts(self) -> bool:
        """Whether the gate held it, and something can show the culprit."""
        return self.found is not None and self.case.seen

    def line(self) -> str:
        """Return what was named, after how many replays."""
        if self.found is None:
            return f"not held, exit code {self.code}"
        culprit, replays = self.found.culprit, len(self.found.replays)
        named = f"nothing: {self.found.stopped}" if culprit is None else f"{culprit.kind} {', '.join(culprit.names)}"
        verdict = "right" if self.right else "WRONG"
        return f"held; named {named} after {replays} replays: {verdict if self.case.seen else 'cannot be shown'}"


def is_named(harm: str, found: BisectRecord, day: date) -> bool:
    """Whether ``found`` names the harm, whatever that took."""
    kinds, names = CULPRITS[harm]
    if found.culprit is None or found.culprit.kind not in kinds:
        return False
    named = set(found.culprit.names)
    if found.culprit.kind == FEATURES:
        return named <= set(names)
    return named == (set(names) if found.culprit.kind == SETTINGS else {*names, str(day)})


def spoil(harm: str, day: Day, severity: float, rng: np.random.Generator) -> Day:
    """The day's log as a fault leaves it; the same log where the harm is a setting."""
    if harm == "doubled rows":
        times = np.where(rng.random(len(day.ids)) < severity, 2 if severity == 1 else TIMES, 1)
        return Day(np.repeat(day.ids, times, axis=0), np.repeat(day.clicked, times), 0)
    if harm == "bad slice":
        lost = (day.ids[:, COUNTRY] == BAD_COUNTRY) & (rng.random(len(day.ids)) < severity)
        return Day(day.ids, day.clicked & ~lost, 0)
    return spoil_log(harm, day, severity, rng)


def draw(world: World, rows: int) -> Day:
    """The rows of the next day."""
    world.pass_day()
    ids, logits = world.draw_rows(rows)
    return Day(ids, world.rng.random(rows) < sigmoid(logits), held_out=0)


def run_night(place: Path, seed: int, day: date, log: Day, settings: Sequence[str] = ()) -> int:
    """Run the night of ``day`` in folder ``place``; its exit code."""
    frame = pl.DataFrame(dict(zip(COLUMNS, log.ids.T, strict=True)))
    frame = frame.with_columns(label=pl.Series(log.clicked).cast(pl.Int8))
    (place / "logs").mkdir(parents=True, exist_ok=True)
    frame.write_csv(place / "logs" / f"{day}.csv")
    where = [f'data.path="{place}/logs/{{day}}.csv"', f"store={place}/store", f"seed={seed}"]
    # Whatever refuses a night before the gate, such as a training guard, is an answer; a signal is not.
    return nightjar("nightly", f"date={day}", *NIGHT, *where, *settings, allowed=range(SIGNALLED))


def run_case(case: Case, place: Path, seed: int, day: date, log: Day, rng: np.random.Generator) -> Night:
    """Run the night of ``day`` with a harm, and look for the culprit if the gate holds it."""
    found, settings = None, list(case.settings)
    if case.harm == "worse model":  # what a checkpoint was not trained with has to be allowed
        settings.append(f"checkpoint.allow=[{','.join(each.partition('=')[0] for each in settings)}]")
    code = run_night(place, seed, day, spoil(case.harm, log, case.severity, rng), settings)
    if code == GateHeldError.exit_code:
        store, name = Store(f"{place}/store"), f"{MODEL}-{day}"
        nightjar("bisect", name, "--store", store.url, allowed=(0, GateHeldError.exit_code))
        found = read(BisectRecord, store, f"runs/{name}/{BISECT}")
    return Night(case, code, found, found is not None and is_named(case.harm, found, day))


def run_seed(folder: Path, seed: int, rows: int, good: int, only: str) -> list[Night]:
    """All cases of a world, each after the same ``good`` nights, in a copy of their store."""
    world, nights = World(np.random.default_rng(seed), HOURLY), []
    for number in range(good + 1):
        day, log = FIRST + timedelta(days=number), draw(world, rows)
        place = folder / "good"
        if number == good:
            place = shutil.copytree(place, folder / "none")
        if run_night(place, seed, day, log):
            raise SystemExit(f"seed {seed}: the night of {day}, to which nothing was done, was not published")
    for number, case in enumerate(CASES):
        if only in case.harm:
            place = shutil.copytree(folder / "good", folder / str(number))
            nights.append(run_case(case, place, seed, day, log, np.random.default_rng([seed, number])))
            shutil.rmtree(place)
            print(f"seed {seed}: {case.harm}, {case.words}: {nights[-1].line()}", flush=True)
    return nights


def main() -> None:
    asked = options(
        __doc__,
        nights=(3, "good nights before the one with a harm"),
        rows=(100_000, "rows of a day"),
        seeds=("0,1", "of worlds, models and faults"),
        only=("", "the kinds of harm whose name has this in it"),
    )
    silent()
    began, nights = time.perf_counter(), list[Night]()
    for seed in map(int, asked.seeds.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            nights += run_seed(Path(folder), seed, asked.rows, asked.nights, asked.only)
    counted = [night for night in nights if night.counts]
    right = sum(night.right for night in counted)
    finish(
        "culprits",
        right / max(len(counted), 1) / GOOD_SHARE,
        nights=len(nights),
        held=sum(night.found is not None for night in nights),
        counted=len(counted),
        right=right,
        not_held=[f"{night.case.words}: {night.line()}" for night in nights if night.found is None],
        seconds=time.perf_counter() - began,
    )


if __name__ == "__main__":
    main()
