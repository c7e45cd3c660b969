"""The error budget: what a look may spend, what it then asks of the rows, and a ledger that loses no look."""

import dataclasses
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import GateConfig
from pipeline.config.fields import check_values
from pipeline.core.errors import ArtifactError, ConfigError, LaunchError
from pipeline.evaluation import ScoredRows, SliceColumn, judge, measure
from pipeline.evaluation.gate.budget import (
    KEPT_DAYS,
    LONGEST_GAP,
    MOST_ALPHA,
    TRIES,
    LedgerFile,
    allot,
    check_day,
    judge_within_budget,
)
from pipeline.evaluation.gate.checks.reference_models import INCUMBENT
from pipeline.evaluation.gate.power import Level, normal_quantile, quantile_of
from pipeline.records import BudgetLedger, ErrorBudget, GateRecord, Interval, Look
from pipeline.specs import GateInputs
from pipeline.store.files import Files
from tests.evaluation.test_gate import SETTINGS, noisy, world
from tests.records.made import figures, gate_record
from tests.waits import TurnedClock

DAY = date(2026, 2, 2)
NIGHT = 0.8 / 365  # alpha of a nightly look where one wrong promotion a year is accepted
WITH_BUDGET = dataclasses.replace(SETTINGS, budget=1.0)


def looks_of(days: list[date], budget: float = 1.0) -> list[Look]:
    """The looks at data of these days, one after the other."""
    looks: list[Look] = []
    for day in days:
        counted, alpha = allot(looks, day, budget)
        looks.append(Look(id=f"{len(looks)}", day=str(counted), at=0.0, candidate="c", budget=budget, alpha=alpha))
    return looks


def alphas(*days: int, budget: float = 1.0) -> list[float]:
    """Of looks at data of these days after ``DAY``."""
    return [look.alpha for look in looks_of([DAY + timedelta(days=day) for day in days], budget)]


@pytest.fixture
def ledger(tmp_path: Path) -> LedgerFile:
    return LedgerFile(Files(str(tmp_path)), "models/m/budget.json")


def test_a_night_has_most_of_its_days_share_and_further_looks_have_the_rest() -> None:
    assert alphas(0, 1, 2) == pytest.approx([NIGHT] * 3)
    assert alphas(0, 0, 0, 1, 1) == pytest.approx([NIGHT, 0.2 * NIGHT, 0.04 * NIGHT, NIGHT, 0.2 * NIGHT])
    assert sum(alphas(*[0] * 50)) == pytest.approx(1 / 365), "however often a day is run again"
    assert alphas(0, 1, budget=2.5) == pytest.approx([2.5 * NIGHT] * 2)


def test_a_look_has_the_shares_of_the_days_since_the_one_before_it() -> None:
    assert alphas(0, 7, 14, 14) == pytest.approx([NIGHT, 7 * NIGHT, 7 * NIGHT, 7 * 0.2 * NIGHT])
    assert alphas(0, 400) == pytest.approx([NIGHT, LONGEST_GAP * NIGHT])
    assert max(alphas(0, 40, budget=100.0)) == MOST_ALPHA


def test_a_look_at_an_earlier_day_is_a_further_one_at_the_newest() -> None:
    assert alphas(5, 3, 6) == pytest.approx([NIGHT, 0.2 * NIGHT, NIGHT])
    assert [look.day for look in looks_of([DAY, DAY - timedelta(days=9)])] == [str(DAY)] * 2


@pytest.mark.parametrize("seed", range(20))
def test_no_window_of_days_spends_more_than_its_share(seed: int) -> None:
    """Nightly, with gaps, again and again, and out of order: n days spend those of n + 30 at most."""
    draw = random.Random(seed)
    day, days = DAY, []
    for _ in range(120):
        day += timedelta(days=draw.choice([0, 0, 1, 1, 1, 2, 7, 29, 30, 31, 90, -3]))
        days.append(day)
    looks = looks_of(days, budget=3.0)
    assert looks == sorted(looks, key=lambda look: look.day)
    for first in range(0, len(looks), 7):
        spent = 0.0
        for look in looks[first:]:
            spent += look.alpha
            length = (date.fromisoformat(look.day) - date.fromisoformat(looks[first].day)).days + 1
            assert spent <= 3.0 * (length + LONGEST_GAP) / 365 + 1e-12


def spent_by_one(alpha: float, budget: float = 1.0) -> ErrorBudget:
    """Of the only look there was."""
    return ErrorBudget(budget=budget, alpha=alpha, first_alpha=alpha, day=str(DAY), look=1, spent=alpha, looks=1)


