"""The dates of nights, as you type them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date, datetime, timedelta
from zoneinfo import ZoneInfo

from pipeline.config import Config
from pipeline.errors import ConfigError

ANY_DAY = date(2000, 1, 1)  # to compose a configuration before its day is known: a path may hold {day}
WORDS = {"today": 0, "yesterday": 1}
# Overrides that a night sets itself: why, and what to type instead.
DECIDED = {
    "data.day": ("a night takes it from its date", "{date}={value}"),
    "run": ("a night's run is called <model>-<date>", "publish.model={value}"),
    "stages": ("a night runs all stages", "nightjar run data.day=<date> stages={value}"),
    "data.mapping_from": ("a night continues the serving version's mappings", "nightjar run data.mapping_from={value}"),
    "plan.former": ("a night reuses the serving version's plan", "nightly.reuse_plan=true"),
}


def split_arguments(arguments: Sequence[str], names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split ``arguments`` into {name: value} for the ``names``, and the others.

    Raises ConfigError for a name given twice, and for an override that a night sets itself.
    """
    given: dict[str, str] = {}
    rest = []
    for text in arguments:
        name, sign, value = text.partition("=")
        if name.lstrip("+") in DECIDED:
            why, instead = DECIDED[name.lstrip("+")]
            raise ConfigError(f"{text} is given, but {why}", hint=instead.format(date=names[0], value=value))
        if not sign or name not in names:
            rest.append(text)
        elif name in given:
            raise ConfigError(f"{name} is given twice: {given[name]} and {value}", hint=f"{name}={value}")
        else:
            given[name] = value
    return given, rest


def gap_of(times: Sequence[tuple[int, int]], zone: str, first: date) -> str:
    """The first local time of ``times``, (hour, minute), that a day within a year from ``first`` on does not have.

    In words; "" where there is none. Clocks that are put forward leave out an hour.
    """
    for day in (first + timedelta(days=i) for i in range(366)):
        for hour, minute in times:
            local = datetime(day.year, day.month, day.day, hour, minute)
            there = local.replace(tzinfo=ZoneInfo(zone)).astimezone(ZoneInfo("UTC")).astimezone(ZoneInfo(zone))
            if there.replace(tzinfo=None) != local:
                return f"{day} has no {hour:02d}:{minute:02d} in {zone}"
    return ""


def night_zone(config: Config) -> str:
    """The time zone of date=yesterday: of the nights, else of the logs' days, else of the schedule."""
    return config.nightly.time_zone or config.data.time_zone or config.schedule.time_zone


def parse_date(name: str, text: str, zone: str, now: datetime | None = None) -> date:
    """The day that ``name=text`` means: YYYY-MM-DD, or today or yesterday in time zone ``zone``; else ConfigError.

    ``now``: a time with its zone; by default the present.
    """
    if text in WORDS:
        here = now.astimezone(ZoneInfo(zone)) if now is not None else datetime.now(ZoneInfo(zone))
        return here.date() - timedelta(days=WORDS[text])
    try:
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", text):
            raise ValueError
        return date.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{name} is {text!r}, expected YYYY-MM-DD, yesterday or today", hint=f"{name}=yesterday"
        ) from None


def span(first: date, last: date) -> list[date]:
    """The days from ``first`` to ``last``, both included; ConfigError if ``last`` is earlier."""
    if last < first:
        raise ConfigError(f"from={first} is after to={last}, expected an earlier day", hint=f"from={last} to={first}")
    return [first + timedelta(days=i) for i in range((last - first).days + 1)]
