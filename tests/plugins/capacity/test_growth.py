"""Trends of tables: planted growth is projected within bounds, odd nights hardly count, bands hold their share."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.plugins.capacity.growth import History, project

NIGHTS = 30
MOST = 10**9


def history(rows) -> History:
    return History.of(range(1, len(rows) + 1), [round(each) for each in rows])


def noisy(rows, scatter: float, seed: int) -> list[float]:
    """``rows`` whose steps scatter by this share."""
    steps = np.diff(rows) * np.exp(scatter * np.random.default_rng(seed).normal(size=len(rows) - 1))
    return [rows[0], *(rows[0] + np.cumsum(steps))]


SHAPES = {
    "steady": lambda night: 1_000 + 500.0 * night,
    "slowing": lambda night: 2_000 * (night + 3.0) ** 0.7,
    "saturating": lambda night: 100 + 20_000 * (1 - np.exp(-(night + 1) / 12)),
    "rising": lambda night: 1_000 + 200 * night + 20.0 * night**2,
}


@pytest.mark.parametrize("kind", SHAPES)
def test_planted_growth_goes_on(kind: str):
    rows = SHAPES[kind](np.arange(20 + NIGHTS))
    seen = project(history(rows[:20]), MOST, NIGHTS, name=kind)
    assert seen.kind == kind
    gain = rows[-1] - rows[19]
    assert seen.rows[-1] - seen.rows[0] == pytest.approx(gain, rel=0.03)
    errors = []
    for seed in range(20):
        log = noisy(rows, 0.05, seed)
        seen = project(history(log[:20]), MOST, NIGHTS, name=str(seed))
        errors.append(abs(seen.rows[-1] - log[-1]) / (log[-1] - log[19]))
    assert np.median(errors) < 0.1 and (kind not in ("steady", "rising") or max(errors) < 0.25)


def test_the_band_holds_about_its_share_of_outcomes():
    rows, held = SHAPES["steady"](np.arange(14 + NIGHTS)), []
    for seed in range(60):
        log = noisy(rows, 0.1, seed)
        seen = project(history(log[:14]), MOST, NIGHTS, name=str(seed))
        held.append(seen.low[-1] <= log[-1] <= seen.high[-1])
        assert (seen.low <= seen.rows).all() and (seen.rows <= seen.high).all()
    assert 0.65 <= np.mean(held) <= 0.95


def test_one_odd_night_hardly_counts():
    rows = SHAPES["steady"](np.arange(15))
    rows[12:] += 50_000  # somebody imported a catalogue
    seen = project(history(rows), MOST, NIGHTS)
    assert seen.kind == "steady" and seen.rows[-1] - seen.rows[0] == pytest.approx(500 * NIGHTS, rel=0.05)


def test_growth_that_stopped_and_growth_once_a_week():
    rows = [*SHAPES["steady"](np.arange(8)), *[4_500.0] * 4]
    stopped = project(history(rows), MOST, NIGHTS)
    assert stopped.kind == "stopped" and stopped.high[-1] == 4_500
    weekly = np.cumsum([700 if night % 7 == 0 else 0 for night in range(27)]) + 100
    seen = project(history(weekly), MOST, NIGHTS)
    assert seen.kind == "steady" and seen.rows[-1] - seen.rows[0] == pytest.approx(100 * NIGHTS, rel=0.2)
    assert project(history([7.0] * 3), MOST, NIGHTS).kind == "stopped"


def test_the_limit_bounds_everything_and_dates_the_night():
    seen = project(history(SHAPES["steady"](np.arange(10))), 9_000, NIGHTS)
    night, earliest, latest = seen.full()
    assert seen.rows[-1] == seen.high[-1] == 9_000 and night == 7 and earliest <= 7 <= latest
    assert project(history([8_000.0, 8_500.0, 9_000.0]), 9_000, NIGHTS).kind == "full"
    later = project(history(SHAPES["steady"](np.arange(10))), 10**6, NIGHTS)
    assert later.full() == (None, None, None)


def test_days_of_logs_count_not_the_calendar():
    # A night of seven days at once adds seven steps.
    rows = [1_000, 1_500, 5_000, 5_500, 6_000]
    seen = project(History.of([1, 2, 9, 10, 11], rows), MOST, NIGHTS)
    assert seen.rows[-1] - seen.rows[0] == pytest.approx(500 * NIGHTS, rel=0.01)


def test_what_does_not_grow():
    assert project(history([10.0, 20.0]), MOST, NIGHTS).kind == "short"
    fixed = project(history([10.0, 20.0, 30.0]), MOST, NIGHTS, fixed=True)
    assert fixed.kind == "fixed" and fixed.rows[-1] == 30


def test_equal_histories_give_equal_bands():
    log = history(noisy(SHAPES["slowing"](np.arange(12)), 0.2, 1))
    one, two = project(log, MOST, NIGHTS, name="user"), project(log, MOST, NIGHTS, name="user")
    assert (one.low == two.low).all() and (one.high == two.high).all()
