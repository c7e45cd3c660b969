"""How often the gate is wrong: candidates that are worse by a known share, and nights on which nothing is wrong."""

import dataclasses
from functools import cache

import numpy as np
import pytest

from pipeline.config import GateConfig
from pipeline.evaluation import ScoredRows, former_figures, judge, measure
from pipeline.evaluation.gate.power import Power

SETTINGS = GateConfig(replicates=100, blocks=500)
TRUTH, CENTRE, INCUMBENT = 1.3, -1.2, 0.3  # spread and mean of the true log odds; noise of the incumbent's
QUESTION = "NE against the incumbent"


def shrunk(seen: np.ndarray, noise: float) -> np.ndarray:
    """Log odds as calibrated as they can be where the truth is ``seen`` through ``noise``."""
    share = TRUTH**2 / (TRUTH**2 + noise**2)
    return (CENTRE + share * (seen - CENTRE)).astype(np.float32)


def expected_loss(noise: float) -> float:
    """Log loss of such a model over many rows, whatever labels are drawn."""
    rng = np.random.default_rng(0)
    truth = rng.normal(CENTRE, TRUTH, 400_000)
    x, p = shrunk(truth + rng.normal(0, noise, len(truth)), noise), 1 / (1 + np.exp(-truth))
    return float((np.logaddexp(0, x) - p * x).mean())


@cache
def noise_of(rise: float) -> float:
    """The noise of a model whose NE is ``rise`` above the incumbent's: by halving."""
    low, high, wanted = 0.0, 1.5, (1 + rise) * expected_loss(INCUMBENT)
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_loss(middle) < wanted else (low, middle)
    return low


def night(rng: np.random.Generator, rows: int, rise: float, shared: float) -> ScoredRows:
    """Rows scored by the incumbent and a candidate that is worse by ``rise``; ``shared``: of their noise, 0 to 1."""
    truth = rng.normal(CENTRE, TRUTH, rows)
    labels = (rng.random(rows) < 1 / (1 + np.exp(-truth))).astype(np.float32)
    common, own, other = (rng.normal(0, 1, rows) for _ in range(3))
    noise = noise_of(rise) if rise else INCUMBENT
    theirs, ours = (np.sqrt(shared) * common + np.sqrt(1 - shared) * each for each in (own, other))
    return ScoredRows(
        labels=labels,
        candidate=shrunk(truth + noise * ours, noise),
        incumbent=shrunk(truth + INCUMBENT * theirs, INCUMBENT),
    )


def answer(scored: ScoredRows, settings: GateConfig = SETTINGS) -> tuple[bool, str]:
    """Whether the question beside the incumbent passed, and its words."""
    (check,) = [each for each in judge(measure(scored, settings), settings).checks if each.name == QUESTION]
    return check.passed, check.words


def test_a_rise_is_sure_only_beyond_the_limit_and_beyond_chance() -> None:
    power = Power(1000, change=0.02, error=0.01, power=0.8)
    assert power.surely_above(0.019) and not power.surely_above(0.02)
    chance = dataclasses.replace(power, change=power.quantile * power.error)
    assert not chance.surely_above(0.0)
    assert power.bound == pytest.approx(0.02 + 0.84162 * 0.01, abs=1e-7)  # the normal quantile of 0.8
    assert power.resolved == pytest.approx(2 * 0.84162 * 0.01, abs=1e-7)


def test_rows_that_suffice_are_told_of_no_others() -> None:
    power = Power(1000, change=0.0, error=0.01, power=0.8)
    assert power.rows_for(power.resolved) == 1000
    assert power.rows_for(power.resolved / 2) == 4000
    assert power.rows_for(power.resolved / 1.001) == 1100  # up to two digits
    assert power.testable_limit(power.bound) is None and power.testable_limit(power.resolved) is None
    assert power.testable_limit(power.bound / 2) == 0.017  # 0.0168..., as it is typed
    assert [power.rows_for(limit) for limit in (0.0, -0.1, float("nan"))] == [None] * 3
    assert dataclasses.replace(power, error=float("nan")).rows_for(0.01) is None


def pass_rate(rows: int, rise: float, nights: int, shared: float = 0.5) -> float:
    rng = np.random.default_rng(rows)
    return sum(answer(night(rng, rows, rise, shared))[0] for _ in range(nights)) / nights


@pytest.mark.parametrize(
    ("rows", "rise"),
    [
        (1000, 0.02),
        (5000, 0.002),
        pytest.param(5000, 0.005, marks=pytest.mark.slow),
        pytest.param(20_000, 0.002, marks=pytest.mark.slow),
    ],
)
def test_a_model_that_is_worse_passes_one_night_in_ten_at_most(rows: int, rise: float) -> None:
    """At the limit itself it is one in ten; the bound here leaves room for three standard errors of 200 nights."""
    rate = pass_rate(rows, rise, 200)
    assert rate <= (0.1 if rise > SETTINGS.max_ne_increase else 0.16), rate


def test_an_equal_model_passes_where_the_rows_can_tell_and_the_rows_it_takes_are_told() -> None:
    """The rows that a verdict asks for are those with which nine of ten equal models pass."""
    rng = np.random.default_rng(7)
    few = night(rng, 4000, 0.0, 0.9)
    needed = judge(measure(few, SETTINGS), SETTINGS).power.rows_needed
    assert 10_000 < needed < 40_000
    passed = [answer(night(rng, needed, 0.0, 0.9))[0] for _ in range(60)]
    assert np.mean(passed) >= 0.75, np.mean(passed)  # 0.9, less the error of `needed` and of 60 nights


