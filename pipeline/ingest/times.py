"""The day, the hour and the time of a row, read from numbers, dates, timestamps or text; zones; a split by time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np
import polars as pl

from pipeline.ingest.schema import DAY, SPLIT_TIME
from pipeline.ingest.values import RejectedRows, nulls, shown

HOURS_PER_DAY, SECONDS_PER_HOUR, SECONDS_PER_DAY = 24, 3600, 86_400
# Days since 1970: the years 1696 to 4707.
_USUAL_DAYS = -100_000, 1_000_000
_TEXT = r"^(\d{4}-\d\d-\d\d)[ T]([01]\d|2[0-3])(?::([0-5]\d))?(?::([0-5]\d|60))?"
# Directives that show an hour.
_CLOCK = re.compile(r"%[-_0]?[HIRT]")
_OFFSET = r"[ T]\d\d.*?(Z|[+-]\d\d(?::?\d\d)?)$"


def end_of_day(day: date, zone: str | None) -> float:
    """Return the seconds since 1970 at which ``day`` ends in ``zone``; None: UTC."""
    following = day + timedelta(days=1)
    tzinfo = UTC if zone is None else ZoneInfo(zone)
    return datetime(following.year, following.month, following.day, tzinfo=tzinfo).timestamp()


def skipped_hours(day: date, zone: str | None) -> frozenset[int]:
    """Return the hours by the clock that ``day`` does not have, because clocks are put forward."""
    if zone is None:
        return frozenset()
    tzinfo = ZoneInfo(zone)
    skipped = set(range(HOURS_PER_DAY))
    for hour in range(HOURS_PER_DAY):
        for minute in (0, 59):
            # A time that clocks skip comes back from UTC as another one.
            local = datetime(day.year, day.month, day.day, hour, minute, tzinfo=tzinfo)
            if local.astimezone(UTC).astimezone(tzinfo).replace(tzinfo=None) == local.replace(tzinfo=None):
                skipped.discard(hour)
    return frozenset(skipped)


def standard(values: pl.Series, text: pl.Series, form: str | None) -> pl.Series:
    """Rewrite ``text`` of ``values`` from ``form`` (data.time_format) to a form that is read without it; else null.

    Numbers, dates and timestamps stay as they are. Times of a form with an offset are in UTC.
    """
    if form is None or values.dtype.is_numeric() or values.dtype.is_temporal():
        return text
    times = text.str.to_datetime(form, strict=False, time_unit="us")
    if isinstance(times.dtype, pl.Datetime) and times.dtype.time_zone is not None:
        return times.dt.strftime("%Y-%m-%d %H:%M:%SZ")
    # If the form has no hour, write none, because 00:00:00 would be read as an hour.
    standard_form = "%Y-%m-%d"
    if _CLOCK.search(form):
        standard_form += " %H:%M:%S"
    return times.dt.strftime(standard_form)


def seconds_of(number: pl.Expr) -> pl.Expr:
    """Return seconds since 1970: 1e11 of them is the year 5138, so larger numbers are milli-, micro- or nanoseconds."""
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
    """Return when each ``hour`` of each ``day`` (days since 1970) begins, or the day, in seconds (Int64) since 1970.

    Without ``zone`` it is by the clock of the rows. With one it is a point in time, with hours as in ``hours_of``.
    """
    if zone is None:
        seconds = day * SECONDS_PER_DAY
        if hour is not None:
            seconds += hour * SECONDS_PER_HOUR
        return seconds
    if hour is None:
        return _midnights(day, zone)
    # Count back from the end of the day, as in `hours_of`: a day of 25 hours begins with hour -1.
    return _midnights(day + 1, zone) - (HOURS_PER_DAY - hour) * SECONDS_PER_HOUR


def _midnights(day: pl.Series, zone: str) -> pl.Series:
    # Returns when each `day` begins in `zone`; numbers that are no days of usual calendars count as days of UTC.
    usual = day.is_between(*_USUAL_DAYS)
    times = day.set(~usual, 0).cast(pl.Int32).cast(pl.Date).cast(pl.Datetime("us"))
    seconds = _localised(times, zone).dt.timestamp("ms") // 1000
    return seconds.zip_with(usual & seconds.is_not_null(), day * SECONDS_PER_DAY)


def instants(values: pl.Series, text: pl.Series, zone: str, *, numbers: bool = True) -> pl.Series:
    """Return each value as a point in time, Datetime in ``zone``; null if it has no time of the day.

    Numbers (with ``numbers``) count from 1970 in UTC, and a zone or an offset that is written counts. Any other time is
    in ``zone``: an ambiguous one is the earlier of two, and one that clocks skip is an hour later.
    """
    if not values.dtype.is_temporal():
        return _of_text(text, zone, numbers=numbers).alias(values.name)
    if not isinstance(values.dtype, pl.Datetime):
        return pl.Series(values.name, [None] * len(values), pl.Datetime("us", zone))
    times = values.cast(pl.Datetime("us", values.dtype.time_zone))
    if values.dtype.time_zone is None:
        return _localised(times, zone)
    return times.dt.convert_time_zone(zone)


def seconds_as_written(values: pl.Series, text: pl.Series) -> pl.Series:
    """Return each value as whole seconds (Int64) since 1970 by the clock it shows, whatever offset follows; else null.

    Timestamps with a zone are read by UTC's clock, as their days are.
    """
    times = values
    if not isinstance(values.dtype, pl.Datetime):
        time = pl.coalesce(_counted(pl.col("text")), _clock(pl.col("text")))
        times = pl.DataFrame({"text": text}).select(time=time)["time"]
    elif values.dtype.time_zone is not None:
        times = values.dt.convert_time_zone("UTC")
    return times.dt.timestamp("ms") // 1000


def _clock(text: pl.Expr) -> pl.Expr:
    # Returns date and time of the day that `text` begins with, Datetime without a zone; null if there are none.
    seconds = []
    for group, size in ((2, SECONDS_PER_HOUR), (3, 60), (4, 1)):
        seconds.append(text.str.extract(_TEXT, group).cast(pl.Int64).fill_null(0) * size)
    date = text.str.extract(_TEXT, 1).str.to_date("%Y-%m-%d", strict=False)
    return date.cast(pl.Datetime("us")) + pl.duration(seconds=pl.sum_horizontal(seconds))


def _counted(text: pl.Expr) -> pl.Expr:
    # Returns the time that a number counts from 1970, Datetime without a zone; null for other text, and for eight
    # digits.
    number = pl.when(text.str.len_bytes() != 8).then(text.cast(pl.Float64, strict=False))
    return (seconds_of(number) * 1e6).cast(pl.Int64, strict=False).cast(pl.Datetime("us"))


def _of_text(text: pl.Series, zone: str, *, numbers: bool) -> pl.Series:
    frame, written = pl.DataFrame({"text": text}), _clock(pl.col("text"))
    offset = pl.col("text").str.extract(_OFFSET)
    minutes = offset.str.slice(1, 2).cast(pl.Int64, strict=False) * 60
    minutes += offset.str.slice(3).str.strip_chars(":").cast(pl.Int64, strict=False).fill_null(0)
    east = pl.when(offset == "Z").then(0).when(offset.str.starts_with("-")).then(-minutes).otherwise(minutes)
    # `east` is null where no offset is written, so `exact` is, too.
    exact = written - pl.duration(minutes=east)
    if numbers:
        exact = pl.coalesce(_counted(pl.col("text")), exact)
    exact = exact.dt.replace_time_zone("UTC")
    times = frame.select(exact=exact.dt.convert_time_zone(zone), written=written)
    return times["exact"].zip_with(times["exact"].is_not_null(), _localised(times["written"], zone))


def _localised(times: pl.Series, zone: str) -> pl.Series:
    localised = times.dt.replace_time_zone(zone, ambiguous="earliest", non_existent="null")
    if localised.null_count() == times.null_count():
        return localised
    # A time that clocks skip is an hour later.
    later = times.dt.offset_by("1h").dt.replace_time_zone(zone, ambiguous="earliest", non_existent="null")
    return localised.zip_with(localised.is_not_null(), later)


def hours_of(times: pl.Series, zone: str) -> pl.Series:
    """Return the hour (Int32) of each of ``times`` in ``zone``, counted back from 23, the last one of its day.

    So a day of 25 hours begins with -1, and one of 23 hours with 1.
    """
    # Python computes the end of a day by the rules of the zone, so do that once for each day and not for each row.
    days = times.dt.date()
    distinct = days.drop_nulls().unique().to_list()
    ends = [int(end_of_day(day, zone)) for day in distinct]
    end = days.replace_strict(distinct, ends, default=None, return_dtype=pl.Int64)
    left = end * 1_000_000 - times.dt.timestamp("us")
    whole = SECONDS_PER_HOUR * 1_000_000
    return (HOURS_PER_DAY - (left + whole - 1) // whole).cast(pl.Int32)


# Column of typed rows: 23 is the last hour of a day. The dataset calls it SPLIT_HOUR.
HOUR = "hour"
_HOUR_OF_CLOCK = r"^\d{4}-\d\d-\d\d[ T]([01]\d|2[0-3])(?::|$)"


def packed_date(text: pl.Expr) -> pl.Expr:
    """Return the date of eight digits, YYYYMMDD; null for any other text."""
    return pl.when(text.str.len_bytes() == 8).then(text).str.to_date("%Y%m%d", strict=False)


def hour_of(
    values: pl.Series, text: pl.Series | None, rejected: RejectedRows, zone: str | None = None, form: str | None = None
) -> pl.Series:
    """Return the hour (Int32) of ``values``: timestamps, numbers, or ``text`` in ``form`` or YYYY-MM-DD HH:MM:SS.

    It is the hour that is written, whatever offset follows, as with the row's day; with ``zone``, the hour there.
    Values without an hour (a date alone) are rejected.
    """
    column = values.name
    if text is None:  # the column holds lists
        text = nulls(pl.String, len(values))
    written, text = text, standard(values, text, form)
    if zone is not None:
        hour = hours_of(instants(values, text, zone), zone)
    elif values.dtype == pl.Duration:
        hour = nulls(pl.Int32, len(values))
    elif values.dtype.is_temporal() and values.dtype != pl.Date:
        if isinstance(values.dtype, pl.Datetime) and values.dtype.time_zone is not None:
            # The hour is UTC's, as the day is.
            values = values.dt.convert_time_zone("UTC")
        hour = values.dt.hour()
    else:
        frame = pl.DataFrame({"number": text.cast(pl.Float64, strict=False), "text": text})
        number = (seconds_of(pl.col("number")) / SECONDS_PER_HOUR).floor().cast(pl.Int64, strict=False) % HOURS_PER_DAY
        # Eight digits that are a date are not a number of seconds.
        number = pl.when(packed_date(pl.col("text")).is_null()).then(number)
        of_clock = pl.col("text").str.extract(_HOUR_OF_CLOCK).cast(pl.Int64)
        hour = frame.select(hour=number.fill_null(of_clock))["hour"]
    hour = hour.cast(pl.Int32).alias(HOUR)
    expected = form or "seconds since 1970 or YYYY-MM-DD HH:MM:SS"
    rejected.add(
        hour.is_null().to_numpy(),
        f"{column} tells no hour",
        lambda i: f"{column} is {shown(written[i])}, expected {expected}",
        column,
    )
    return hour.fill_null(0)


def whole_hour_of(values: pl.Series, text: pl.Series | None, rejected: RejectedRows) -> pl.Series:
    """Return the hour (Int32) that each of ``values`` is, 0 to 23; all others are rejected."""
    written = nulls(pl.String, len(values)) if text is None else text
    number = written.cast(pl.Float64, strict=False)
    wrong = ~((number >= 0) & (number < HOURS_PER_DAY) & (number == number.floor())).fill_null(False)
    rejected.add(
        wrong.to_numpy(),
        f"{values.name} is no hour",
        lambda i: f"{values.name} is {shown(written[i])}, expected an hour, 0 to 23",
        values.name,
    )
    return number.set(wrong, 0.0).cast(pl.Int32).alias(HOUR)


def seconds_of_rows(
    values: pl.Series, text: pl.Series | None, zone: str | None = None, form: str | None = None
) -> pl.Series:
    """Return the time (Int64, whole seconds since 1970) of each of ``values``; null if it has no time of the day.

    It is the time that is written, whatever offset follows, as with the row's day; with ``zone`` the point in time.
    """
    if text is None:  # the column holds lists
        text = nulls(pl.String, len(values))
    text = standard(values, text, form)
    if zone is not None:
        return instants(values, text, zone).dt.timestamp("ms") // 1000
    return seconds_as_written(values, text)


@dataclass(frozen=True)
class TimeSplit:
    """Train rows are those before ``train_until``, test rows those from ``test_from`` on, in seconds since 1970.

    Rows between the two are left out.
    """

    train_until: int
    test_from: int

    def is_test(self, frame: pl.DataFrame) -> pl.Series:
        """Return which of the typed rows are test rows."""
        return frame[SPLIT_TIME] >= self.test_from

    def is_left_out(self, frame: pl.DataFrame) -> pl.Series | None:
        """Return which of the typed rows lie in the gap; None if there is no gap."""
        if self.train_until == self.test_from:
            return None
        return (frame[SPLIT_TIME] >= self.train_until) & (frame[SPLIT_TIME] < self.test_from)

    def to_json(self) -> dict[str, str]:
        """Return the two times as text: by the clock of the rows, or of UTC if ``data.time_zone`` is set."""
        return {"train_until": time_text(self.train_until), "test_from": time_text(self.test_from)}


def time_text(seconds: int) -> str:
    """Format a time in seconds since 1970 as YYYY-MM-DD HH:MM:SS, whatever its year."""
    return str(np.datetime64(seconds, "s")).replace("T", " ")


def day_of(
    values: pl.Series,
    text: pl.Series | None,
    *,
    timestamp: bool,
    rejected: RejectedRows,
    zone: str | None = None,
    form: str | None = None,
) -> pl.Series:
    """Return the day (Int32) of each of ``values``: the number, or days since 1970-01-01 of dates and timestamps.

    ``text``: the values as text, None if they are lists. ``timestamp``: numbers are timestamps, not days. ``zone``:
    whose days are meant; None: UTC's for numbers, and for text what is written. ``form``: ``data.time_format``.
    """
    column = values.name
    if text is None:
        text = nulls(pl.String, len(values))
    written, text = text, standard(values, text, form)
    if values.dtype == pl.Date or isinstance(values.dtype, pl.Datetime):
        day = values.cast(pl.Date, strict=False).cast(pl.Int32)
    elif values.dtype.is_temporal():
        # A time of the day, or a duration, tells no day.
        day = nulls(pl.Int32, len(values))
    else:
        frame = pl.DataFrame({"number": text.cast(pl.Float64, strict=False), "text": text})
        number = pl.col("number")
        if timestamp:
            number = seconds_of(number) / SECONDS_PER_DAY
        number = number.floor().cast(pl.Int32, strict=False)
        date = pl.col("text").str.slice(0, 10).str.to_date("%Y-%m-%d", strict=False).cast(pl.Int32)
        # Eight digits that are a date (YYYYMMDD) are taken as one, although they are a number, too.
        packed = packed_date(pl.col("text")).cast(pl.Int32)
        day = frame.select(day=packed.fill_null(number).fill_null(date))["day"]
    if zone is not None:
        # A value without a time of the day, such as a date, is the same day in every zone.
        day = instants(values, text, zone, numbers=timestamp).dt.date().cast(pl.Int32).fill_null(day)
    expected = form or "a number or YYYY-MM-DD"
    rejected.add(
        day.is_null().to_numpy(),
        f"{column} is no day",
        lambda i: f"{column} is {shown(written[i])}, expected {expected}",
        column,
    )
    return day.fill_null(0).alias(DAY)
