"""Raw rows to typed rows: labels, numbers, hashed ids, days; what does not parse is set aside with a reason.

A pure function of the frame and the schema. Typed columns: ``label`` (Float32), ``dense:<name>`` (Float64,
null = missing), ``hash:<name>`` (UInt64 or list<UInt64>, null or empty = missing), ``id:<name>`` (the raw
strings of the same shape), ``weight:<name>`` (list<Float32>), ``day`` (Int32), ``true_probability``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import polars as pl
import pyarrow as pa

from pipeline.contracts import LABEL, TRUE_PROBABILITY
from pipeline.ingest.hashing import hash_expr, hash_ids, hash_of, hash_rows
from pipeline.ingest.spec import DAY, DataSpec, DenseSpec, SparseSpec
from pipeline.ingest.text import FLOAT32_MAX, Reject

SECONDS_PER_DAY = 86_400
CROSS = "\x1f"  # between the values of a cross: the unit separator, which no log field holds


class _Rejected:
    """Which rows are out, and why: the first complaint about a row counts."""

    def __init__(self, lines: np.ndarray) -> None:
        self.lines = lines
        self.bad = np.zeros(len(lines), bool)
        self.rejects: list[Reject] = []

    def add(self, mask: np.ndarray, kind: str, reason: Callable[[int], str], column: str = "") -> None:
        """Reject the rows of ``mask`` that are not rejected yet; ``reason`` tells of a row number of the block."""
        if not mask.any():
            return
        for index in np.flatnonzero(mask & ~self.bad):
            self.rejects.append(Reject(int(self.lines[index]), kind, reason(int(index)), column))
        self.bad |= mask


def _shown(value: str | None) -> str:
    """``value`` quoted, as a message shows it: no longer than 60 characters."""
    return "missing" if value is None else repr(value if len(value) <= 60 else value[:57] + "...")


@dataclass(frozen=True, kw_only=True)
class DayRule:
    """Rows of ``day`` (days since 1970) are wanted; ``others``: drop | keep (within ``reach`` days) | quarantine."""

    day: int
    others: str
    reach: int = 0


@dataclass(frozen=True)
class Parsed:
    """Typed rows, and the rows that did not parse in the order of their lines.

    ``other_days``: raw rows of other days that are to be kept, by day; ``dropped``: how many are not.
    """

    frame: pl.DataFrame
    rejects: list[Reject]
    other_days: dict[int, pl.DataFrame] = field(default_factory=dict)
    dropped: int = 0


def parse(raw: pl.DataFrame, lines: np.ndarray, spec: DataSpec, rule: DayRule | None = None) -> Parsed:
    """Typed rows of ``raw`` (columns of ``spec.columns``), whose rows are numbered ``lines``; one day's by ``rule``."""
    rejected = _Rejected(lines)
    plain = _plain_numbers(raw, spec)
    texts = {
        name: _text(raw[name], spec, rejected) for name in raw.columns if raw[name].dtype != pl.List and name not in plain
    }
    columns = [_label(raw, texts, spec, rejected)]
    for dense in spec.dense:
        values = raw[dense.column]
        if dense.column not in plain:
            values = _number(values, texts.get(dense.column), dense.column, spec, rejected)
        _check_values(values, dense, rejected)
        columns.append(values.alias(f"dense:{dense.name}"))
    hashes = _plain_hashes(texts, spec)
    for sparse in spec.sparse:
        if sparse.name in hashes:
            columns += [hashes[sparse.name], texts[sparse.column].alias(f"id:{sparse.name}")]
            continue
        columns += _sparse(raw[sparse.column], _id_text(texts, sparse, spec), sparse, spec, rejected)
        if sparse.required or sparse.integer:
            _check_ids(columns, sparse, spec, rejected)
    if spec.has_day:
        columns.append(_day(raw, texts, spec, rejected))
    if spec.true_probability:
        columns.append(raw[TRUE_PROBABILITY].cast(pl.Float32))
    frame = pl.DataFrame(columns)
    kept: dict[int, pl.DataFrame] = {}
    dropped = 0
    if rule is not None and spec.has_day:
        kept, dropped = _other_days(raw, frame[DAY].to_numpy(), rule, rejected)
    if rejected.bad.any():
        frame = frame.filter(pl.Series(~rejected.bad))
    return Parsed(frame, sorted(rejected.rejects, key=lambda reject: reject.line), kept, dropped)


