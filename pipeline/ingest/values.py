"""Fields to typed values: text, numbers, and the rows that are rejected on the way, which the quarantine lists.

Parsers have limits of their own, and what one raises for a row must not end a night. Whatever it raises,
``by_halves`` finds the rows that can be read, and the others are rejected. Faults of the machine, and messages for
the user, are raised as they are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

import numpy as np
import polars as pl

from pipeline.core.errors import NightjarError
from pipeline.core.retrying import passes
from pipeline.core.units import printable
from pipeline.ingest.schema import DataSpec, is_number

# Records that may fail one by one before any is read. If more fail, the code or the whole file is at fault, and taking
# a block apart record by record would take hours.
MOST_AT_FIRST = 1000
Result = TypeVar("Result")


@dataclass(frozen=True)
class Reject:
    """A line (1-based) that is no row. ``kind`` groups reasons; ``reason`` is what the quarantine says.

    ``column``: the one that is wrong; "" if it is the line. ``of_day``: whether it is of the wanted day, which is
    unknown for a line without a day in a log of many.
    """

    line: int
    kind: str
    reason: str
    column: str = ""
    of_day: bool = True


class RejectedRows:
    """Which rows are rejected, and why: the first complaint about a row counts."""

    def __init__(self, lines: np.ndarray) -> None:
        self.lines = lines
        self.bad = np.zeros(len(lines), bool)
        self.rejects: list[Reject] = []

    def add(self, mask: np.ndarray, kind: str, reason: Callable[[int], str] | None = None, column: str = "") -> None:
        """Reject the rows of ``mask`` that are not rejected yet.

        ``reason``: says why for a row number of the block; None: ``kind`` says it.
        """
        if not mask.any():
            return
        for index in np.flatnonzero(mask & ~self.bad):
            why = kind if reason is None else reason(int(index))
            self.rejects.append(Reject(int(self.lines[index]), kind, why, column))
        self.bad |= mask

    def add_values(self, wrong: pl.DataFrame, kind: str, reason: Callable[[str | None], str], column: str) -> None:
        """Reject the rows of ``wrong``, columns row and value; ``reason`` says why for a row's first wrong value."""
        mask = np.zeros(len(self.lines), bool)
        mask[wrong["row"].to_numpy()] = True
        # Backwards, so that the first of several values of a row is set last and stays.
        backwards = wrong.reverse()
        first = dict(zip(backwards["row"].to_list(), backwards["value"].to_list(), strict=True))
        self.add(mask, kind, lambda row: reason(first[row]), column)


def is_of_rows(error: BaseException) -> bool:
    """Whether ``error``, of reading or parsing rows, may be due to what a row holds."""
    # Errors of the system have a number; those of parsers do not.
    if isinstance(error, OSError) and error.errno is not None:
        return False
    return not isinstance(error, NightjarError) and not passes(error)


def by_halves(read: Callable[[int, int], Result], count: int) -> Iterator[tuple[int, Result | BaseException]]:
    """Read ``count`` records in as few parts as it takes, so that each failure costs one record.

    A part that fails is halved until one record is left: n records of which one is bad are read in about log2(n) parts.
    Records that fail only together, none of them alone, end up in different parts.

    Args:
        read: Returns what is made of the records from one number up to another. A pure function.

    Yields:
        For each part, in order, the number of its first record, and what ``read`` made of it, or the error of its only
        record.

    Raises:
        Exception: A fault of the machine, or one that nearly all records meet.
    """
    parts, failed, any_read = [(0, count)], 0, False
    while parts:
        start, stop = parts.pop()
        try:
            found = read(start, stop)
        except (Exception, pl.exceptions.PanicException) as error:
            if start == stop or not is_of_rows(error):
                raise
            if stop - start > 1:
                # The first half is on top of the stack, so that parts come in the order of their records.
                middle = (start + stop) // 2
                parts += [(middle, stop), (start, middle)]
                continue
            failed += 1
            if failed >= MOST_AT_FIRST and not any_read:
                raise
            yield start, error
        else:
            any_read = True
            yield start, found


def not_read(line: int, error: BaseException, *, of_day: bool = True) -> Reject:
    """Return the reject of a line that no parser takes; ``of_day``: see ``Reject``."""
    message = printable(str(error).split("\n", 1)[0], 100)
    return Reject(line, "unreadable", f"the line cannot be read: {type(error).__name__}: {message}", of_day=of_day)


def shown(value: str | None) -> str:
    """Quote ``value`` for a message: no longer than 60 characters."""
    if value is None:
        return "missing"
    if len(value) > 60:
        value = value[:57] + "..."
    return repr(value)


