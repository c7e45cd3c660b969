"""Sequences of raw rows as typed columns: aligned lists of ids, the oldest event's first, and the events' ages.

A typed row's lists of a sequence are equally long; an event without an id has a null. Rows whose lists differ in
length, whose times fall, or whose events do not all lie before the row itself are rejected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import polars as pl

from pipeline.ingest.ids import as_lists, hash_ids
from pipeline.ingest.schema import DataSpec, EventSource, SequenceSpec, SparseSpec
from pipeline.ingest.times import instants, standard
from pipeline.ingest.values import RejectedRows, absent_in, elements_of, nulls, strings_of
from pipeline.records.dataset import SequenceProfile

# Maximum number of bins of the histogram of lengths.
_BINS = 50
# Seconds; older events are in the last bin of ages.
OLDEST = 16 * 365.25 * 86_400
_NO_NULLS = {"empty_as_null": False, "keep_nulls": False}


class Lengths:
    """Counts rows by their number of events: ``rows`` int64 by length, 0 first. ``left_out``: events left out."""

    def __init__(self) -> None:
        self.rows = np.zeros(1, np.int64)
        self.left_out = 0

    def add(self, lists: pl.Series, left_out: int) -> None:
        new = Lengths()
        new.rows = np.bincount(lists.list.len().fill_null(0).to_numpy()).astype(np.int64)
        new.left_out = left_out
        self.merge(new)

    def merge(self, other: Lengths) -> None:
        # Pad to the longer of both, because the longest list is not known in advance.
        size = max(len(other.rows), len(self.rows))
        self.rows = np.pad(self.rows, (0, size - len(self.rows))) + np.pad(other.rows, (0, size - len(other.rows)))
        self.left_out += other.left_out

    def profile(self) -> SequenceProfile:
        """Return the figures for ``profile.json``."""
        total, lengths = max(int(self.rows.sum()), 1), np.arange(len(self.rows))
        below = np.searchsorted(np.cumsum(self.rows), 0.99 * total)
        longest = int(lengths[self.rows > 0].max(initial=0))
        each = max(-(-longest // _BINS), 1)
        binned = np.bincount((lengths + each - 1) // each, self.rows)[: -(-longest // each) + 1]
        return SequenceProfile(
            mean=float((self.rows * lengths).sum() / total),
            p99=int(below),
            longest=longest,
            empty_share=float(self.rows[0] / total),
            left_out=self.left_out,
            rows_by_length=tuple(binned.astype(int).tolist()),
            events_per_bin=each,
        )


def left_out_column(sequence: str) -> str:
    """Return the name of the typed column that counts a row's events that were left out as not before it."""
    return f"events:{sequence}"


def sequence_columns(
    raw: pl.DataFrame, texts: Mapping[str, pl.Series], spec: DataSpec, rejected: RejectedRows
) -> list[pl.Series]:
    """Return hashes and ids (lists) of every column of every sequence, and how many events were left out."""
    if not spec.sequences:
        return []
    times, column = None, spec.row_time
    if column is not None:
        written = raw[column]
        times = _seconds(written, spec)
        rejected.add(
            times.is_null().to_numpy(),
            f"{column} is no time",
            lambda i: f"{column} is {written[i]!r}, expected the time of the row",
            column,
        )
    features = {feature.name: feature for feature in spec.sparse if feature.sequence}
    columns: list[pl.Series] = []
    for sequence in spec.sequences:
        columns += _sequence(sequence, features, raw, texts, times, spec, rejected)
    return columns


def _sequence(
    sequence: SequenceSpec,
    features: Mapping[str, SparseSpec],
    raw: pl.DataFrame,
    texts: Mapping[str, pl.Series],
    times: pl.Series | None,
    spec: DataSpec,
    rejected: RejectedRows,
) -> list[pl.Series]:
    sources = dict(zip(sequence.features, sequence.sources, strict=True))
    lists = {name: _lists(raw, texts, source, spec) for name, source in sources.items()}
    lengths = _lengths(lists, sources, sequence, rejected)
    row = np.repeat(np.arange(raw.height), lengths)
    flat = {name: _flat(lists[name], lengths) for name in sequence.columns}
    keep = _newest(lengths, sequence.max_length)
    made: list[pl.Series] = []
    if sequence.time is not None and times is not None:
        came = _seconds(_flat(lists[sequence.age], lengths), spec)
        ages = times.gather(row) - came
        late = _check_times(sequence, came, ages, row, raw.height, rejected)
        if sequence.drop_leaks:
            keep = _newest(lengths, sequence.max_length, ~late)
            left = np.bincount(row[late], minlength=raw.height).astype(np.int32)
            made.append(pl.Series(left_out_column(sequence.name), left))
        # The number of each age's bin is its id: bins of log(1 + seconds) up to `OLDEST`, older events in the last.
        seconds = np.maximum(ages.fill_null(0.0).to_numpy(), 0.0)
        bins = np.log1p(seconds) * (sequence.age_bins / math.log1p(OLDEST))
        flat[sequence.age] = pl.Series(np.minimum(bins, sequence.age_bins - 1).astype(np.int64)).cast(pl.String)
    kept = np.bincount(row[keep], minlength=raw.height)
    for name, values in flat.items():
        ids = values.filter(pl.Series(keep))
        if spec.strip:
            ids = ids.str.strip_chars()
        # An event without an id stays as a null, because the lists of a sequence are aligned.
        ids = ids.set(absent_in(ids, spec) | (ids == "").fill_null(False), None)
        feature = features[name]
        made += [
            as_lists(hash_ids(ids, feature.seed), kept).alias(f"hash:{name}"),
            as_lists(ids, kept).alias(f"id:{name}"),
        ]
    return made


