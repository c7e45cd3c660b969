"""``make bench-culprits``: nights with ten kinds of harm, and whether ``nightjar bisect`` names what spoilt them.

The harms are those of ``make bench-year``, whose world draws the logs. Nights are real: `nightjar nightly` from the
day's log to the verdict, a few good ones, and then one with a harm, each harm after the same good ones and on the same
rows, which are published if nothing is done to them. Where the gate holds the night, `nightjar bisect` looks for the
culprit with its default limit of four replays. The culprit is *right* if it is what ``HARMS`` says, no more and no
less, and took two replays or fewer.

``HARMS`` also says beforehand what can show each harm. For some nothing can: a feature that is wrong in less than half
of the rows still tells more than it misleads, so a model without it is worse, whatever the fault costs. These, and
harms that the gate never held, are printed and counted apart. ``ratio``: the share of the other held nights whose
culprit is right, over 0.9.
"""

from __future__ import annotations

import shutil
import sys
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


@dataclass(frozen=True, kw_only=True)
class Case:
    """A night with a harm: how large it is in ``words``, for what spoils the log, or as overrides of the night.

    ``unseen``: why nothing can show what spoilt it; "": something can.
    """

    words: str
    severity: float = 0.0
    settings: tuple[str, ...] = ()
    unseen: str = ""


@dataclass(frozen=True, kw_only=True)
class Harm:
    """A kind of harm, by its name in ``benchmarks.year``, and what ``bisect`` should name.

    ``kinds``: of culprits that are right, several where the records cannot tell them apart. ``names``: features, of
    which any are right, as each is spoilt; or settings; or the slice whose rows alone are spoilt. ``shown_by``: what
    shows it.
    """

    name: str
    kinds: tuple[str, ...]
    names: tuple[str, ...] = ()
    shown_by: str
    cases: tuple[Case, ...]

    def is_named_by(self, found: BisectRecord, day: date) -> bool:
        """Whether ``found`` names it, whatever that took."""
        if found.culprit is None or found.culprit.kind not in self.kinds:
            return False
        named = set(found.culprit.names)
        if found.culprit.kind == FEATURES:
            return named <= set(self.names)
        return named == {*self.names, str(day)} - ({str(day)} if found.culprit.kind == SETTINGS else set())


THE_INCUMBENT = "the serving version, which did not learn from these rows"
A_REPLAY, FORMER = "a replay without it", "a replay with the former value"
TELLS_MORE = "right in most rows, the feature tells more than it misleads"
HARMS = (
    Harm(
        name="labels turned",
        kinds=(LABELS,),
        shown_by=THE_INCUMBENT,
        cases=(Case(words="15 % of the labels", severity=1.0), Case(words="30 % of the labels", severity=2.0)),
    ),
    Harm(
        name="feature dropped",
        kinds=(FEATURES,),
        names=("site",),
        shown_by=A_REPLAY,
        cases=(
            Case(words="site is 0 in all rows", severity=1.0),
            Case(words="site is 0 in 90 % of the rows", severity=0.9),
            Case(words="site is 0 in 40 % of the rows", severity=0.4, unseen=TELLS_MORE),
        ),
    ),
    Harm(
        name="doubled rows",
        kinds=(ROWS,),
        shown_by=THE_INCUMBENT,
        cases=(
            Case(words="every row twice", severity=1.0),
            Case(words="a twentieth of the rows 20 times", severity=0.05),
        ),
    ),
    Harm(
        name="clock shifted",
        kinds=(FEATURES,),
        names=("hour",),
        shown_by=A_REPLAY,
        cases=(Case(words="the hour is 6 ahead", severity=1.0), Case(words="the hour is 12 ahead", severity=2.0)),
    ),
    Harm(
        name="stale ids",
        kinds=(FEATURES,),
        names=("site", "user"),
        shown_by=A_REPLAY,
        cases=(
            Case(words="site and user of another row, in all rows", severity=1.0),
            Case(words="site and user of another row, in 80 %", severity=0.8),
            Case(words="site and user of another row, in 40 %", severity=0.4, unseen=TELLS_MORE),
        ),
    ),
    Harm(
        name="leak",
        kinds=(FEATURES,),
        names=("spare",),
        shown_by=A_REPLAY,
        cases=(
            Case(words="spare tells the label in 70 % of the rows", severity=1.0),
            Case(words="spare tells the label in 35 % of the rows", severity=0.5),
        ),
    ),
    Harm(
        name="miscalibration",
        kinds=(SETTINGS,),
        names=("train.label_smoothing",),
        shown_by=FORMER,
        cases=(
            Case(words="train.label_smoothing=0.2", settings=("train.label_smoothing=0.2",)),
            Case(words="train.label_smoothing=0.1", settings=("train.label_smoothing=0.1",)),
        ),
    ),
    Harm(
        name="bad slice",
        kinds=(LABELS, ROWS),
        names=(f"country={BAD_COUNTRY}",),
        shown_by=THE_INCUMBENT,
        cases=(
            Case(words="80 % of the clicks of a country are lost", severity=0.8),
            Case(words="50 % of the clicks of a country are lost", severity=0.5),
        ),
    ),
    Harm(
        name="sampling changed",
        kinds=(LABELS, ROWS),  # clicks that are added, and rows without a click that are left out, look alike
        shown_by=THE_INCUMBENT,
        cases=(
            Case(words="60 % of the rows without a click are gone", severity=1.0),
            Case(words="30 % of the rows without a click are gone", severity=0.5),
        ),
    ),
    Harm(
        name="worse model",
        kinds=(SETTINGS,),
        names=("train.lr",),
        shown_by=FORMER,
        cases=(
            Case(words="train.lr=0.3", settings=("train.lr=0.3", "checkpoint.allow=[train.lr]")),
            Case(
                words="train.lr=0.3, and two changes without harm",
                settings=(
                    "train.lr=0.3",
                    "train.decay_ratio=0.6",
                    "train.clip.dense_norm=100",
                    "checkpoint.allow=[train.lr,train.decay_ratio,train.clip.dense_norm]",
                ),
            ),
        ),
    ),
)