def with_change(change: float, error: float, alpha: float | None, **known) -> GateRecord:
    """A record of figures whose change of NE has this standard error; ``alpha``: of its look."""
    budget = None
    if alpha is not None:
        budget = spent_by_one(alpha, budget=4.0)
    ends = quantile_of(0.95) * error
    moved = dataclasses.replace(figures(), ne=Interval(change, change - ends, change + ends))
    return gate_record(candidate=figures(), incumbent=figures(), change=moved, budget=budget, **known)


def passes(record: GateRecord) -> bool:
    inputs = GateInputs(record=record, settings=dataclasses.replace(SETTINGS, max_psi=None))
    (check,) = INCUMBENT.decide(inputs)
    return check.passed


def test_of_candidates_worse_by_the_limit_no_more_than_alpha_pass() -> None:
    """As many as that, because the bound is sharp; a year of nights then makes the wrong promotions of its budget."""
    rng, error, draws = np.random.default_rng(11), 0.0007, 4000
    for alpha in (0.02, 0.1):
        changes = SETTINGS.max_ne_increase + error * rng.standard_normal(draws)
        wrong = sum(passes(with_change(change, error, alpha)) for change in changes)
        assert abs(wrong - alpha * draws) < 4 * (alpha * draws) ** 0.5, (alpha, wrong)
    nights, years = alphas(*range(365), budget=4.0), 40
    wrong = 0
    for alpha in nights:
        changes = SETTINGS.max_ne_increase + error * rng.standard_normal(years)
        wrong += int((changes + normal_quantile(1 - alpha) * error <= SETTINGS.max_ne_increase).sum())
    assert sum(nights) == pytest.approx(3.2)
    assert 3.2 - 4 * (3.2 / years) ** 0.5 < wrong / years < 4.0, wrong / years


def test_the_words_name_the_confidence_the_budget_and_a_limit_that_the_rows_can_test() -> None:
    settings = dataclasses.replace(SETTINGS, max_psi=None, max_ne_increase=0.01)
    (check,) = INCUMBENT.decide(GateInputs(record=with_change(0.001, 0.001, NIGHT), settings=settings))
    assert "at most +0.38% with 99.78% confidence (gate.budget=4), within +1.00%" in check.words
    (check,) = INCUMBENT.decide(GateInputs(record=with_change(0.001, 0.01, NIGHT), settings=settings))
    assert not check.passed and "is not ruled out with 99.78% confidence (gate.budget=4)" in check.words
    limit = float(re.search(r"can resolve: ([\d.]+)", check.words)[1])
    assert limit == pytest.approx(2 * normal_quantile(1 - NIGHT) * 0.01, rel=0.03)
    settings = dataclasses.replace(settings, max_ne_increase=limit)
    (check,) = INCUMBENT.decide(GateInputs(record=with_change(0.001, 0.01, NIGHT), settings=settings))
    assert check.passed, check.words
    (check,) = INCUMBENT.decide(GateInputs(record=with_change(0.2, 0.01, NIGHT * 0.2**5), settings=settings))
    assert "a rise with at least 99.999930% confidence (gate.budget=4)" in check.words


def rows_of_countries(rows: int = 20_000) -> ScoredRows:
    """Two models that are alike, and four countries; in a small one they differ by far."""
    rng, truth, labels, _ = world(rows=rows)
    countries = rng.choice(4, rows, p=[0.33, 0.33, 0.33, 0.01])
    common = truth + rng.normal(0, 0.3, rows)
    spread = np.where(countries == 3, 0.5, 0.03)
    ours, theirs = ((-1.2 + 0.9 * (common + rng.normal(0, spread) + 1.2)).astype(np.float32) for _ in range(2))
    column = SliceColumn(codes=countries, names={3: "fr"})
    return ScoredRows(labels=labels, candidate=ours, incumbent=theirs, slices={"country": column})


def test_slices_with_enough_rows_are_covered_and_the_others_are_named(ledger: LedgerFile) -> None:
    scored = rows_of_countries()
    settings = dataclasses.replace(WITH_BUDGET, slices=["country"], slice_min_clicks=20, max_ne_increase=0.01)
    measured = measure(scored, settings)
    found = judge_within_budget(measured, settings, scored, ledger, DAY, "v1")
    assert set(found.budget.covered) == {"country=0", "country=1", "country=2"}
    assert found.budget.not_covered == ("country=fr",)
    words = {check.name: check.words for check in found.checks}
    assert "with 99.78% confidence (gate.budget=1), within +2.00%" in words["slice: NE, country=0"]
    assert words["slice: NE, country=fr"].endswith("gate.budget does not cover this slice, whose rows are too few")
    assert found.slices == measured.slices, "intervals are as without a budget"
    for _ in range(5):
        again = judge_within_budget(measured, settings, scored, ledger, DAY, "v1")
    assert (again.budget.look, again.budget.covered) == (6, found.budget.covered), "no rerun excuses a slice"
    assert "confidence (gate.budget=1)" in {check.name: check.words for check in again.checks}["slice: NE, country=0"]