def _lists(raw: pl.DataFrame, texts: Mapping[str, pl.Series], source: EventSource, spec: DataSpec) -> pl.Series:
    values = raw[source.column]
    if values.dtype != pl.List:
        text = texts[source.column]
        divided = elements_of(text, source.separator)
        values = divided.zip_with(~absent_in(text, spec), nulls(pl.List(pl.String), len(text)))
    if not source.field:
        return values
    lengths = values.list.len().fill_null(0).to_numpy()
    elements = values.explode(**_NO_NULLS)
    if not isinstance(elements.dtype, pl.Struct):
        # The elements are objects of JSON, as text.
        elements = strings_of(elements).str.json_path_match(f"$.{source.field}")
    elif source.field in elements.struct.fields:
        elements = elements.struct.field(source.field)
    else:
        elements = nulls(pl.String, len(elements))
    return as_lists(elements, lengths)


def _lengths(
    lists: Mapping[str, pl.Series], sources: Mapping[str, EventSource], sequence: SequenceSpec, rejected: RejectedRows
) -> np.ndarray:
    # Returns the events of each row, int64: 0 if its lists differ in length, which rejects the row.
    by_column = {}
    for name, each in lists.items():
        by_column[name] = each.list.len().fill_null(0).to_numpy().astype(np.int64)
    first, lengths = next(iter(by_column.items()))
    # Copy, because messages tell the lengths as they came.
    lengths, wrong = lengths.copy(), np.zeros(len(lengths), bool)
    for name, other in by_column.items():
        differ = other != by_column[first]
        wrong |= differ
        rejected.add(
            differ,
            f"columns of sequence {sequence.name} differ in length",
            lambda i, other=other, name=name: (  # type: ignore[misc]
                f"{sources[first].shown} has {by_column[first][i]} events, and {sources[name].shown} has {other[i]}"
            ),
            sources[name].column,
        )
    lengths[wrong] = 0
    return lengths


def _flat(lists: pl.Series, lengths: np.ndarray) -> pl.Series:
    # Returns the elements of the rows that have `lengths` events. Rejected rows have length 0, so only their empty
    # lists pass.
    own = lists.list.len().fill_null(0).to_numpy() == lengths
    values = lists.filter(pl.Series(own)).explode(**_NO_NULLS)
    # Times keep their type, because as text they would have to be parsed again. Everything else is hashed or parsed as
    # text.
    if values.dtype.is_temporal():
        return values
    return strings_of(values)


def _newest(lengths: np.ndarray, most: int, kept: np.ndarray | None = None) -> np.ndarray:
    # Returns which of the events `kept` are among the `most` newest of their row: bool [events].
    if kept is None:
        # Before the times are read, it is not known which events are late.
        kept = np.ones(int(lengths.sum()), bool)
    ends = np.cumsum(lengths)
    so_far = np.concatenate([[0], np.cumsum(kept)])
    # Number of kept events of the row that are newer. Events that are not kept must not count towards the `most`.
    behind = np.repeat(so_far[ends], lengths) - so_far[1:]
    return kept & (behind < most)


def _seconds(values: pl.Series, spec: DataSpec) -> pl.Series:
    # Returns seconds since 1970 (Float64) of times as `data.timestamp` is written; null for other values.
    text = standard(values, strings_of(values), spec.time_format)
    return instants(values, text, spec.time_zone or "UTC").dt.timestamp("us") / 1e6


def _check_times(
    sequence: SequenceSpec, came: pl.Series, ages: pl.Series, row: np.ndarray, rows: int, rejected: RejectedRows
) -> np.ndarray:
    # Returns which events are not before their row. Rejects rows with a wrong time and, unless such events are dropped,
    # rows that have some. Equal times are in order.
    assert sequence.time is not None
    shown, name = sequence.time.shown, sequence.name
    unknown = came.is_null().to_numpy()
    seconds = came.fill_null(0.0).to_numpy()
    falls = np.zeros(len(row), bool)
    falls[1:] = (row[1:] == row[:-1]) & (seconds[1:] < seconds[:-1])
    late = (ages <= 0).fill_null(False).to_numpy()
    # Number of such events in each row, int64 [rows].
    missing, falling, leaking = (np.bincount(row[events], minlength=rows) for events in (unknown, falls, late))
    column = sequence.time.column
    rejected.add(
        missing > 0,
        f"an event of {name} has no time",
        lambda i: f"{shown} tells no time of {missing[i]} events",
        column,
    )
    rejected.add(
        falling > 0,
        f"events of {name} are out of order",
        lambda i: f"{shown} falls {falling[i]} times, expected the oldest event first",
        column,
    )
    if not sequence.drop_leaks:
        rejected.add(
            leaking > 0,
            f"events of {name} are not before their row",
            lambda i: (
                f"{shown} has {leaking[i]} events at or after the row's own time; "
                f"data.sequences.{name}.leaks=drop leaves such events out"
            ),
            column,
        )
    return late