@dataclass(frozen=True)
class Night:
    """A night with a harm: exit code, and what ``bisect`` found, where the gate held it."""

    harm: Harm
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
        return self.found is not None and not self.case.unseen

    def line(self) -> str:
        """Return what was named, after how many replays."""
        if self.found is None:
            return "passed" if self.code == 0 else f"ended with {self.code}"
        culprit, replays = self.found.culprit, len(self.found.replays)
        named = "nothing" if culprit is None else f"{culprit.kind} {', '.join(culprit.names)}"
        verdict = "right" if self.right else "WRONG"
        return f"held; named {named} after {replays} replays: {'cannot be shown' if self.case.unseen else verdict}"


class Nights:
    """A store with good nights, and copies of it with one more night each."""

    def __init__(self, folder: Path, seed: int, rows: int) -> None:
        self.folder, self.seed, self.rows = folder, seed, rows
        self.rng = np.random.default_rng(seed)
        self.world = World(self.rng, HOURLY)
        (folder / "good" / "logs").mkdir(parents=True)

    def draw(self) -> Day:
        """Draw the rows of the next day."""
        self.world.pass_day()
        ids, logits = self.world.draw_rows(self.rows)
        return Day(ids, self.rng.random(self.rows) < sigmoid(logits), held_out=0)

    def run(self, place: str, day: date, log: Day, settings: Sequence[str] = ()) -> int:
        """Run the night of ``day`` in folder ``place``; its exit code."""
        frame = pl.DataFrame(dict(zip(COLUMNS, log.ids.T, strict=True)))
        frame = frame.with_columns(label=pl.Series(log.clicked).cast(pl.Int8))
        path = self.folder / place
        frame.write_csv(path / "logs" / f"{day}.csv")
        where = [f'data.path="{path}/logs/{{day}}.csv"', f"store={path}/store", f"seed={self.seed}"]
        # Whatever refuses a night before the gate, such as a training guard, is an answer; a signal is not.
        return nightjar("nightly", f"date={day}", *NIGHT, *where, *settings, allowed=range(SIGNALLED))

    def require_good(self, place: str, day: date, log: Day) -> None:
        """Run the night of ``day`` in ``place``; the benchmark ends if it is not published."""
        if self.run(place, day, log):
            raise SystemExit(f"seed {self.seed}: the night of {day}, to which nothing was done, was not published")
        say(f"seed {self.seed}: {day} was published")

    def copy_good(self) -> Path:
        """Copy the good nights, in place of an earlier copy."""
        place = self.folder / "bad"
        shutil.rmtree(place, ignore_errors=True)
        return shutil.copytree(self.folder / "good", place)

    def run_harm(self, harm: Harm, case: Case, day: date, log: Day, rng: np.random.Generator) -> Night:
        """Run the night of ``day`` with a harm, and look for the culprit if the gate holds it."""
        place = self.copy_good()
        code, found = self.run(place.name, day, spoil(harm.name, log, case.severity, rng), case.settings), None
        if code == GateHeldError.exit_code:
            store, name = Store(f"{place}/store"), f"{MODEL}-{day}"
            nightjar("bisect", name, "--store", store.url, allowed=(0, GateHeldError.exit_code))
            found = read(BisectRecord, store, f"runs/{name}/{BISECT}")
        return Night(harm, case, code, found, found is not None and harm.is_named_by(found, day))


