"""Raw rows to typed rows: labels, numbers, hashed ids, days; what does not parse is set aside with a reason.

A pure function of the frame and the schema. Typed columns: ``label`` (Float32), ``dense:<name>`` (Float64,
null = missing; of a vector Array(Float32)), ``hash:<name>`` (UInt64 or list<UInt64>, null or empty = missing),
``id:<name>`` (the raw strings of the same shape), ``weight:<name>`` (list<Float32>), ``day`` and ``hour`` (Int32),
``split_time`` (Int64, seconds since 1970), ``true_probability``, and what ``tasks`` and ``event_key_columns`` add.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl

from pipeline.ingest.event_columns import event_columns as sequence_columns
from pipeline.ingest.hashing import event_key_columns
from pipeline.ingest.ids import check_ids, cross_text, ids_of
from pipeline.ingest.rejects import Reject, RejectedRows, by_halves, is_of_rows, not_read, shown
from pipeline.ingest.sampling import read_rates
from pipeline.ingest.schema import CLICKED_LATER, DAY, SPLIT_TIME, DataSpec, DenseSpec
from pipeline.ingest.tasks import task_columns
from pipeline.ingest.times import HOUR, day_of, hour_of, seconds_of_rows, whole_hour_of
from pipeline.ingest.values import equals, number_of, plain_numbers, text_of
from pipeline.ingest.vectors import vector_of
from pipeline.ingest.zones import beginning_of
from pipeline.records.dataset import LABEL, TRUE_PROBABILITY


@dataclass(frozen=True, kw_only=True)
class DayRule:
    """Rows of ``day`` (days since 1970) are wanted; ``others``: drop | keep (within ``reach`` days) | quarantine.

    Where they are kept, those from ``first`` on, whose own day is done already, count among the rows of ``day``.
    """

    day: int
    others: str
    reach: int = 0
    first: int | None = None


@dataclass(frozen=True)
class Parsed:
    """Typed rows with their ``lines``, and the rows that did not parse in the order of their lines.

    ``other_days``: raw rows of other days that are to be kept, by day; ``dropped``: how many are not.
    """

    frame: pl.DataFrame
    lines: np.ndarray
    rejects: list[Reject]
    other_days: dict[int, pl.DataFrame] = field(default_factory=dict)
    dropped: int = 0


def parse(raw: pl.DataFrame, lines: np.ndarray, spec: DataSpec, rule: DayRule | None = None) -> Parsed:
    """Typed rows of ``raw`` (columns of ``spec.columns``), whose rows are numbered ``lines``; one day's by ``rule``.

    A row on which this raises, whatever it raises, is rejected.
    """
    try:
        return _parse(raw, lines, spec, rule)
    except (Exception, pl.exceptions.PanicException) as error:
        if not is_of_rows(error):
            raise
    parts, rejects = list[Parsed](), list[Reject]()

    def part(start: int, stop: int) -> Parsed:
        return _parse(raw[start:stop], lines[start:stop], spec, rule)

    for start, found in by_halves(part, raw.height):
        if isinstance(found, BaseException):
            rejects.append(not_read(int(lines[start]), found, of_day=not _of_many_days(rule)))
        else:
            parts.append(found)
    return _merged(parts or [_parse(raw.clear(), lines[:0], spec, rule)], rejects)


def _merged(parts: Sequence[Parsed], rejects: Sequence[Reject]) -> Parsed:
    others: dict[int, list[pl.DataFrame]] = {}
    for each in parts:
        for day, rows in each.other_days.items():
            others.setdefault(day, []).append(rows)
    every = [*rejects, *(reject for each in parts for reject in each.rejects)]
    return Parsed(
        pl.concat([each.frame for each in parts], how="vertical_relaxed", rechunk=True),
        np.concatenate([each.lines for each in parts]),
        sorted(every, key=lambda reject: reject.line),
        {day: pl.concat(rows) for day, rows in others.items()},
        sum(each.dropped for each in parts),
    )


def _parse(raw: pl.DataFrame, lines: np.ndarray, spec: DataSpec, rule: DayRule | None) -> Parsed:
    rejected = RejectedRows(lines)
    plain = plain_numbers(raw, spec)
    strings = [
        name for name in raw.columns if raw[name].dtype != pl.List and name not in plain and name != CLICKED_LATER
    ]
    texts = {name: text_of(raw[name], spec, rejected) for name in strings}
    columns = [_label(raw, texts, spec, rejected)]
    events = event_key_columns(raw, texts, columns[0], spec, rejected) if spec.event_key is not None else []
    if CLICKED_LATER in raw.columns:
        columns[0] = columns[0].set(raw[CLICKED_LATER] > 0, 1.0)
    if spec.tasks or spec.row_weight:
        columns += task_columns(raw, texts, columns[0], spec, rejected)
    if spec.sampling.column is not None:
        columns.append(read_rates(raw, texts, spec, rejected))
    for dense in spec.dense:
        if dense.vector:
            columns.append(vector_of(raw[dense.column], texts.get(dense.column), dense, spec, rejected))
            continue
        if (values := plain.get(dense.column)) is None:
            values = number_of(raw[dense.column], texts.get(dense.column), dense.column, spec, rejected)
        _check_values(values, dense, rejected)
        columns.append(values.alias(f"dense:{dense.name}"))
    for sparse in (each for each in spec.sparse if not each.sequence):
        weights = raw[sparse.weights] if sparse.weights else None
        text, beside = texts.get(sparse.column), None
        if sparse.cross:
            parts = cross_text(raw, texts, sparse, spec, rejected)
            text, beside = (text, parts) if sparse.multi else (parts, None)
        columns += ids_of(raw[sparse.column], text, sparse, spec, rejected, weights, beside)
        if sparse.required or sparse.integer:
            check_ids(columns, sparse, rejected)
    columns += sequence_columns(raw, texts, spec, rejected)
    zone, form = spec.time_zone, spec.time_format
    if spec.has_day:
        column = spec.day_column or spec.timestamp or ""
        timestamp = spec.day_column is None
        columns.append(
            day_of(raw[column], texts.get(column), timestamp=timestamp, rejected=rejected, zone=zone, form=form)
        )
    if spec.hour_column:
        hours, text = raw[spec.hour_column], texts.get(spec.hour_column)
        whole = spec.whole_hours
        columns.append(whole_hour_of(hours, text, rejected) if whole else hour_of(hours, text, rejected, zone, form))
    if spec.split.by == "time":
        columns.append(_split_times(raw, texts, columns, spec, rule, rejected))
    if spec.true_probability:
        columns.append(raw[TRUE_PROBABILITY].cast(pl.Float32))
    frame = pl.DataFrame([*columns, *events])
    kept: dict[int, pl.DataFrame] = {}
    dropped = 0
    if rule is not None and spec.has_day:
        kept, dropped = _other_days(raw, frame[DAY].to_numpy(), rule, rejected)
    if rejected.bad.any():
        frame, lines = frame.filter(pl.Series(~rejected.bad)), lines[~rejected.bad]
    return Parsed(frame, lines, sorted(rejected.rejects, key=lambda reject: reject.line), kept, dropped)


def _split_times(
    raw: pl.DataFrame,
    texts: dict[str, pl.Series],
    columns: Sequence[pl.Series],
    spec: DataSpec,
    rule: DayRule | None,
    rejected: RejectedRows,
) -> pl.Series:
    # The time that each row is split by, in seconds since 1970: its own, else when its hour or its day begins.
    known = {each.name: each.cast(pl.Int64) for each in columns if each.name in (DAY, HOUR)}
    of_file = 0 if rule is None else rule.day
    day = known.get(DAY, pl.Series([of_file], dtype=pl.Int64).new_from_index(0, raw.height))
    column, zone, form = spec.split_time, spec.time_zone, spec.time_format
    if column is None:
        return beginning_of(day, known.get(HOUR), zone).alias(SPLIT_TIME)
    values, text = raw[column], texts.get(column)
    # A day of another column does not replace a time that cannot be read: the row would silently be of its midnight.
    if spec.day_column is not None and values.dtype.is_numeric():  # of which eight digits may be seconds or a date
        rejected.add(values.is_null().to_numpy(), f"{column} is missing", lambda _: f"{column} is missing", column)
    elif spec.day_column is not None:
        day = day_of(values, text, timestamp=True, rejected=rejected, zone=zone, form=form).cast(pl.Int64)
    own = seconds_of_rows(values, text, zone, form)
    return own.fill_null(beginning_of(day, None, zone)).alias(SPLIT_TIME)


def _of_many_days(rule: DayRule | None) -> bool:
    # Whether the log has rows of many days, of which those of one are wanted.
    return rule is not None and rule.others == "drop"


def _other_days(
    raw: pl.DataFrame, days: np.ndarray, rule: DayRule, rejected: RejectedRows
) -> tuple[dict[int, pl.DataFrame], int]:
    wrong = _of_their_days(days, rule, rejected) if _of_many_days(rule) and rejected.bad.any() else 0
    other = (days != rule.day) & ~rejected.bad
    if not other.any():
        return {}, wrong
    near = other & (np.abs(days - rule.day) <= rule.reach)
    if rule.others == "keep" and rule.first is not None:
        late = near & (days >= rule.first) & (days < rule.day)
        near, other = near & ~late, other & ~late
    kept: dict[int, pl.DataFrame] = {}
    dropped = 0
    if rule.others == "keep":
        kept = {int(day): raw.filter(pl.Series(near & (days == day))) for day in np.unique(days[near])}
        other_days = other & ~near
    else:
        other_days = other
    if rule.others == "drop":
        dropped = int(other.sum()) + wrong
    else:
        rejected.add(
            other_days,
            "row of another day",
            lambda i: f"the row is of {_date(days[i])}, expected {_date(rule.day)}",
        )
    rejected.bad |= other
    return kept, dropped


def _of_their_days(days: np.ndarray, rule: DayRule, rejected: RejectedRows) -> int:
    # Leave rejected rows of other days to these, and mark those of which no day is known (0); how many are left.
    wrong = dict(zip(rejected.lines[rejected.bad].tolist(), days[rejected.bad].tolist(), strict=True))
    rejects = [each for each in rejected.rejects if wrong[each.line] in (0, rule.day)]
    left = len(rejected.rejects) - len(rejects)
    rejected.rejects = [replace(each, of_day=wrong[each.line] == rule.day) for each in rejects]
    return left


def _date(day: int) -> str:
    return str(np.datetime64(int(day), "D"))


def _check_values(values: pl.Series, feature: DenseSpec, rejected: RejectedRows) -> None:
    column = feature.column
    if feature.required:
        rejected.add(values.is_null().to_numpy(), f"{column} is missing", lambda _: f"{column} is missing", column)
    low = -np.inf if feature.low is None else feature.low
    high = np.inf if feature.high is None else feature.high
    if (feature.low, feature.high) != (None, None):
        outside = ((values < low) | (values > high)).fill_null(False).to_numpy()
        rejected.add(
            outside,
            f"{column} is out of range",
            lambda i: f"{column} is {values[i]:g}, expected {low:g} to {high:g}",
            column,
        )


def _label(raw: pl.DataFrame, texts: dict[str, pl.Series], spec: DataSpec, rejected: RejectedRows) -> pl.Series:
    text = texts.get(spec.label)
    if text is None:
        text = raw[spec.label].cast(pl.List(pl.String)).list.join(",")
    positive, negative = (text == spec.positive).fill_null(False), (text == spec.negative).fill_null(False)
    if raw[spec.label].dtype.is_numeric():
        positive, negative = (equals(raw[spec.label], word) for word in (spec.positive, spec.negative))
    bad = ~(positive | negative)
    expected = f"expected {spec.positive!r} or {spec.negative!r}"
    rejected.add(
        bad.to_numpy(),
        f"{spec.label} is neither {spec.positive!r} nor {spec.negative!r}",
        lambda i: f"{spec.label} is {shown(text[i])}, {expected}",
        spec.label,
    )
    return positive.cast(pl.Float32).alias(LABEL)