@pytest.mark.parametrize(("standard_errors", "passed"), [(2.6, True), (3.7, True), (3.9, False)])
def test_the_intervals_of_other_slices_hold_together_for_a_year(standard_errors: float, passed: bool) -> None:
    """One slice alone: with 95 % confidence by night 1.96 standard errors are clear, over a year's nights 3.8."""
    scored = dataclasses.replace(rows_of_countries(4000), slices={"all": SliceColumn(codes=np.zeros(4000, np.int64))})
    record = measure(scored, SETTINGS)
    error, (part,) = 0.05, record.slices
    point = standard_errors * error
    ends = quantile_of(0.95) * error
    moved = dataclasses.replace(part.change, ne=Interval(point, point - ends, point + ends))
    record = dataclasses.replace(record, slices=(dataclasses.replace(part, change=moved),))
    budget = spent_by_one(NIGHT)
    for known, expected in ((budget, passed), (None, False)):
        found = judge(dataclasses.replace(record, budget=known), SETTINGS)
        (check,) = [each for each in found.checks if each.name == "slice: NE, all=0"]
        assert check.passed == expected, check.words


def test_every_look_is_in_the_ledger_with_its_verdict(ledger: LedgerFile) -> None:
    rng, truth, labels, _ = world()
    good, bad = noisy(rng, truth, 0.3), noisy(rng, truth, 0.6)
    scored = ScoredRows(labels=labels, candidate=good, incumbent=bad)
    worse = ScoredRows(labels=labels, candidate=bad, incumbent=good)
    forced = dataclasses.replace(WITH_BUDGET, force="the traffic is new")
    for settings, rows, day in ((WITH_BUDGET, scored, DAY), (WITH_BUDGET, worse, DAY), (forced, worse, DAY)):
        found = judge_within_budget(measure(rows, settings), settings, rows, ledger, day, "v7")
    looks = ledger.read().looks
    assert [look.verdict for look in looks] == ["PASS", "HOLD", "PASS"]
    assert [look.forced for look in looks] == [None, None, "the traffic is new"]
    assert [look.alpha for look in looks] == pytest.approx([NIGHT, 0.2 * NIGHT, 0.04 * NIGHT])
    spent, third = sum(look.alpha for look in looks), looks[2].alpha
    assert found.budget == ErrorBudget(
        budget=1.0, alpha=third, first_alpha=looks[0].alpha, day=str(DAY), look=3, spent=spent, looks=3
    )
    assert found.power.power == 1 - third
    assert found.budget.words == "3 looks in the year to 2026-02-02 spent 0.0027 of gate.budget=1"


def test_nothing_is_spent_where_ne_is_not_compared(ledger: LedgerFile) -> None:
    rng, truth, labels, _ = world()
    first = ScoredRows(labels=labels, candidate=noisy(rng, truth, 0.3))
    broken = dataclasses.replace(first, incumbent=np.full(len(labels), np.nan, np.float32))
    for scored in (first, broken):
        found = judge_within_budget(measure(scored, WITH_BUDGET), WITH_BUDGET, scored, ledger, DAY, "v1")
        assert found.budget is None
    assert not ledger.files.exists(ledger.path)


def test_a_candidate_that_is_judged_only_has_a_first_look_and_spends_nothing(ledger: LedgerFile) -> None:
    scored = rows_of_countries(4000)
    held = judge_within_budget(measure(scored, WITH_BUDGET), WITH_BUDGET, scored, ledger, DAY, "v1")
    later = DAY + timedelta(days=3)
    judge_within_budget(measure(scored, WITH_BUDGET), WITH_BUDGET, scored, ledger, later, "v2")
    before = ledger.read()
    found = judge_within_budget(
        measure(scored, WITH_BUDGET), WITH_BUDGET, scored, ledger, DAY, "replay", may_publish=False
    )
    assert found.checks == held.checks, "though the day and a later one were looked at"
    assert (found.budget.alpha, found.budget.look, found.budget.looks) == (pytest.approx(NIGHT), 1, 0)
    assert found.budget.unspent and "nothing is spent" in found.budget.words
    assert held.budget.unspent is None and "unspent" not in json.dumps(held.to_json())
    assert ledger.read() == before


