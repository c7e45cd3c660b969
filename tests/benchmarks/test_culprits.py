"""``make bench-culprits``: what each harm does to a log, and which culprits count as right."""

from datetime import date

import numpy as np
import pytest

from benchmarks.culprits import BAD_COUNTRY, CASES, COLUMNS, CULPRITS, Case, Night, is_named, spoil
from benchmarks.year import COUNTRY, HARMS, Day, World
from pipeline.records import BisectRecord
from pipeline.records.bisection import Culprit, Replay

DAY = date(2026, 1, 4)


def found(kind: str, *names: str, replays: int = 1) -> BisectRecord:
    """What ``bisect`` says."""
    tried = tuple(Replay(run=f"r{number}", kind=kind, names=names, seconds=1.0) for number in range(replays))
    culprit = Culprit(kind=kind, names=names, words="")
    return BisectRecord(run="r", model="m", incumbent="v", replays=tried, culprit=culprit)


@pytest.fixture(scope="module")
def log() -> Day:
    """A day's rows."""
    rng = np.random.default_rng(0)
    ids, _ = World(rng).draw_rows(2000)
    return Day(ids, rng.random(2000) < 0.2, 0)


def test_the_harms_are_those_of_the_year() -> None:
    assert sorted(CULPRITS) == sorted(HARMS) and len(CULPRITS) == 10
    assert all(sum(case.harm == harm for case in CASES) >= 2 for harm in CULPRITS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.words)
def test_a_harm_is_in_the_log_or_in_the_settings(log: Day, case: Case) -> None:
    spoilt = spoil(case.harm, log, case.severity, np.random.default_rng(1))
    same = np.array_equal(spoilt.ids, log.ids) and np.array_equal(spoilt.clicked, log.clicked)
    assert same == bool(case.settings)
    assert spoilt.ids.shape == (len(spoilt.clicked), len(COLUMNS))


def test_a_bad_slice_loses_its_clicks_and_no_other_does(log: Day) -> None:
    spoilt = spoil("bad slice", log, 1.0, np.random.default_rng(1))
    bad = log.ids[:, COUNTRY] == BAD_COUNTRY
    assert not spoilt.clicked[bad].any() and np.array_equal(spoilt.clicked[~bad], log.clicked[~bad])


@pytest.mark.parametrize(
    ("harm", "record", "named"),
    [
        ("feature dropped", found("features", "site"), True),
        ("feature dropped", found("features", "site", "hour"), False),
        ("stale ids", found("features", "user"), True),
        ("worse model", found("settings", "train.lr"), True),
        ("worse model", found("settings", "train.lr", "train.decay_ratio"), False),
        ("labels turned", found("labels", "2026-01-04"), True),
        ("labels turned", found("labels", "2026-01-04", "country=1"), False),
        ("bad slice", found("labels", "2026-01-04", "country=1"), True),
        ("bad slice", found("labels", "2026-01-04"), False),
        ("clock shifted", found("labels", "2026-01-04"), False),
        ("sampling changed", found("rows", "2026-01-04"), True),
        ("leak", BisectRecord(run="r", model="m", incumbent="v"), False),
    ],
)
def test_a_culprit_is_right_if_it_is_all_that_was_spoilt_and_no_more(
    harm: str, record: BisectRecord, named: bool
) -> None:
    assert is_named(harm, record, DAY) == named


def test_more_than_two_replays_are_too_many() -> None:
    case = Case("leak", "")
    nights = [Night(case, 6, found("features", "spare", replays=replays), True) for replays in (2, 3)]
    assert [night.right for night in nights] == [True, False]