def _plain_numbers(raw: pl.DataFrame, spec: DataSpec) -> set[str]:
    """Columns that are what ``_number`` makes of them: finite Float64 or null, and nothing but numbers."""
    names = [name for name in sorted(spec.number_columns) if raw[name].dtype == pl.Float64]
    if not names:
        return set()
    bounds = raw.select(pl.col(names).abs().max()).row(0)
    finite = raw.select(pl.col(names).is_finite().all()).row(0)
    return {
        name for name, bound, good in zip(names, bounds, finite, strict=True)
        if good and (bound is None or bound <= FLOAT32_MAX)
    }  # fmt: skip


def _plain_hashes(texts: dict[str, pl.Series], spec: DataSpec) -> dict[str, pl.Series]:
    """As ``_sparse``, of all features at once that are one id a row and nothing more."""
    plain = [
        f for f in spec.sparse
        if f.column in texts and not (f.multi or f.cross or f.bins or f.required or f.integer)
    ]  # fmt: skip
    if not plain:
        return {}
    frame = pl.DataFrame([texts[name].alias(name) for name in sorted({f.column for f in plain})])
    hashes = frame.select(_hash_expr(f, spec, frame[f.column].null_count()) for f in plain)
    return {f.name: hashes[f"hash:{f.name}"] for f in plain}


def _hash_expr(feature: SparseSpec, spec: DataSpec, nulls: int) -> pl.Expr:
    value = hash_expr(feature.column, feature.seed)
    # Comparing hashes is several times cheaper than comparing strings.
    words = [hash_of(word, feature.seed) for word in spec.missing]
    if words or nulls:
        present = pl.all_horizontal(
            [value != pl.lit(word, pl.UInt64) for word in words] + [pl.col(feature.column).is_not_null()] * (nulls > 0)
        )
        value = pl.when(present).then(value)
    return value.alias(f"hash:{feature.name}")


def _other_days(
    raw: pl.DataFrame, days: np.ndarray, rule: DayRule, rejected: _Rejected
) -> tuple[dict[int, pl.DataFrame], int]:
    """Take the rows of other days out: (those to keep by day, how many are dropped)."""
    other = (days != rule.day) & ~rejected.bad
    if not other.any():
        return {}, 0
    near = other & (np.abs(days - rule.day) <= rule.reach)
    kept: dict[int, pl.DataFrame] = {}
    dropped = 0
    if rule.others == "keep":
        kept = {int(day): raw.filter(pl.Series(near & (days == day))) for day in np.unique(days[near])}
        other_days = other & ~near
    else:
        other_days = other
    if rule.others == "drop":
        dropped = int(other.sum())
    else:
        rejected.add(
            other_days, "row of another day",
            lambda i: f"the row is of {_date(days[i])}, expected {_date(rule.day)}",
        )  # fmt: skip
    rejected.bad |= other
    return kept, dropped


def _date(day: int) -> str:
    return str(np.datetime64(int(day), "D"))


def _text(values: pl.Series, spec: DataSpec, rejected: _Rejected) -> pl.Series:
    """``values`` as strings; float NaN and undecodable bytes become null (the latter are rejected)."""
    if values.dtype.is_float():
        values = values.fill_nan(None)
    if values.dtype == pl.Boolean:
        values = values.cast(pl.Int8)
    text = values if values.dtype == pl.String else values.cast(pl.String, strict=False)
    if values.dtype == pl.Binary:
        undecodable = (text.is_null() & values.is_not_null()).to_numpy()
        rejected.add(undecodable, "invalid UTF-8", lambda _: f"{values.name} is not valid UTF-8", values.name)
    return text.str.strip_chars() if spec.strip else text


def _absent(text: pl.Series, spec: DataSpec) -> pl.Series:
    """Where ``text`` is null or one of the strings that stand for a missing value."""
    absent = text.is_null()
    for word in spec.missing:
        absent |= (text == word).fill_null(False)
    return absent