def test_without_a_budget_the_record_says_nothing_of_one(ledger: LedgerFile) -> None:
    scored = rows_of_countries(4000)
    plain = judge(measure(scored, SETTINGS), SETTINGS, scored)
    assert judge_within_budget(measure(scored, SETTINGS), SETTINGS, scored, None, DAY, "v1") == plain
    assert "budget" not in json.dumps(plain.to_json())


def test_looks_of_the_last_year_count_as_spent_and_old_ones_are_dropped(ledger: LedgerFile) -> None:
    ledger.clock = TurnedClock()
    ledger.clock.turn(500 * 86_400)
    days = [DAY, DAY + timedelta(days=10), DAY + timedelta(days=370), DAY + timedelta(days=KEPT_DAYS + 1)]
    found = [ledger.spend(day, 1.0, "v")[1] for day in days]
    assert [each.looks for each in found] == [1, 2, 2, 2]
    assert found[-1].spent == pytest.approx((30 + 30) * NIGHT) and found[1].spent == pytest.approx(11 * NIGHT)
    assert [look.day for look in ledger.read().looks] == [str(day) for day in days[1:]]
    assert ledger.read().spent().spent == found[-1].spent


def test_a_day_to_come_makes_no_look_old_and_is_refused_before_one_is_taken(ledger: LedgerFile) -> None:
    ledger.clock = TurnedClock()  # 2026-01-05
    ledger.spend(date(2026, 1, 4), 1.0, "v1")
    ledger.spend(date(2206, 2, 7), 1.0, "v2")
    assert [look.candidate for look in ledger.read().looks] == ["v1", "v2"]
    for day in (date(1970, 1, 1), date(2026, 1, 6)):
        check_day(day, "--day ", ledger.clock)
    for day, words in ((date(2026, 1, 7), "2026-01-07 is in the future"), (date(1969, 12, 31), "is before 1970")):
        with pytest.raises(ConfigError, match=words) as caught:
            check_day(day, "--day ", ledger.clock)
        assert "--day 2026-01-05" in caught.value.hint


def test_a_look_that_could_not_be_read_again_is_not_written(ledger: LedgerFile) -> None:
    ledger.spend(DAY, 1.0, "v1")
    before = ledger.read()
    with pytest.raises(ArtifactError, match="looks.1.alpha is nan"):
        ledger.spend(DAY, float("nan"), "v2")
    assert ledger.read() == before


class Busy(LedgerFile):
    """A ledger that another process writes each time before this one does, for so many times from now."""

    others = 0

    def _parse(self, data: bytes | None) -> BudgetLedger:
        if self.others > 0:
            self.others -= 1
            self.files.write_bytes(self.path, (data or b'{"format": 1, "looks": []}') + b" ")
        return super()._parse(data)


def test_a_look_waits_for_other_writers_and_a_verdict_that_cannot_be_written_is_given_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Busy(Files(str(tmp_path)), "budget.json", TurnedClock())
    ledger.others = 20
    ledger.spend(DAY, 1.0, "v1")
    assert ledger.clock.monotonic() > 0
    ledger.others = TRIES
    with pytest.raises(LaunchError, match=f"{TRIES} times"):
        ledger.spend(DAY, 1.0, "v2")
    assert [look.candidate for look in ledger.read().looks] == ["v1"]

    class BusyLater(Busy):
        def record_verdict(self, look: Look, judged: GateRecord) -> None:
            self.others = TRIES
            super().record_verdict(look, judged)

    ledger, scored = BusyLater(ledger.files, ledger.path, TurnedClock()), rows_of_countries(4000)
    found = judge_within_budget(measure(scored, WITH_BUDGET), WITH_BUDGET, scored, ledger, DAY, "v3")
    assert found.verdict in ("PASS", "HOLD") and found.budget.look == 2
    assert f"the ledger does not have the verdict of v3, {found.verdict}" in caplog.text
    assert [look.verdict for look in ledger.read().looks] == [None, None]


def test_a_verdict_whose_look_is_lost_is_not_given(tmp_path: Path) -> None:
    class Replaced(LedgerFile):
        def record_verdict(self, look: Look, judged: GateRecord) -> None:
            self.files.write_bytes(self.path, b'{"format": 1, "looks": []}')
            super().record_verdict(look, judged)

    scored = rows_of_countries(4000)
    ledger = Replaced(Files(str(tmp_path)), "budget.json")
    with pytest.raises(ArtifactError, match="has lost the look at v1"):
        judge_within_budget(measure(scored, WITH_BUDGET), WITH_BUDGET, scored, ledger, DAY, "v1")


