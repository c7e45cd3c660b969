"""Raw rows to typed rows: labels, numbers, hashed ids, days; what does not parse is set aside with a reason.

A pure function of the frame and the schema. Typed columns: ``label`` (Float32), ``dense:<name>`` (Float64,
null = missing; of a vector Array(Float32)), ``hash:<name>`` (UInt64 or list<UInt64>, null or empty = missing),
``id:<name>`` (the raw strings of the same shape), ``weight:<name>`` (list<Float32>), ``day`` and ``hour`` (Int32),
``split_time`` (Int64, seconds since 1970), ``true_probability``, ``content`` (UInt64, where features are left out),
and what ``task_columns`` and ``event_key_columns`` add.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl

from pipeline.ingest.duplicate_rate import row_hashes
from pipeline.ingest.event_columns import sequence_columns
from pipeline.ingest.ids import check_ids, cross_text, event_key_columns, ids_of
from pipeline.ingest.labels import read_rates, task_columns
from pipeline.ingest.moments import vector_of
from pipeline.ingest.schema import CLICKED_LATER, CONTENT, DAY, SPLIT_TIME, DataSpec, DenseSpec
from pipeline.ingest.times import HOUR, beginning_of, day_of, hour_of, seconds_of_rows, whole_hour_of
from pipeline.ingest.values import (
    Reject,
    RejectedRows,
    by_halves,
    is_of_rows,
    not_read,
    number_of,
    plain_numbers,
    shown,
    text_of,
    two_classes,
)
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
    """Parse raw rows to typed rows.

    A row on which this raises, whatever it raises, is rejected.

    Args:
        raw: columns of ``spec.columns``.
        lines: int64 [rows], their numbers in the file.
        spec: the schema.
        rule: which rows of other days are wanted; None takes rows of any day.
    """
    try:
        return _parse(raw, lines, spec, rule)
    except (Exception, pl.exceptions.PanicException) as error:
        if not is_of_rows(error):
            raise

    # One row may spoil a whole column for Polars: halves are parsed until each failure is one row.
    parts, rejects, other_days = list[Parsed](), list[Reject](), dict[int, list[pl.DataFrame]]()
    # In a log of many days, the day of a row that could not be read is unknown.
    of_day = rule is None or rule.others != "drop"
    halves = by_halves(lambda start, stop: _parse(raw[start:stop], lines[start:stop], spec, rule), raw.height)
    for start, found in halves:
        if isinstance(found, BaseException):
            rejects.append(not_read(int(lines[start]), found, of_day=of_day))
        else:
            parts.append(found)
    if not parts:
        # Without rows there must still be a frame with the typed columns.
        parts.append(_parse(raw.clear(), lines[:0], spec, rule))
    for part in parts:
        rejects += part.rejects
        for day, rows in part.other_days.items():
            other_days.setdefault(day, []).append(rows)
    return Parsed(
        pl.concat([part.frame for part in parts], how="vertical_relaxed", rechunk=True),
        np.concatenate([part.lines for part in parts]),
        sorted(rejects, key=lambda reject: reject.line),
        {day: pl.concat(frames) for day, frames in other_days.items()},
        sum(part.dropped for part in parts),
    )


def _parse(raw: pl.DataFrame, lines: np.ndarray, spec: DataSpec, rule: DayRule | None) -> Parsed:
    rejected = RejectedRows(lines)
    plain = plain_numbers(raw, spec)
    texts = {}
    for name in raw.columns:
        if raw[name].dtype != pl.List and name not in plain and name != CLICKED_LATER:
            texts[name] = text_of(raw[name], spec, rejected)

    # 1. The label, and what belongs to it. Events keep the labels as they came; the rows take those of later clicks.
    label = _label(raw, texts, spec, rejected)
    events = []
    if spec.event_key is not None:
        events = event_key_columns(raw, texts, label, spec, rejected)
    if CLICKED_LATER in raw.columns:
        label = label.set(raw[CLICKED_LATER] > 0, 1.0)
    columns = [label]
    if spec.tasks or spec.row_weight:
        columns += task_columns(raw, texts, label, spec, rejected)
    if spec.sampling.column is not None:
        columns.append(read_rates(raw, texts, spec, rejected))

    # 2. Features.
    for dense in spec.dense:
        text = texts.get(dense.column)
        if dense.vector:
            columns.append(vector_of(raw[dense.column], text, dense, spec, rejected))
            continue
        values = plain.get(dense.column)
        if values is None:
            values = number_of(raw[dense.column], text, dense.column, spec, rejected)
        _check_values(values, dense, rejected)
        columns.append(values.alias(f"dense:{dense.name}"))
    for sparse in spec.sparse:
        if sparse.sequence:
            continue
        text, other_parts = texts.get(sparse.column), None
        if sparse.cross:
            crossed = cross_text(raw, texts, sparse, spec, rejected)
            if sparse.multi:
                other_parts = crossed
            else:
                text = crossed
        weights = raw[sparse.weights] if sparse.weights else None
        columns += ids_of(raw[sparse.column], text, sparse, spec, rejected, weights, other_parts)
        if sparse.required or sparse.integer:
            check_ids(columns, sparse, rejected)
    columns += sequence_columns(raw, texts, spec, rejected)

    # 3. The time of the row, and its true probability in a synthetic log.
    zone, form = spec.time_zone, spec.time_format
    if spec.has_day:
        column = spec.day_column or spec.timestamp or ""
        timestamp = spec.day_column is None
        columns.append(
            day_of(raw[column], texts.get(column), timestamp=timestamp, rejected=rejected, zone=zone, form=form)
        )
    if spec.hour_column:
        hours, text = raw[spec.hour_column], texts.get(spec.hour_column)
        if spec.whole_hours:
            columns.append(whole_hour_of(hours, text, rejected))
        else:
            columns.append(hour_of(hours, text, rejected, zone, form))
    if spec.split.by == "time":
        columns.append(_split_times(raw, texts, columns, spec, rule, rejected))
    if spec.true_probability:
        columns.append(raw[TRUE_PROBABILITY].cast(pl.Float32))

    # 4. Leave out rows of other days and rejected rows.
    frame = pl.DataFrame([*columns, *events])
    if spec.left_out:
        frame = _leave_out(frame, spec)
    other_days: dict[int, pl.DataFrame] = {}
    dropped = 0
    if rule is not None and spec.has_day:
        other_days, dropped = _take_other_days(raw, frame[DAY].to_numpy(), rule, rejected)
    if rejected.bad.any():
        frame, lines = frame.filter(pl.Series(~rejected.bad)), lines[~rejected.bad]
    return Parsed(frame, lines, sorted(rejected.rejects, key=lambda reject: reject.line), other_days, dropped)


def _leave_out(frame: pl.DataFrame, spec: DataSpec) -> pl.DataFrame:
    # Makes the features of ``spec.left_out`` missing. The split goes by what was delivered, so the test rows stay the
    # same.
    empty = []
    for name in spec.left_out:
        for kind in ("dense", "hash", "id", "weight"):
            column = f"{kind}:{name}"
            if column in frame.columns:
                empty.append(pl.lit(None, frame.schema[column]).alias(column))
    if not empty:
        return frame
    content = pl.Series(CONTENT, row_hashes(frame, spec))
    return frame.with_columns(empty).with_columns(content)


def _split_times(
    raw: pl.DataFrame,
    texts: dict[str, pl.Series],
    columns: Sequence[pl.Series],
    spec: DataSpec,
    rule: DayRule | None,
    rejected: RejectedRows,
) -> pl.Series:
    # Returns seconds since 1970: the row's own time, else the beginning of its hour or its day.
    file_day = 0 if rule is None else rule.day
    day, hour = pl.Series([file_day], dtype=pl.Int64).new_from_index(0, raw.height), None
    for known in columns:
        if known.name == DAY:
            day = known.cast(pl.Int64)
        elif known.name == HOUR:
            hour = known.cast(pl.Int64)
    column, zone, form = spec.split_time, spec.time_zone, spec.time_format
    if column is None:
        return beginning_of(day, hour, zone).alias(SPLIT_TIME)
    values, text = raw[column], texts.get(column)
    if spec.day_column is not None:
        # The day of another column does not replace a time that cannot be read, or the row would silently get its
        # midnight. Eight digits may be seconds or a date, so of numbers only a missing one is rejected.
        if values.dtype.is_numeric():
            rejected.add(values.is_null().to_numpy(), f"{column} is missing", column=column)
        else:
            day = day_of(values, text, timestamp=True, rejected=rejected, zone=zone, form=form).cast(pl.Int64)
    seconds = seconds_of_rows(values, text, zone, form)
    return seconds.fill_null(beginning_of(day, None, zone)).alias(SPLIT_TIME)


def _take_other_days(
    raw: pl.DataFrame, days: np.ndarray, rule: DayRule, rejected: RejectedRows
) -> tuple[dict[int, pl.DataFrame], int]:
    # Returns the rows to keep for other days, by day, and how many are dropped. Marks them all as bad.
    dropped = 0
    if rule.others == "drop" and rejected.bad.any():
        dropped = _drop_rejects_of_other_days(days, rule, rejected)
    other = (days != rule.day) & ~rejected.bad
    if not other.any():
        return {}, dropped
    near = other & (np.abs(days - rule.day) <= rule.reach)
    if rule.others == "keep" and rule.first is not None:
        # Late rows of a day of this dataset that is done already count among the rows of this day.
        late = near & (days >= rule.first) & (days < rule.day)
        near, other = near & ~late, other & ~late
    kept: dict[int, pl.DataFrame] = {}
    far = other
    if rule.others == "keep":
        for day in np.unique(days[near]):
            kept[int(day)] = raw.filter(pl.Series(near & (days == day)))
        far = other & ~near
    if rule.others == "drop":
        dropped += int(other.sum())
    else:
        expected = np.datetime64(rule.day, "D")
        rejected.add(
            far,
            "row of another day",
            lambda i: f"the row is of {np.datetime64(int(days[i]), 'D')}, expected {expected}",
        )
    rejected.bad |= other
    return kept, dropped


def _drop_rejects_of_other_days(days: np.ndarray, rule: DayRule, rejected: RejectedRows) -> int:
    # A rejected row of another day is reported with that day; one whose day is not known (0) is of no day.
    day_of_line = dict(zip(rejected.lines[rejected.bad].tolist(), days[rejected.bad].tolist(), strict=True))
    rejects = []
    for reject in rejected.rejects:
        day = day_of_line[reject.line]
        if day in (0, rule.day):
            rejects.append(replace(reject, of_day=day == rule.day))
    dropped = len(rejected.rejects) - len(rejects)
    rejected.rejects = rejects
    return dropped


def _check_values(values: pl.Series, feature: DenseSpec, rejected: RejectedRows) -> None:
    # Rejects rows whose value is missing or out of range, where the schema does not allow that.
    column = feature.column
    if feature.required:
        rejected.add(values.is_null().to_numpy(), f"{column} is missing", column=column)
    if feature.bounds is not None:
        low, high = feature.bounds
        outside = ((values < low) | (values > high)).fill_null(False).to_numpy()
        rejected.add(
            outside,
            f"{column} is out of range",
            lambda i: f"{column} is {values[i]:g}, expected {low:g} to {high:g}",
            column,
        )


def _label(raw: pl.DataFrame, texts: dict[str, pl.Series], spec: DataSpec, rejected: RejectedRows) -> pl.Series:
    values = raw[spec.label]
    positive, negative, text = two_classes(values, texts.get(spec.label), spec.positive, spec.negative)
    bad = ~(positive | negative)
    expected = f"expected {spec.positive!r} or {spec.negative!r}"
    rejected.add(
        bad.to_numpy(),
        f"{spec.label} is neither {spec.positive!r} nor {spec.negative!r}",
        lambda i: f"{spec.label} is {shown(text[i])}, {expected}",
        spec.label,
    )
    return positive.cast(pl.Float32).alias(LABEL)