def _check_values(values: pl.Series, feature: DenseSpec, rejected: _Rejected) -> None:
    """Reject the rows whose value is missing or out of range, where that is not allowed."""
    column = feature.column
    if feature.required:
        rejected.add(values.is_null().to_numpy(), f"{column} is missing", lambda _: f"{column} is missing", column)
    low = -np.inf if feature.low is None else feature.low
    high = np.inf if feature.high is None else feature.high
    if (feature.low, feature.high) != (None, None):
        outside = ((values < low) | (values > high)).fill_null(False).to_numpy()
        rejected.add(
            outside, f"{column} is out of range", lambda i: f"{column} is {values[i]:g}, expected {low:g} to {high:g}",
            column,
        )  # fmt: skip


def _check_ids(columns: list[pl.Series], feature: SparseSpec, spec: DataSpec, rejected: _Rejected) -> None:
    """Reject the rows whose ids are missing or no whole numbers, where that is not allowed."""
    column, found = feature.column, {series.name: series for series in columns}
    hashes, ids = found[f"hash:{feature.name}"], found[f"id:{feature.name}"]
    if feature.required:
        missing = hashes.is_null() if not feature.multi else hashes.list.len().fill_null(0) == 0
        rejected.add(missing.to_numpy(), f"{column} is missing", lambda _: f"{column} is missing", column)
    if feature.integer:
        flat = ids.to_frame("id").with_row_index("row")
        flat = flat.explode("id") if feature.multi else flat.filter(hashes.is_not_null())
        wrong = flat.filter(pl.col("id").is_not_null() & ~pl.col("id").str.contains(r"^[+-]?\d+$"))
        mask = np.zeros(len(ids), bool)
        mask[wrong["row"].to_numpy()] = True
        first = dict(zip(wrong["row"].to_list()[::-1], wrong["id"].to_list()[::-1], strict=True))
        rejected.add(
            mask, f"{column} is no whole number",
            lambda i: f"{column} is {_shown(first[i])}, expected a whole number", column,
        )  # fmt: skip


def _id_text(texts: dict[str, pl.Series], feature: SparseSpec, spec: DataSpec) -> pl.Series | None:
    """The id of each row as text; of a cross all its columns', null where one is missing; None for a list."""
    if not feature.cross:
        return texts.get(feature.column)
    if any(column not in texts for column in feature.cross):
        return None
    parts = {f"{i}": texts[column] for i, column in enumerate(feature.cross)}
    present = ~pl.any_horizontal([pl.lit(_absent(part, spec)) for part in parts.values()])
    joined = pl.concat_str(list(parts), separator=CROSS)
    return pl.DataFrame(parts).select(pl.when(present).then(joined).alias("id"))["id"]


def as_bits(numbers: pl.Series) -> pl.Series:
    """The bits of each float64 as UInt64 (of -0 those of 0); null stays null."""
    values = numbers.fill_null(0.0).to_numpy() + 0.0
    return pl.Series(values.view(np.uint64)).zip_with(numbers.is_not_null(), _nulls(len(values)))


def of_bits(hashes: pl.Series) -> np.ndarray:
    """The float64 whose bits these are; NaN for null."""
    values = hashes.fill_null(0).to_numpy().view(np.float64)
    return np.where(hashes.is_null().to_numpy(), np.nan, values)


def _nulls(length: int) -> pl.Series:
    return pl.Series([None], dtype=pl.UInt64).new_from_index(0, length)


def _label(raw: pl.DataFrame, texts: dict[str, pl.Series], spec: DataSpec, rejected: _Rejected) -> pl.Series:
    text = texts.get(spec.label)
    if text is None:
        text = raw[spec.label].cast(pl.List(pl.String)).list.join(",")
    positive, negative = (text == spec.positive).fill_null(False), (text == spec.negative).fill_null(False)
    if raw[spec.label].dtype.is_numeric():
        positive, negative = (_equals(raw[spec.label], word) for word in (spec.positive, spec.negative))
    bad = ~(positive | negative)
    expected = f"expected {spec.positive!r} or {spec.negative!r}"
    rejected.add(
        bad.to_numpy(), f"{spec.label} is neither {spec.positive!r} nor {spec.negative!r}",
        lambda i: f"{spec.label} is {_shown(text[i])}, {expected}", spec.label,
    )  # fmt: skip
    return positive.cast(pl.Float32).alias(LABEL)