def test_a_large_budget_excuses_no_good_model_of_its_small_slices(ledger: LedgerFile) -> None:
    """Eleven slices whose errors are 3 %: by an alpha near one half they would all count as large enough."""
    ledger.spend(DAY - timedelta(days=30), 12.0, "v1")
    settings = dataclasses.replace(SETTINGS, budget=12.0, slices=["site"], slice_min_clicks=20, max_ne_increase=0.05)
    rng, truth, labels, _ = world(rows=6000)
    ours, theirs = (noisy(rng, truth, 0.7) for _ in range(2))
    sites = SliceColumn(codes=rng.integers(0, 11, 6000))
    scored = ScoredRows(labels=labels, candidate=ours, incumbent=theirs, slices={"site": sites})
    found = judge_within_budget(measure(scored, settings), settings, scored, ledger, DAY, "v2")
    assert (found.budget.alpha, found.budget.covered) == (MOST_ALPHA, ())
    assert found.verdict == "PASS", found.reasons
    surer = dataclasses.replace(settings, power=0.999)
    assert Level.of(found, surer).covering_power == 0.999


def test_writers_at_once_lose_no_look_and_share_the_days_share(tmp_path: Path) -> None:
    def spend(writer: int) -> str:
        own = LedgerFile(Files(str(tmp_path)), "m/budget.json")
        look, _ = own.spend(DAY, 1.0, f"v{writer}")
        own.record_verdict(look, gate_record())
        return look.id

    with ThreadPoolExecutor(4) as pool:
        mine = list(pool.map(spend, range(4)))
    looks = LedgerFile(Files(str(tmp_path)), "m/budget.json").read().looks
    assert sorted(look.id for look in looks) == sorted(mine) and {look.verdict for look in looks} == {"PASS"}
    assert [look.alpha for look in looks] == pytest.approx([NIGHT * 0.2**number for number in range(4)])


DAMAGED = {
    "no JSON": (b'{"format": 1, "lo', "it is not valid JSON"),
    "no looks": (b"{}", "looks is missing"),
    "another release": (b'{"format": 2, "looks": []}', "has format 2, expected 1"),
    "a day": (
        b'{"looks": [{"id": "a", "day": "2.2.26", "at": 0, "candidate": "c", "budget": 1, "alpha": 0.1}]}',
        "looks.0.day is '2.2.26', expected YYYY-MM-DD",
    ),
    "a day without a year before it": (
        b'{"looks": [{"id": "a", "day": "0001-01-05", "at": 0, "candidate": "c", "budget": 1, "alpha": 0.1}]}',
        "looks.0.day is '0001-01-05', expected YYYY-MM-DD from 1970-01-01 on",
    ),
    "a budget": (
        b'{"looks": [{"id": "a", "day": "2026-02-02", "at": 0, "candidate": "c", "budget": -1, "alpha": 0.1}]}',
        "looks.0.budget is -1",
    ),
    "an alpha": (
        b'{"looks": [{"id": "a", "day": "2026-02-02", "at": 0, "candidate": "c", "budget": 1, "alpha": NaN}]}',
        "looks.0.alpha is nan, expected a probability",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_ledger_is_an_error_and_stays_as_it_is(ledger: LedgerFile, case: str) -> None:
    data, words = DAMAGED[case]
    ledger.files.write_bytes(ledger.path, data)
    for attempt in (ledger.read, lambda: ledger.spend(DAY, 1.0, "v1")):
        with pytest.raises(ArtifactError, match=words) as caught:
            attempt()
        assert "models/m/budget.json" in caught.value.message and "restore it from a copy" in caught.value.hint
    assert Path(ledger.files.full(ledger.path)).read_bytes() == data


def test_a_look_that_somebody_took_out_of_the_ledger_gives_no_verdict(ledger: LedgerFile) -> None:
    look, _ = ledger.spend(DAY, 1.0, "v1")
    ledger.files.write_bytes(ledger.path, b'{"format": 1, "looks": []}')
    with pytest.raises(ArtifactError, match="has lost the look at v1"):
        ledger.record_verdict(look, gate_record())


def test_a_budget_needs_a_limit() -> None:
    with pytest.raises(ConfigError, match="gate.budget is 1, but gate.max_ne_increase is null"):
        check_values(GateConfig(budget=1.0, max_ne_increase=None), "gate")
