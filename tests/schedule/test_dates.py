"""Dates as they are typed, and the mistakes one makes there."""

from datetime import UTC, date, datetime

import pytest

from pipeline.core.errors import ConfigError
from pipeline.schedule.night_config import parse_date, span, split_arguments

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "zone", "day"),
    [
        ("2026-01-31", "Etc/UTC", "2026-01-31"),
        ("yesterday", "Etc/UTC", "2026-02-28"),
        ("today", "Etc/UTC", "2026-03-01"),
        ("today", "Pacific/Kiritimati", "2026-03-02"),  # 14 hours ahead
        ("yesterday", "Pacific/Kiritimati", "2026-03-01"),
    ],
)
def test_a_date_is_a_day_or_a_word_in_a_time_zone(text: str, zone: str, day: str) -> None:
    assert parse_date("date", text, zone, NOON) == date.fromisoformat(day)


@pytest.mark.parametrize("text", ["tomorrow", "2026-02-30", "20260131", "2026-W05-1", ""])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"date is '.*', expected YYYY-MM-DD, yesterday or today") as error:
        parse_date("date", text, "Etc/UTC")
    assert error.value.hint == "date=yesterday"


def test_the_arguments_of_the_command_are_taken_from_among_the_overrides() -> None:
    given, rest = split_arguments(["store=s", "date=today", "train.lr=0.1"], ("date",))
    assert given == {"date": "today"}
    assert rest == ["store=s", "train.lr=0.1"]
    with pytest.raises(ConfigError, match="date is given twice: a and b"):
        split_arguments(["date=a", "date=b"], ("date",))
    with pytest.raises(ConfigError, match="data.day=2026-01-01 is given, but a night takes it from its date") as error:
        split_arguments(["data.day=2026-01-01"], ("date",))
    assert error.value.hint == "date=2026-01-01"


def test_a_span_rises() -> None:
    assert [str(day) for day in span(date(2026, 2, 27), date(2026, 3, 1))] == ["2026-02-27", "2026-02-28", "2026-03-01"]
    with pytest.raises(ConfigError, match="from=2026-03-01 is after to=2026-02-27") as error:
        span(date(2026, 3, 1), date(2026, 2, 27))
    assert error.value.hint == "from=2026-02-27 to=2026-03-01"