def _equals(values: pl.Series, word: str) -> pl.Series:
    try:
        return (values == float(word)).fill_null(False)
    except ValueError:
        return pl.Series([False]).new_from_index(0, len(values))


def _number(values: pl.Series, text: pl.Series | None, column: str, spec: DataSpec, rejected: _Rejected) -> pl.Series:
    """``values`` as finite Float64, null where missing."""
    if text is None:
        every = np.ones(len(values), bool)
        rejected.add(every, f"{column} is a list", lambda _: f"{column} is a list, not a number", column)
        return pl.Series([None], dtype=pl.Float64).new_from_index(0, len(values))
    numeric = values.dtype.is_numeric() or values.dtype == pl.Boolean
    number = (values if numeric else text).cast(pl.Float64, strict=False)
    if numeric:
        number = number.fill_nan(None)
    finite = (number.abs() <= FLOAT32_MAX).fill_null(False)
    if finite.all():
        return number
    absent = _absent(text, spec)
    rejected.add(
        ~(finite | absent).to_numpy(), f"{column} is not a finite number",
        lambda i: f"{column} is {_shown(text[i])}, expected a finite number", column,
    )  # fmt: skip
    return number.zip_with(finite & ~absent, pl.Series([None], dtype=pl.Float64).new_from_index(0, len(number)))


def _sparse(
    values: pl.Series, text: pl.Series | None, feature: SparseSpec, spec: DataSpec, rejected: _Rejected
) -> list[pl.Series]:
    if feature.multi:
        return _multi(values, text, feature, spec, rejected)
    if feature.bins:
        number = _number(values, text, feature.column, spec, rejected)
        shown = number.cast(pl.String) if text is None else text
        return [as_bits(number).alias(f"hash:{feature.name}"), shown.alias(f"id:{feature.name}")]
    if text is None:
        kind = f"{feature.column} is a list; data.sparse.{feature.name}.separator=',' makes it multi-valued"
        rejected.add(np.ones(len(values), bool), kind, lambda _: kind, feature.column)
        text = pl.Series([None], dtype=pl.String).new_from_index(0, len(values))
    hashes = hash_ids(text, feature.seed)
    # Comparing hashes is several times cheaper than comparing strings.
    words = hash_ids(pl.Series(list(spec.missing), dtype=pl.String), feature.seed)
    for word in words:
        hit = hashes == word
        if hit.any():
            hashes = hashes.to_frame("h").select(pl.when(pl.col("h") != word).then(pl.col("h")))["h"]
    return [hashes.alias(f"hash:{feature.name}"), text.alias(f"id:{feature.name}")]


def _multi(
    values: pl.Series, text: pl.Series | None, feature: SparseSpec, spec: DataSpec, rejected: _Rejected
) -> list[pl.Series]:
    """Lists of ids (and weights) of one row each; empty and missing elements are left out."""
    lists = values.cast(pl.List(pl.String)) if text is None else text.str.split(feature.separator or ",")
    if text is not None:
        lists = lists.to_frame("v").select(pl.when(~_absent(text, spec)).then(pl.col("v")))["v"]
    flat = lists.to_frame("id").with_row_index("row").explode("id")
    if spec.strip:
        flat = flat.with_columns(pl.col("id").str.strip_chars())
    flat = flat.filter(pl.col("id").is_not_null() & ~pl.col("id").is_in(["", *spec.missing]))
    if feature.weighted:
        flat = _split_weights(flat, feature, rejected)
    if feature.max_ids is not None:
        flat = flat.filter(pl.int_range(pl.len()).over("row") < feature.max_ids)
    ends = np.cumsum(np.bincount(flat["row"].to_numpy(), minlength=len(values)))
    offsets = np.concatenate([[0], ends])
    result = [
        as_lists(hash_ids(flat["id"], feature.seed), offsets).alias(f"hash:{feature.name}"),
        as_lists(flat["id"], offsets).alias(f"id:{feature.name}"),
    ]
    if feature.weighted:
        result.append(as_lists(flat["weight"], offsets).alias(f"weight:{feature.name}"))
    return result


