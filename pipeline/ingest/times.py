"""The day, the hour and the time of a row, read from numbers, dates, timestamps or text; a split by time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from pipeline.ingest.rejects import RejectedRows, shown
from pipeline.ingest.schema import DAY, SPLIT_TIME
from pipeline.ingest.values import nulls
from pipeline.ingest.zones import (
    HOURS_PER_DAY,
    SECONDS_PER_DAY,
    SECONDS_PER_HOUR,
    hours_of,
    instants,
    seconds_as_written,
    seconds_of,
    standard,
)

# Column of typed rows, 23 in the last hour of a day; in the dataset SPLIT_HOUR.
HOUR = "hour"
_CLOCK = r"^\d{4}-\d\d-\d\d[ T]([01]\d|2[0-3])(?::|$)"


def packed_date(text: pl.Expr) -> pl.Expr:
    """The date that eight digits, YYYYMMDD, are; null for any other text."""
    return pl.when(text.str.len_bytes() == 8).then(text).str.to_date("%Y%m%d", strict=False)


def hour_of(
    values: pl.Series, text: pl.Series | None, rejected: RejectedRows, zone: str | None = None, form: str | None = None
) -> pl.Series:
    """The hour (Int32) of each of ``values``: of timestamps, numbers, or ``text`` as YYYY-MM-DD HH:MM:SS, or ``form``.

    As it is written, whatever offset follows, as the row's day is; of ``zone``, where one is given. What tells no hour
    (a date alone) is rejected.
    """
    column = values.name
    if text is None:  # of a list
        text = nulls(pl.String, len(values))
    written, text = text, standard(values, text, form)
    if zone is not None:
        hour = hours_of(instants(values, text, zone), zone)
    elif values.dtype.is_temporal() and values.dtype != pl.Date:
        zoned = isinstance(values.dtype, pl.Datetime) and values.dtype.time_zone is not None
        # UTC's hour, as the day is UTC's.
        hour = (values.dt.convert_time_zone("UTC") if zoned else values).dt.hour()
    else:
        frame = pl.DataFrame({"number": text.cast(pl.Float64, strict=False), "text": text})
        number = (seconds_of(pl.col("number")) / SECONDS_PER_HOUR).floor().cast(pl.Int64, strict=False) % HOURS_PER_DAY
        number = pl.when(packed_date(pl.col("text")).is_null()).then(number)
        hour = frame.select(number.fill_null(pl.col("text").str.extract(_CLOCK).cast(pl.Int64)).alias("hour"))["hour"]
    hour = hour.cast(pl.Int32).alias(HOUR)
    rejected.add(
        hour.is_null().to_numpy(),
        f"{column} tells no hour",
        lambda i: f"{column} is {shown(written[i])}, expected {form or 'seconds since 1970 or YYYY-MM-DD HH:MM:SS'}",
        column,
    )
    return hour.fill_null(0)


def whole_hour_of(values: pl.Series, text: pl.Series | None, rejected: RejectedRows) -> pl.Series:
    """The hour (Int32) that each of ``values`` is, 0 to 23; whatever else is rejected."""
    number = nulls(pl.Float64, len(values)) if text is None else text.cast(pl.Float64, strict=False)
    wrong = ~((number >= 0) & (number < HOURS_PER_DAY) & (number == number.floor())).fill_null(False)
    rejected.add(
        wrong.to_numpy(),
        f"{values.name} is no hour",
        lambda i: f"{values.name} is {shown(text[i] if text is not None else None)}, expected an hour, 0 to 23",
        values.name,
    )
    return number.set(wrong, 0.0).cast(pl.Int32).alias(HOUR)


def seconds_of_rows(
    values: pl.Series, text: pl.Series | None, zone: str | None = None, form: str | None = None
) -> pl.Series:
    """The time (Int64, whole seconds since 1970) of each of ``values``; null for what tells no time of the day.

    As it is written, whatever offset follows, as the row's day is; with ``zone`` the point in time that is meant.
    """
    if text is None:  # of a list
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
        """Which of the typed rows are test rows."""
        return frame[SPLIT_TIME] >= self.test_from

    def is_left_out(self, frame: pl.DataFrame) -> pl.Series | None:
        """Which of the typed rows lie in the gap; None where there is none."""
        if self.train_until == self.test_from:
            return None
        return (frame[SPLIT_TIME] >= self.train_until) & (frame[SPLIT_TIME] < self.test_from)

    def to_json(self) -> dict[str, str]:
        """The two times as text: by the clock of the rows, or of UTC where ``data.time_zone`` is set."""
        return {"train_until": time_text(self.train_until), "test_from": time_text(self.test_from)}


def time_text(seconds: int) -> str:
    """A time in seconds since 1970 as YYYY-MM-DD HH:MM:SS, whatever its year."""
    return str(np.datetime64(seconds, "s")).replace("T", " ")


def test_hours_from(test_hours: int) -> int:
    """The hour of the day from which rows are test rows, where the last ``test_hours`` are."""
    return HOURS_PER_DAY - test_hours


def day_of(
    values: pl.Series,
    text: pl.Series | None,
    *,
    timestamp: bool,
    rejected: RejectedRows,
    zone: str | None = None,
    form: str | None = None,
) -> pl.Series:
    """The day (Int32) of each of ``values``: the number, or days since 1970-01-01 of dates and timestamps.

    ``text``: the values as text, None where they are lists. ``timestamp``: numbers are timestamps, not days. ``zone``:
    whose days are meant; None: UTC's of numbers, and of text what is written. ``form``: ``data.time_format``.
    """
    column = values.name
    if text is None:
        text = nulls(pl.String, len(values))
    written, text = text, standard(values, text, form)
    if values.dtype.is_temporal():
        day = values.cast(pl.Date, strict=False).cast(pl.Int32)
    else:
        number = text.cast(pl.Float64, strict=False)
        frame = pl.DataFrame({"number": number, "text": text})
        whole = seconds_of(pl.col("number")) / SECONDS_PER_DAY if timestamp else pl.col("number")
        date = pl.col("text").str.slice(0, 10).str.to_date("%Y-%m-%d", strict=False).cast(pl.Int32)
        packed = packed_date(pl.col("text")).cast(pl.Int32)
        day = frame.select(packed.fill_null(whole.floor().cast(pl.Int32, strict=False)).fill_null(date).alias("day"))[
            "day"
        ]
    if zone is not None:
        day = instants(values, text, zone, numbers=timestamp).dt.date().cast(pl.Int32).fill_null(day)
    bad = day.is_null().to_numpy()
    rejected.add(
        bad,
        f"{column} is no day",
        lambda i: f"{column} is {shown(written[i])}, expected {form or 'a number or YYYY-MM-DD'}",
        column,
    )
    return day.fill_null(0).alias(DAY)