def say(text: str) -> None:
    """Tell how far the benchmark is."""
    print(text, file=sys.stderr, flush=True)


def spoil(harm: str, day: Day, severity: float, rng: np.random.Generator) -> Day:
    """The day's log as a fault leaves it; the same log where the harm is a setting."""
    if harm == "doubled rows":
        times = np.where(rng.random(len(day.ids)) < severity, 2 if severity == 1 else TIMES, 1)
        return Day(np.repeat(day.ids, times, axis=0), np.repeat(day.clicked, times), 0)
    if harm == "bad slice":
        lost = (day.ids[:, COUNTRY] == BAD_COUNTRY) & (rng.random(len(day.ids)) < severity)
        return Day(day.ids, day.clicked & ~lost, 0)
    return spoil_log(harm, day, severity, rng)


def show_nights(nights: Sequence[Night]) -> None:
    """Print a line for each case: what shows it, and of its nights how many were held and named right."""
    print(f"{'harm':17} {'case':46} {'nights':>6} {'held':>4} {'right':>5} {'replays':>7}  shown by")
    for harm in HARMS:
        for case in harm.cases:
            its = [night for night in nights if night.case is case]
            if not its:
                continue
            replays = " ".join(str(len(night.found.replays)) for night in its if night.found is not None)
            held, right = sum(night.found is not None for night in its), sum(night.right for night in its)
            shown = f"nothing: {case.unseen}" if case.unseen else harm.shown_by
            print(f"{harm.name:17} {case.words:46} {len(its):6} {held:4} {right:5} {replays:>7}  {shown}")
    for night in nights:
        if night.counts and not night.right and night.found is not None:
            culprit = night.found.culprit
            named = f"nothing: {night.found.stopped or 'all were tried'}" if culprit is None else culprit.words
            print(f"WRONG {night.harm.name}, {night.case.words}: {named}")


def by_harm(nights: Sequence[Night]) -> dict[str, dict[str, int]]:
    """Count nights by the name of their harm: all, held, counted, right."""
    counts: dict[str, dict[str, int]] = {}
    for night in nights:
        its = counts.setdefault(night.harm.name, dict.fromkeys(("nights", "held", "counted", "right"), 0))
        its["nights"] += 1
        its["held"] += night.found is not None
        its["counted"] += night.counts
        its["right"] += night.counts and night.right
    return counts


def main() -> None:
    asked = options(
        __doc__,
        nights=(3, "good nights before the one with a harm"),
        rows=(100_000, "rows of a day"),
        seeds=("0,1", "of worlds, models and faults"),
        only=("", "the kinds of harm whose name has this in it"),
    )
    silent()
    began = time.perf_counter()
    nights = list[Night]()
    todo = [(harm, case) for harm in HARMS for case in harm.cases]
    for seed in map(int, asked.seeds.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            world = Nights(Path(folder), seed, asked.rows)
            for number in range(asked.nights):
                world.require_good("good", FIRST + timedelta(days=number), world.draw())
            day, log = FIRST + timedelta(days=asked.nights), world.draw()
            world.require_good(world.copy_good().name, day, log)
            for number, (harm, case) in enumerate(todo):
                if asked.only not in harm.name:
                    continue
                night = world.run_harm(harm, case, day, log, np.random.default_rng([seed, number]))
                nights.append(night)
                say(f"seed {seed}: {number + 1} of {len(todo)}: {harm.name}, {case.words}: {night.line()}")
    show_nights(nights)
    counted = [night for night in nights if night.counts]
    share = sum(night.right for night in counted) / max(len(counted), 1)
    finish(
        "culprits",
        share / GOOD_SHARE,
        nights=len(nights),
        held=sum(night.found is not None for night in nights),
        counted=len(counted),
        right=sum(night.right for night in counted),
        named=sum(night.named for night in counted),
        replays=float(np.mean([len(night.found.replays) for night in counted if night.found])) if counted else None,
        harms=by_harm(nights),
        not_held=[f"{night.case.words}: {night.line()}" for night in nights if night.found is None],
        seconds=time.perf_counter() - began,
    )


if __name__ == "__main__":
    main()
