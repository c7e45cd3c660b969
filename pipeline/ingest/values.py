"""Fields to typed values: text, numbers, and the rows that are rejected on the way."""

from __future__ import annotations

import numpy as np
import polars as pl

from pipeline.ingest.rejects import RejectedRows, shown
from pipeline.ingest.schema import DataSpec

FLOAT32_MAX = 3.4028234663852886e38
# Floats below this hold every whole number.
WHOLE = 2.0**53


def text_of(values: pl.Series, spec: DataSpec, rejected: RejectedRows) -> pl.Series:
    """``values`` as strings; float NaN and undecodable bytes become null (the latter are rejected).

    A whole float is written as the whole number it is: a column of ids of which one is missing is often stored so.
    """
    text = strings_of(values)
    if values.dtype == pl.Binary:
        undecodable = (text.is_null() & values.is_not_null()).to_numpy()
        rejected.add(undecodable, "invalid UTF-8", lambda _: f"{values.name} is not valid UTF-8", values.name)
    return text.str.strip_chars() if spec.strip else text


def strings_of(values: pl.Series) -> pl.Series:
    """``values``, no lists, as strings, null where there is none."""
    if values.dtype == pl.Boolean:
        values = values.cast(pl.Int8)
    if values.dtype == pl.Binary:
        texts: list[str | None] = []
        for value in values:
            try:
                texts.append(None if value is None else value.decode())
            except UnicodeDecodeError:
                texts.append(None)
        return pl.Series(values.name, texts, dtype=pl.String)
    if not values.dtype.is_float():
        return values if values.dtype == pl.String else values.cast(pl.String, strict=False)
    values = values.fill_nan(None)
    whole = (values.floor() == values) & (values.abs() < WHOLE)
    return values.cast(pl.String).zip_with(~whole.fill_null(False), values.cast(pl.Int64, strict=False).cast(pl.String))


def absent_in(text: pl.Series, spec: DataSpec) -> pl.Series:
    """Where ``text`` is null or one of the strings that stand for a missing value."""
    absent = text.is_null()
    for word in spec.missing:
        absent |= (text == word).fill_null(False)
    return absent


def number_of(
    values: pl.Series, text: pl.Series | None, column: str, spec: DataSpec, rejected: RejectedRows
) -> pl.Series:
    """``values`` as finite Float64, null where missing."""
    if text is None:
        every = np.ones(len(values), bool)
        rejected.add(every, f"{column} is a list", lambda _: f"{column} is a list, not a number", column)
        return nulls(pl.Float64, len(values))
    if values.dtype.is_numeric() or values.dtype == pl.Boolean:
        number = values.cast(pl.Float64, strict=False).fill_nan(None)
    else:
        # Casts read a point alone: where another sign is before the decimals, a point makes a text no number.
        plain = text
        if spec.decimal != ".":
            plain = text.str.replace_all(".", "?", literal=True).str.replace(spec.decimal, ".")
        number = plain.cast(pl.Float64, strict=False)
    finite = (number.abs() <= FLOAT32_MAX).fill_null(False)
    if finite.all() and not spec.number_is_missing:
        return number
    absent = absent_in(text, spec)
    rejected.add(
        ~(finite | absent).to_numpy(),
        f"{column} is not a finite number",
        lambda i: f"{column} is {shown(text[i])}, expected a finite number",
        column,
    )
    return number.zip_with(finite & ~absent, nulls(pl.Float64, len(number)))


def plain_numbers(raw: pl.DataFrame, spec: DataSpec) -> dict[str, pl.Series]:
    """What ``number_of`` makes of columns that are finite numbers or null and nothing but numbers, as Float64."""
    kinds = {name: raw[name].dtype for name in sorted(spec.number_columns)}
    names = [name for name, kind in kinds.items() if kind.is_integer() or kind.is_float()]
    if not names:
        return {}
    numbers = raw.select(pl.col(names).cast(pl.Float64))
    bounds = numbers.select(pl.all().abs().max()).row(0)
    finite = numbers.select(pl.all().is_finite().all()).row(0)
    plain = {}
    for name, bound, is_finite in zip(names, bounds, finite, strict=True):
        if is_finite and (bound is None or bound <= FLOAT32_MAX):
            plain[name] = numbers[name]
    return plain


def elements_of(text: pl.Series, separator: str | None) -> pl.Series:
    """Return a list of the elements of each text, which ``separator`` divides; without one, the text is one element."""
    if separator:
        return text.str.split(separator)
    return text.reshape((-1, 1)).arr.to_list()


def nulls(kind: type[pl.DataType] | pl.DataType, length: int) -> pl.Series:
    """``length`` nulls of type ``kind``."""
    return pl.Series([None], dtype=kind).new_from_index(0, length)


def equals(values: pl.Series, word: str) -> pl.Series:
    """Where numbers have the value that ``word`` writes."""
    try:
        return (values == float(word)).fill_null(False)
    except ValueError:
        return pl.Series([False]).new_from_index(0, len(values))
