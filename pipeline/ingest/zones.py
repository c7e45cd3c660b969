"""Days and hours of a time zone: where a day ends, which hours it lacks, and points in time from what a log writes."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import polars as pl

HOURS_PER_DAY, SECONDS_PER_HOUR, SECONDS_PER_DAY = 24, 3600, 86_400
# Since 1970: the years 1696 to 4707.
_USUAL_DAYS = -100_000, 1_000_000
_TEXT = r"^(\d{4}-\d\d-\d\d)[ T]([01]\d|2[0-3])(?::([0-5]\d))?(?::([0-5]\d|60))?"
# Directives of the hour.
_CLOCK = re.compile(r"%[-_0]?[HIRT]")
_OFFSET = r"[ T]\d\d.*?(Z|[+-]\d\d(?::?\d\d)?)$"


def end_of_day(day: date, zone: str | None) -> float:
    """Seconds since 1970 at which ``day`` ends in ``zone``; None: UTC."""
    following = day + timedelta(days=1)
    tzinfo = UTC if zone is None else ZoneInfo(zone)
    return datetime(following.year, following.month, following.day, tzinfo=tzinfo).timestamp()


def skipped_hours(day: date, zone: str | None) -> frozenset[int]:
    """The hours by the clock that ``day`` does not have, because clocks are put forward."""
    if zone is None:
        return frozenset()
    tzinfo = ZoneInfo(zone)
    skipped = set(range(HOURS_PER_DAY))
    for hour in range(HOURS_PER_DAY):
        for minute in (0, 59):
            # A time that clocks leave out comes back from UTC as another one.
            local = datetime(day.year, day.month, day.day, hour, minute, tzinfo=tzinfo)
            if local.astimezone(UTC).astimezone(tzinfo).replace(tzinfo=None) == local.replace(tzinfo=None):
                skipped.discard(hour)
    return frozenset(skipped)


def standard(values: pl.Series, text: pl.Series, form: str | None) -> pl.Series:
    """``text`` of ``values`` in a form that is read without ``form`` (data.time_format); null where it is not ``form``.

    Numbers, dates and timestamps are left as they are. Of a form with an offset, in UTC.
    """
    if form is None or values.dtype.is_numeric() or values.dtype.is_temporal():
        return text
    times = text.str.to_datetime(form, strict=False, time_unit="us")
    if isinstance(times.dtype, pl.Datetime) and times.dtype.time_zone is not None:
        return times.dt.strftime("%Y-%m-%d %H:%M:%SZ")
    return times.dt.strftime("%Y-%m-%d %H:%M:%S" if _CLOCK.search(form) else "%Y-%m-%d")


def seconds_of(number: pl.Expr) -> pl.Expr:
    """Seconds since 1970: 1e11 of them lie in the year 5138, so larger numbers are milli-, micro- or nanoseconds."""
    size = number.abs()
    return (
        pl.when(size > 1e17)
        .then(number / 1e9)
        .when(size > 1e14)
        .then(number / 1e6)
        .when(size > 1e11)
        .then(number / 1e3)
        .otherwise(number)
    )


def beginning_of(day: pl.Series, hour: pl.Series | None, zone: str | None) -> pl.Series:
    """When each ``hour`` of each ``day`` (days since 1970) begins, or the day, in seconds (Int64) since 1970.

    By the clock of the rows without ``zone``; as a point in time with one, whose hours are counted as in ``hours_of``.
    """
    if zone is None:
        seconds = day * SECONDS_PER_DAY
        return seconds if hour is None else seconds + hour * SECONDS_PER_HOUR
    if hour is None:
        return _midnights(day, zone)
    return _midnights(day + 1, zone) - (HOURS_PER_DAY - hour) * SECONDS_PER_HOUR


def _midnights(day: pl.Series, zone: str) -> pl.Series:
    # When each `day` begins in `zone`; numbers that are no days of usual calendars count as days of UTC.
    usual = day.is_between(*_USUAL_DAYS)
    times = day.set(~usual, 0).cast(pl.Int32).cast(pl.Date).cast(pl.Datetime("us"))
    seconds = _localised(times, zone).dt.timestamp("ms") // 1000
    return seconds.zip_with(usual & seconds.is_not_null(), day * SECONDS_PER_DAY)


def instants(values: pl.Series, text: pl.Series, zone: str, *, numbers: bool = True) -> pl.Series:
    """Each value as a point in time, Datetime in ``zone``; null for what has no time of the day.

    Numbers (with ``numbers``) count from 1970 in UTC, and a zone or an offset that is written counts. Any other time
    is one of ``zone``: the earlier one of two, and what its clocks leave out is an hour later.
    """
    if values.dtype.is_temporal():
        if values.dtype == pl.Date or not isinstance(values.dtype, pl.Datetime):
            return pl.Series(values.name, [None] * len(values), pl.Datetime("us", zone))
        times = values.cast(pl.Datetime("us", values.dtype.time_zone))
        return times.dt.convert_time_zone(zone) if values.dtype.time_zone is not None else _localised(times, zone)
    return _of_text(text, zone, numbers=numbers).alias(values.name)


def seconds_as_written(values: pl.Series, text: pl.Series) -> pl.Series:
    """Each value as whole seconds (Int64) since 1970 by the clock it shows, whatever offset follows; null: tells none.

    Of timestamps with a zone by UTC's clock, as their days are.
    """
    if isinstance(values.dtype, pl.Datetime):
        times = values if values.dtype.time_zone is None else values.dt.convert_time_zone("UTC")
    else:
        column = pl.col("text")
        times = pl.DataFrame({"text": text}).select(pl.coalesce(_counted(column), _clock(column)).alias("time"))["time"]
    return times.dt.timestamp("ms") // 1000


def _clock(text: pl.Expr) -> pl.Expr:
    # The date and the time of the day that `text` begins with, Datetime without a zone; null: there are none.
    seconds = []
    for group, size in ((2, SECONDS_PER_HOUR), (3, 60), (4, 1)):
        seconds.append(text.str.extract(_TEXT, group).cast(pl.Int64).fill_null(0) * size)
    date = text.str.extract(_TEXT, 1).str.to_date("%Y-%m-%d", strict=False)
    return date.cast(pl.Datetime("us")) + pl.duration(seconds=pl.sum_horizontal(seconds))


def _counted(text: pl.Expr) -> pl.Expr:
    # The time that a number counts from 1970, Datetime without a zone; null for other text, and for eight digits.
    number = pl.when(text.str.len_bytes() != 8).then(text.cast(pl.Float64, strict=False))
    return (seconds_of(number) * 1e6).cast(pl.Int64, strict=False).cast(pl.Datetime("us"))


def _of_text(text: pl.Series, zone: str, *, numbers: bool) -> pl.Series:
    frame, written = pl.DataFrame({"text": text}), _clock(pl.col("text"))
    offset = pl.col("text").str.extract(_OFFSET)
    minutes = offset.str.slice(1, 2).cast(pl.Int64, strict=False) * 60
    minutes += offset.str.slice(3).str.strip_chars(":").cast(pl.Int64, strict=False).fill_null(0)
    east = pl.when(offset == "Z").then(0).when(offset.str.starts_with("-")).then(-minutes).otherwise(minutes)
    counted = [_counted(pl.col("text"))] if numbers else []
    exact = pl.coalesce([*counted, written - pl.duration(minutes=east)]).dt.replace_time_zone("UTC")
    times = frame.select(exact=exact.dt.convert_time_zone(zone), written=written)
    return times["exact"].zip_with(times["exact"].is_not_null(), _localised(times["written"], zone))


def _localised(times: pl.Series, zone: str) -> pl.Series:
    localised = times.dt.replace_time_zone(zone, ambiguous="earliest", non_existent="null")
    if localised.null_count() == times.null_count():
        return localised
    # What clocks leave out is an hour later.
    later = times.dt.offset_by("1h").dt.replace_time_zone(zone, ambiguous="earliest", non_existent="null")
    return localised.zip_with(localised.is_not_null(), later)


def hours_of(times: pl.Series, zone: str) -> pl.Series:
    """The hour (Int32) of each of ``times`` in ``zone``, counted back from 23, the last one of its day.

    So a day of 25 hours begins with -1, and one of 23 hours with 1.
    """
    days = times.dt.date()
    ends = {day: int(end_of_day(day, zone)) for day in days.drop_nulls().unique().to_list()}
    end = days.replace_strict(list(ends), list(ends.values()), default=None, return_dtype=pl.Int64)
    left = end * 1_000_000 - times.dt.timestamp("us")
    whole = SECONDS_PER_HOUR * 1_000_000
    return (HOURS_PER_DAY - (left + whole - 1) // whole).cast(pl.Int32)