def test_a_model_that_is_surely_better_passes_on_few_rows() -> None:
    rng = np.random.default_rng(5)
    better = [night(rng, 3000, 0.05, 0.5) for _ in range(30)]
    better = [dataclasses.replace(each, candidate=each.incumbent, incumbent=each.candidate) for each in better]
    assert sum(answer(each)[0] for each in better) >= 27


def test_the_same_model_again_and_one_that_hardly_differs_pass_on_few_rows() -> None:
    """A monthly run on the same log: bit for bit the same, or another order of its sums."""
    rng = np.random.default_rng(6)
    one = night(rng, 1000, 0.0, 1.0)
    same = dataclasses.replace(one, candidate=one.incumbent)
    assert answer(same) == (True, answer(same)[1]) and "at most +0.00% with 90% confidence" in answer(same)[1]
    near = dataclasses.replace(one, candidate=one.incumbent + rng.normal(0, 1e-3, 1000).astype(np.float32))
    assert answer(near)[0]


def test_too_few_rows_are_held_in_words_that_say_how_many_it_takes() -> None:
    rng = np.random.default_rng(1)
    passed, words = answer(night(rng, 2000, 0.0, 0.5))
    assert not passed
    assert "too few rows to tell: a rise of up to +" in words and "the limit is +0.20%" in words
    assert "test rows, or a limit that 2,000 rows can resolve: 0.0" in words
    assert words.endswith("(gate.max_ne_increase)")
    limit = float(words.rpartition("can resolve: ")[2].partition(" ")[0])
    rng = np.random.default_rng(1)
    assert answer(night(rng, 2000, 0.0, 0.5), dataclasses.replace(SETTINGS, max_ne_increase=limit))[0]


def test_a_rise_beyond_doubt_is_not_called_too_few_rows() -> None:
    passed, words = answer(night(np.random.default_rng(2), 20_000, 0.05, 0.5))
    assert (
        not passed
        and "a rise with at least 90% confidence, beyond +0.20% (gate.max_ne_increase)" in words
        and "too few" not in words
    )


def test_more_power_holds_more() -> None:
    rng = np.random.default_rng(3)
    scored = night(rng, 20_000, 0.0, 0.97)
    found = {
        power: judge(measure(scored, SETTINGS), dataclasses.replace(SETTINGS, power=power)).power
        for power in (0.5, 0.8, 0.99)
    }
    assert found[0.5].bound < found[0.8].bound < found[0.99].bound
    assert found[0.5].rows_needed == 0 < found[0.8].rows_needed < found[0.99].rows_needed


def test_a_limit_of_nothing_asks_for_no_rows() -> None:
    strict = dataclasses.replace(SETTINGS, max_ne_increase=0.0)
    passed, words = answer(night(np.random.default_rng(2), 2000, 0.0, 0.5), strict)
    assert not passed and "possibly as much as +" in words and "too few" not in words


@pytest.mark.parametrize(
    ("rows", "clicks"),
    [
        (2000, 40),
        pytest.param(5000, 90, marks=pytest.mark.slow),
        pytest.param(8000, 140, marks=pytest.mark.slow),
    ],
)
def test_nights_of_few_clicks_with_nothing_wrong_are_not_held_for_their_labels(rows: int, clicks: int) -> None:
    """The incumbent is calibrated, on its own day and today: at most one night in a hundred is held for it."""
    rng, held, nights = np.random.default_rng(clicks), 0, 300
    settings = dataclasses.replace(SETTINGS, replicates=60, max_ne_increase=None, min_rows=10)
    for _ in range(nights):
        days = [_few_clicks(rng, rows, clicks / rows) for _ in range(2)]
        former = former_figures(judge(measure(ScoredRows(labels=days[0][0], candidate=days[0][1]), settings), settings))
        today = ScoredRows(labels=days[1][0], candidate=days[1][1], incumbent=days[1][1])
        found = judge(dataclasses.replace(measure(today, settings), former=former), settings)
        asked = ("gate.max_label_shift", "gate.max_ne_drift")
        held += any(each.setting in asked and not each.passed for each in found.checks)
    assert held <= 0.01 * nights + 2, held


def _few_clicks(rng: np.random.Generator, rows: int, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Labels and calibrated logits of a day on which one click in ``1 / rate`` rows is expected."""
    logits = rng.normal(np.log(rate) - 0.5, 1.0, rows)  # mean of exp(normal(m, 1)) is exp(m + 1/2)
    return (rng.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.float32), logits.astype(np.float32)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_clicks_that_are_lost_or_doubled_are_still_held(factor: float) -> None:
    rng = np.random.default_rng(8)
    (then, before), (labels, logits) = (_few_clicks(rng, 40_000, 0.02) for _ in range(2))
    former = former_figures(judge(measure(ScoredRows(labels=then, candidate=before), SETTINGS), SETTINGS))
    odds = 1 / (1 + np.exp(-logits))
    spoilt = (rng.random(len(labels)) < np.minimum(odds * factor, 1)).astype(np.float32)
    measured = measure(ScoredRows(labels=spoilt, candidate=logits, incumbent=logits), SETTINGS)
    found = judge(dataclasses.replace(measured, former=former), SETTINGS)
    reasons = [each.name for each in found.checks if not each.passed]
    assert "click rate" in reasons and "the labels are wrong" in " ".join(found.reasons)
