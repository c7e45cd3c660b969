"""Histories built from a log: of every row what its user did before, as brute force says."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.ingest import histories, spill
from pipeline.ingest.histories import HistoryBuilder
from pipeline.ingest.ids import hash_event_keys
from pipeline.ingest.schema import HistoryPlan

MINUTE = 60_000_000
START = datetime(2026, 1, 5, tzinfo=UTC)
# user, hours since START, item, whether it counts, the part of the log that has the row (None: of a day before)
ROW = st.tuples(
    st.sampled_from("abc"), st.integers(0, 60), st.sampled_from("xyz"), st.booleans(), st.sampled_from([None, 0, 1])
)


def plan_of(days: int | None, most: int, lag: float = 0.0) -> HistoryPlan:
    return HistoryPlan(
        name="history",
        by="user",
        of={"item": "item", "kind": "category"},
        time="time",
        days=days,
        most=most,
        lag_minutes=lag,
    )


def microseconds(hours: int) -> int:
    return int((START + timedelta(hours=hours)).timestamp()) * 1_000_000


def events_of(rows, lines) -> pl.DataFrame:
    key, check = hash_event_keys(pl.Series([user for user, *_ in rows], dtype=pl.String))
    return pl.DataFrame(
        {
            "key": key,
            "check": check,
            "time": pl.Series([microseconds(at) for _, at, *_ in rows], dtype=pl.Int64),
            "day": pl.Series([at // 24 for _, at, *_ in rows], dtype=pl.Int32),
            "counts": pl.Series([row[3] for row in rows], dtype=pl.Boolean),
            "value0": pl.Series([row[2] for row in rows], dtype=pl.String),
            "value1": pl.Series([row[2].upper() for row in rows], dtype=pl.String),
            "line": pl.Series(lines, dtype=pl.Int64),
        }
    )


def brute_force(rows, row, days: int | None, most: int, lag: float):
    user, at = row[0], row[1]
    before = [
        (when, item)
        for other, when, item, counts, _ in rows
        if counts and other == user and when < at and when + lag / 60 < at and (days is None or at - when <= 24 * days)
    ]
    return sorted(before)[-most:]


@pytest.mark.parametrize("examples", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_histories_are_what_brute_force_says(examples):
    drawn = given(
        st.lists(ROW, max_size=40),
        st.sampled_from([1, 2, None]),
        st.integers(1, 5),
        st.sampled_from([0.0, 90.0]),
        st.integers(1, 9),
    )
    settings(max_examples=examples, deadline=None)(drawn(assert_histories))()


def assert_histories(rows, days, most, lag, small):
    """Those of ``rows`` are what brute force says, with pieces and buffers of ``small`` events."""
    plan = plan_of(days, most, lag)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spill, "_WAITING_ROWS", small)
        patch.setattr(histories, "_ELEMENTS", small)
        patch.setattr(histories, "_WAITING_EVENTS", small)
        patch.setattr(histories, "_PIECE_BITS", 1)
        builder, lines = HistoryBuilder(plan), {}
        for part in (None, 0, 1):
            lines[part] = [number for number, row in enumerate(rows) if row[4] == part]
            events = events_of([rows[number] for number in lines[part]], lines[part])
            for start in range(0, events.height, small):
                builder.add(events.slice(start, small), part)
        whole = builder.build()
        for part in (0, 1):
            for start in range(0, len(lines[part]), small):
                some = lines[part][start : start + small]
                for number, own in zip(some, whole.of(part, np.array(some)), strict=True):
                    wanted = brute_force(rows, rows[number], days, most, lag)
                    got = [] if own is None else [(e["time"], e["item"], e["kind"]) for e in own.to_list()]
                    assert got == [(START + timedelta(hours=at), item, item.upper()) for at, item in wanted]
                    assert all(at < START + timedelta(hours=rows[number][1]) for at, *_ in got)


def at_the_same_time(plan, users, times, row_users, row_times):
    return windows_ranges(users, times, row_users, row_times + 1, plan)


def a_day_too_far(plan, users, times, row_users, row_times):
    return windows_ranges(users, times, row_users, row_times, replace(plan, days=plan.days + 1))


def one_event_too_few(plan, users, times, row_users, row_times):
    return windows_ranges(users, times, row_users, row_times, replace(plan, most=max(plan.most - 1, 1)))


def the_oldest(plan, users, times, row_users, row_times):
    own = windows_ranges(users, times, row_users, row_times, replace(plan, most=1000))
    return histories.EventRanges(own.first, np.minimum(own.last, own.first + plan.most))


def without_lag(plan, users, times, row_users, row_times):
    return windows_ranges(users, times, row_users, row_times, replace(plan, lag_minutes=0.0))


windows_ranges = histories.event_ranges


@pytest.mark.parametrize("wrong", [at_the_same_time, a_day_too_far, one_event_too_few, the_oldest, without_lag])
def test_brute_force_finds_histories_that_are_wrong(monkeypatch, wrong):
    """The comparison above fails where the ranges of events do."""
    chance = random.Random(5)
    rows = [
        (chance.choice("abc"), chance.randrange(61), chance.choice("xyz"), chance.random() < 0.7, chance.choice([0, 1]))
        for _ in range(60)
    ]
    assert_histories(rows, 1, 4, 90.0, 1000)
    monkeypatch.setattr(histories, "event_ranges", lambda *given: wrong(given[4], *given[:4]))
    with pytest.raises(AssertionError):
        assert_histories(rows, 1, 4, 90.0, 1000)


def test_a_user_who_is_alone_in_the_last_part_sees_no_one_else():
    rows = [("a", 1, "x", True, 0), ("b", 2, "y", True, 0), ("a", 3, "z", True, 0), ("a", 3, "x", True, 0)]
    builder = HistoryBuilder(plan_of(1, 10))
    builder.add(events_of(rows, [2, 3, 4, 9]), 0)
    whole = builder.build().of(0, np.array([2, 3, 4, 9, 11]))
    assert whole[0] is None and whole[1] is None and whole[4] is None  # no one's row, and those that came first
    for number in (2, 3):  # rows at the same time see none of each other
        assert [event["item"] for event in whole[number].to_list()] == ["x"]