class Quarantine:
    """``quarantine.jsonl``: one JSON object per row that did not parse: file, line, reason."""

    def __init__(self, sink: BinaryIO) -> None:
        self.sink = sink
        self.rows = 0
        self.kinds: Counter[str] = Counter()
        self.columns: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    def add(self, file: str, rejects: list[Reject]) -> None:
        """Write ``rejects`` of ``file``."""
        lines: list[str] = []
        for reject in rejects:
            self.kinds[reject.kind] += 1
            self.columns[reject.column] += 1
            self.examples.setdefault(reject.kind, f"{file} line {reject.line}: {reject.reason}")
            record: dict[str, Any] = {"file": file, "line": reject.line, "reason": reject.reason}
            lines.append(json.dumps(record, ensure_ascii=False) + "\n")
        self.rows += len(rejects)
        # What a connector calls its parts may have lone surrogates, which cannot be encoded.
        self.sink.write("".join(lines).encode(errors="replace"))


FLOAT32_MAX = 3.4028234663852886e38
# Floats below this hold every whole number.
WHOLE = 2.0**53


def text_of(values: pl.Series, spec: DataSpec, rejected: RejectedRows) -> pl.Series:
    """Return ``values`` as strings; float NaN and undecodable bytes become null (rows with such bytes are rejected).

    A whole float is written as the whole number it is: a column of ids of which one is missing is often stored so.
    """
    text = strings_of(values)
    if values.dtype == pl.Binary:
        undecodable = (text.is_null() & values.is_not_null()).to_numpy()
        rejected.add(undecodable, "invalid UTF-8", lambda _: f"{values.name} is not valid UTF-8", values.name)
    if spec.strip:
        text = text.str.strip_chars()
    return text


def strings_of(values: pl.Series) -> pl.Series:
    """Return ``values``, which are no lists, as strings, null where there is none."""
    if values.dtype == pl.Boolean:
        values = values.cast(pl.Int8)
    if values.dtype == pl.Duration:
        # Polars writes no text for a duration: it is the number of its units.
        values = values.cast(pl.Int64)
    if values.dtype == pl.Binary:
        texts: list[str | None] = []
        for value in values:
            try:
                texts.append(None if value is None else value.decode())
            except UnicodeDecodeError:
                texts.append(None)
        return pl.Series(values.name, texts, dtype=pl.String)
    if values.dtype == pl.String:
        return values
    if not values.dtype.is_float():
        return values.cast(pl.String, strict=False)
    values = values.fill_nan(None)
    whole = (values.floor() == values) & (values.abs() < WHOLE)
    return values.cast(pl.String).zip_with(~whole.fill_null(False), values.cast(pl.Int64, strict=False).cast(pl.String))


def absent_in(text: pl.Series, spec: DataSpec) -> pl.Series:
    """Return where ``text`` is null or one of the strings that stand for a missing value."""
    absent = text.is_null()
    for word in spec.missing:
        absent |= (text == word).fill_null(False)
    return absent


def number_of(
    values: pl.Series, text: pl.Series | None, column: str, spec: DataSpec, rejected: RejectedRows
) -> pl.Series:
    """Return ``values`` as finite Float64, null where missing."""
    if text is None:
        every = np.ones(len(values), bool)
        rejected.add(every, f"{column} is a list", lambda _: f"{column} is a list, not a number", column)
        return nulls(pl.Float64, len(values))
    if values.dtype.is_numeric() or values.dtype == pl.Boolean:
        number = values.cast(pl.Float64, strict=False).fill_nan(None)
    else:
        # Casts read only a point: if another sign is before the decimals, a text with a point is no number.
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
    """Return ``number_of`` of the columns that are finite numbers or null and nothing but numbers, as Float64."""
    # Convert all columns in one call of Polars, because in wide logs the calls would take most of the time.
    names = list[str]()
    for name in sorted(spec.number_columns):
        kind = raw[name].dtype
        if kind.is_integer() or kind.is_float():
            names.append(name)
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
    """Return ``length`` nulls of type ``kind``."""
    return pl.Series([None], dtype=kind).new_from_index(0, length)


def two_classes(
    values: pl.Series, text: pl.Series | None, positive: str, negative: str
) -> tuple[pl.Series, pl.Series, pl.Series]:
    """Return where labels are ``positive``, where they are ``negative``, and their text for messages.

    Numbers are compared by value, because a column of numbers may hold 1 as 1.0. ``text``: None for lists.
    """
    if text is None:
        # A list is no label, so the quarantine shows its text.
        text = values.cast(pl.List(pl.String)).list.join(",")
    masks = []
    for word in (positive, negative):
        if not values.dtype.is_numeric():
            masks.append((text == word).fill_null(False))
        elif is_number(word):
            masks.append((values == float(word)).fill_null(False))
        else:
            masks.append(pl.Series([False]).new_from_index(0, len(values)))
    return masks[0], masks[1], text