def _split_weights(flat: pl.DataFrame, feature: SparseSpec, rejected: _Rejected) -> pl.DataFrame:
    """``id<sep>weight`` apart; an element without a weight weighs 1."""
    parts = pl.col("id").str.splitn(feature.weight_separator or ":", 2).struct
    flat = flat.with_columns(parts.field("field_0").alias("id"), parts.field("field_1").alias("text"))
    weight = pl.col("text").fill_null("1").cast(pl.Float64, strict=False)
    flat = flat.with_columns(pl.when(weight.abs() <= FLOAT32_MAX).then(weight).cast(pl.Float32).alias("weight"))
    wrong = flat.filter(pl.col("weight").is_null())
    first = dict(zip(wrong["row"].to_list()[::-1], wrong["text"].to_list()[::-1], strict=True))
    mask = np.zeros(len(rejected.lines), bool)
    mask[wrong["row"].to_numpy()] = True
    rejected.add(
        mask, f"a weight of {feature.column} is not a finite number",
        lambda i: f"{feature.column} has weight {_shown(first[i])}, expected a finite number", feature.column,
    )  # fmt: skip
    return flat.drop("text")


def as_lists(values: pl.Series, offsets: np.ndarray) -> pl.Series:
    """Row i of the result holds values[offsets[i]:offsets[i + 1]]."""
    arrow = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values.to_arrow())
    return pl.Series(values.name, arrow)


def _day(raw: pl.DataFrame, texts: dict[str, pl.Series], spec: DataSpec, rejected: _Rejected) -> pl.Series:
    """The row's day: the number in ``data.day_column``, or days since 1970-01-01 for dates and timestamps."""
    column = spec.day_column or spec.timestamp or ""
    values = raw[column]
    text = texts.get(column, pl.Series([None], dtype=pl.String).new_from_index(0, raw.height))
    if values.dtype.is_temporal():
        day = values.cast(pl.Date, strict=False).cast(pl.Int32)
    else:
        number = text.cast(pl.Float64, strict=False)
        frame = pl.DataFrame({"number": number, "text": text})
        # 1e11 seconds lie in the year 5138: larger numbers are milliseconds.
        seconds = pl.when(pl.col("number").abs() > 1e11).then(pl.col("number") / 1000).otherwise(pl.col("number"))
        whole = pl.col("number") if spec.day_column else (seconds / SECONDS_PER_DAY)
        date = pl.col("text").str.slice(0, 10).str.to_date("%Y-%m-%d", strict=False).cast(pl.Int32)
        day = frame.select(whole.floor().cast(pl.Int32, strict=False).fill_null(date))["number"]
    bad = day.is_null().to_numpy()
    rejected.add(
        bad, f"{column} is no day", lambda i: f"{column} is {_shown(text[i])}, expected a number or YYYY-MM-DD", column,
    )  # fmt: skip
    return day.fill_null(0).alias(DAY)


def row_hashes(frame: pl.DataFrame, spec: DataSpec) -> np.ndarray:
    """Stable hash (uint64) of each typed row's features.

    The label is left out: with it, equal rows that differ in the click alone fall on different sides of the split,
    and the side of a row tells its label.
    """
    single = [f"hash:{sparse.name}" for sparse in spec.sparse if not sparse.multi]
    dense = [f"dense:{dense.name}" for dense in spec.dense]
    filled = frame.select(pl.col(dense).fill_null(float("nan")) + 0.0, pl.col(single).fill_null(0))
    words = [filled[name].to_numpy().view(np.uint64) for name in dense]
    for sparse in spec.sparse:
        name = f"hash:{sparse.name}"
        words.append((_fold(frame[name]) if sparse.multi else filled[name]).to_numpy())
    return hash_rows(words)


def _fold(lists: pl.Series) -> pl.Series:
    """One UInt64 per list: its elements' hashes, shifted by their place, added up."""
    frame = lists.to_frame("h").with_row_index("row").explode("h").drop_nulls()
    place = pl.int_range(pl.len()).over("row").cast(pl.UInt64)
    folded = frame.with_columns(pl.col("h") // (place * 2 + 1)).group_by("row").agg(pl.col("h").sum())
    result = np.zeros(len(lists), np.uint64)
    result[folded["row"].to_numpy()] = folded["h"].to_numpy()
    return pl.Series(result)
