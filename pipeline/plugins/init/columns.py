"""What a column of a log holds, by its values alone: numbers, times, a tail, lists of ids, maps, vectors.

For ``nightjar init``, which guesses a schema from a sample. Ingestion goes by the schema (``schema.DataSpec``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np
import polars as pl

from pipeline.core.units import plural
from pipeline.ingest.times import standard
from pipeline.ingest.values import strings_of

# Words that stand for a missing value wherever they are a whole field, and those that do so in a column of numbers.
MISSING_WORDS = frozenset(("?", "\\N", "NULL", "null", "N/A", "n/a", "#N/A", "NaN", "nan"))
MISSING_NUMBERS = MISSING_WORDS | {"NA", "None", "none", "-", "."}
# Share of rows with a key, on average, below which objects are maps and not records.
PRESENT = 0.7
LEAST_WIDTH = 2
_TEXT_SEPARATORS = (";", "|", " ", ",")
_NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
_FRACTION = r"[.eE]"
# Rows of text that are looked at.
LOOKED_AT = 5000


def with_maps(frame: pl.DataFrame) -> pl.DataFrame:
    """Return ``frame`` with columns of objects as lists of pairs if their keys are ids: numbers, mostly absent."""
    columns = []
    for values in frame.get_columns():
        fields = values.dtype.fields if isinstance(values.dtype, pl.Struct) else []
        if len(fields) > 1 and all(field.dtype.is_numeric() or field.dtype == pl.Null for field in fields):
            present = values.struct.unnest().select(pl.all().is_not_null().mean()).row(0)
            # Rows without an object lack every key, so they do not count in the share of present keys.
            if sum(present) / len(present) < PRESENT * (1 - values.null_count() / len(values)):
                values = _pairs_of_objects(values)
        columns.append(values)
    return pl.DataFrame(columns)


def _pairs_of_objects(values: pl.Series) -> pl.Series:
    # Every row of a Polars struct has all keys of the log: the row's own keys are those with a value.
    rows: list[list[dict[str, object]] | None] = []
    for row in values.to_list():
        if row is None:
            rows.append(None)
            continue
        pairs = [{"key": key, "value": value} for key, value in row.items() if value is not None]
        rows.append(pairs)
    kind = pl.List(pl.Struct({"key": pl.String, "value": pl.Float64}))
    return pl.Series(values.name, rows, dtype=kind, strict=False)


def is_map(kind: pl.DataType) -> bool:
    """Whether a column of ``kind`` holds lists of a key and a number."""
    if not isinstance(kind, pl.List | pl.Array) or not isinstance(kind.inner, pl.Struct):
        return False
    fields = kind.inner.fields
    return len(fields) == 2 and fields[1].dtype.is_numeric() and not fields[0].dtype.is_nested()


def width_of(values: pl.Series) -> int | None:
    """Return the length of the vectors in a column of lists; None if lengths differ or all numbers are whole."""
    # A row without a vector says nothing about the width.
    lengths = values.list.len().drop_nulls()
    if not values.dtype.inner.is_float() or lengths.n_unique() != 1:  # type: ignore[attr-defined]
        return None
    width = int(lengths[0])
    if width < LEAST_WIDTH or not holds_numbers(values):
        return None
    return width


def holds_numbers(values: pl.Series) -> bool:
    """Whether a column of lists holds numbers of which some are not whole: weights, or vectors.

    Numbers that are all whole are taken for ids, which some programs write as floating-point numbers.
    """
    if not values.dtype.inner.is_float():  # type: ignore[attr-defined]
        return False
    flat = values.explode().drop_nulls()
    # A column without a single number does not show that its numbers are whole.
    return not len(flat) or not (flat == flat.floor()).all()


def weights_of(columns: Mapping[str, pl.Series], ids: Sequence[str], numbers: Sequence[str]) -> dict[str, str]:
    """Return each id column's column of weights: one of ``numbers`` with equally long lists, whose lengths vary."""
    chosen: dict[str, str] = {}
    for name in numbers:
        lengths = columns[name].list.len().fill_null(0)
        if lengths.n_unique() < 2:
            continue
        alike = [one for one in ids if one not in chosen and (columns[one].list.len().fill_null(0) == lengths).all()]
        if alike:
            # Take the candidate that shares the longest start of its name: item_ids and item_weights.
            chosen[max(alike, key=lambda one: len(os.path.commonprefix([one, name])))] = name
    return chosen


def text_vector(text: pl.Series) -> tuple[int, str] | None:
    """Return (width, separator) of the vectors that a column of text holds; None if it holds none."""
    some = text.drop_nulls().head(LOOKED_AT).str.strip_chars().str.strip_prefix("[").str.strip_suffix("]")
    if not len(some):
        return None
    for separator in _TEXT_SEPARATORS:
        parts = some.str.split(separator)
        widths = parts.list.len()
        if widths.n_unique() != 1 or widths[0] <= LEAST_WIDTH:
            continue
        flat = parts.explode()
        if flat.str.contains(_NUMBER).all() and flat.str.contains(_FRACTION).mean() > 0.5:  # type: ignore[operator]
            return int(widths[0]), separator
    return None


# Least share of numbers among the values of a column of numbers.
NUMERIC_SHARE = 0.995
BINS = 32
# Share of the earliest times that do not count, because a missing time may be written as 0.
EARLIEST = 0.01
_LIST_SEPARATORS = ("|", ";", ",", " ")
_TIME_NAMES = re.compile(r"time|date|stamp|created|(^|_)(ts|at|day|dt)$", re.I)
# Parts of a second in which numbers may count the time since 1970.
_UNITS = (1, 1e3, 1e6, 1e9)
# Seconds since 1970, from 1998 to 2103. Other numbers are not times of a log.
_EARLIEST, _LATEST = 9e8, 4.2e9
_ISO = r"^\d{4}-\d\d-\d\d([ T]\d\d(:\d\d(:\d\d(\.\d+)?)?)?(Z|[+-]\d\d:?\d\d)?)?$"
# Apache encloses its times in brackets.
_MONTH = "(?i:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)"
_OTHER_DATES = (
    r"^(\d{1,2}[./-]\d{1,2}[./-]\d{4}|\d{4}[./]\d{1,2}[./]\d{1,2}"
    rf"|\[?\d{{1,2}}[/ -]{_MONTH}[/ -]\d{{4}})(\D|$)"
)
_OTHER_OFFSET = r":\d\d(?:\.\d+)?( ?)([+-]\d\d:?\d\d)\]?$"
_HOURS = ("%H:%M", "%H:%M:%S", "%H:%M:%S%.f", "%I:%M %p", "%I:%M:%S %p")
_CLOCKS = ["", *(" " + hours for hours in _HOURS), *("T" + hours for hours in _HOURS), ":%H:%M:%S"]
_NUMBERED_ORDERS = (("%d", "%m", "%Y"), ("%m", "%d", "%Y"), ("%Y", "%m", "%d"))
_NAMED_ORDERS = (("%d", "%b", "%Y"),)
_COMMAS, _POINTS, _WHOLE = r"^[+-]?\d*,\d+$", r"^[+-]?\d*\.\d+$", r"^[+-]?\d+$"
_TWO_CLASSES = "0 1", "0.0 1.0", "false true", "False True", "FALSE TRUE", "no yes", "No Yes", "n y", "N Y"
_WEIGHTED = r"^[^:]+:-?\d+(\.\d+)?$"


class SampleColumn:
    """A column of the sample as text, null where missing; ``lists``: it holds lists, ``map``: of keys and numbers."""

    def __init__(self, values: pl.Series, missing: Iterable[str]) -> None:
        self.name, self.kind = values.name, values.dtype
        self.lists = isinstance(values.dtype, pl.List | pl.Array)
        self.map = is_map(values.dtype)
        self.nested = not self.map and (
            values.dtype == pl.Struct or (self.lists and values.dtype.inner.is_nested())  # type: ignore[attr-defined]
        )
        self.values = values
        if self.lists or self.nested:
            text = pl.Series(self.name, [None] * len(values), dtype=pl.String)
        else:
            text = strings_of(values)
        absent = ["", *missing]
        self.text = (
            text.to_frame().select(pl.when(~pl.col(self.name).is_in(absent)).then(pl.col(self.name))).to_series()
        )

    @cached_property
    def present(self) -> pl.Series:
        """The values that are not missing."""
        return self.text.drop_nulls()

    @cached_property
    def numbers(self) -> pl.Series:
        """The values as Float64, null where they are not numbers."""
        numbers = self.text.cast(pl.Float64, strict=False)
        return numbers.set(~numbers.is_finite().fill_null(True), None)

    @cached_property
    def distinct(self) -> int:
        return self.present.n_unique()

    @property
    def is_numeric(self) -> bool:
        """Whether nearly all values are numbers, written as numbers are."""
        count = len(self.present)
        # Codes such as 007 are written with zeros in front, numbers are not.
        written = self.kind.is_numeric() or not self.present.str.contains(r"^[+-]?0\d").any()
        return count > 0 and written and len(self.numbers.drop_nulls()) >= NUMERIC_SHARE * count

    @cached_property
    def is_whole(self) -> bool:
        """Whether all numbers are whole."""
        numbers = self.numbers.drop_nulls()
        return bool((numbers == numbers.floor()).all())

    @property
    def missing_share(self) -> float:
        return 1 - len(self.present) / max(len(self.text), 1)

    def seen(self) -> str:
        """Say how many values there are, of what kind, and how many are missing."""
        words = [f"{self.distinct:,} distinct"]
        if self.is_numeric:
            numbers = self.numbers.drop_nulls()
            low, high = numbers.to_numpy().min(), numbers.to_numpy().max()
            words.append(f"{low:g} to {high:g}")
        elif self.distinct:
            top = self.present.value_counts(sort=True).row(0)
            words.append(f"most often {shorten(top[0])} ({top[1] / len(self.text):.0%})")
        if self.missing_share:
            words.append(f"{max(self.missing_share, 0.001):.1%} missing")
        return ", ".join(words)


def shorten(text: str) -> str:
    """Put ``text`` in quotes, at most 30 characters of it, on one line."""
    return repr(text if len(text) <= 30 else f"{text[:27]}...")


def without_broken_times(column: SampleColumn) -> SampleColumn:
    """Return ``column``; if its values are times except for a few, those become missing, as their rows will be."""
    if not len(column.present) or column.kind.is_temporal():
        return column
    # Masks of the values that are times, for each way to write them: as text, or as seconds or parts of them since
    # 1970.
    masks = list[pl.Series]()
    if column.kind == pl.String:
        masks.append(column.text.str.contains(_ISO))
    if column.is_numeric and _TIME_NAMES.search(column.name):
        for unit in _UNITS:
            masks.append(column.numbers.is_between(_EARLIEST * unit, _LATEST * unit, closed="left"))
    for good in masks:
        share = float(good.fill_null(False).mean() or 0)  # type: ignore[arg-type]
        if NUMERIC_SHARE <= share < 1:
            return SampleColumn(column.text.set(~good.fill_null(False), None), ())
    return column


def without_broken_classes(column: SampleColumn) -> SampleColumn:
    """Return ``column``; if it says yes and no except for a few words, those become missing, as their rows will be."""
    two = find_two_classes(column, NUMERIC_SHARE)
    if two is None:
        return column
    others = SampleColumn(column.present.filter(~column.present.is_in(two)), ())
    # If other values are numbers, the column is a count.
    if not len(others.present) or len(others.numbers.drop_nulls()):
        return column
    return SampleColumn(column.text.set(~column.text.is_in(two), None), ())


def find_two_classes(column: SampleColumn, share: float) -> list[str] | None:
    """Find the two values, a yes and a no, that are at least ``share`` of those of ``column``; None if it has none."""
    # The counts need a name that no column has: one may be called "count", the default.
    counts = column.present.value_counts(sort=True, name="rows of the sample")
    two: list[str] = counts[column.name][:2].to_list()
    if set(two) not in [set(pair.split()) for pair in _TWO_CLASSES]:
        return None
    if int(counts["rows of the sample"][:2].sum()) < share * len(column.present):
        return None
    return two


def describe_others(column: SampleColumn, values: Sequence[str]) -> str:
    """Say how many rows of ``column`` have other values than ``values``: "2 rows of 100 ('x', 'y')"; "" for none."""
    others = column.present.filter(~column.present.is_in(list(values)))
    if not len(others):
        return ""
    different = others.unique(maintain_order=True)
    shown = list(map(shorten, different[:3]))
    if len(different) > len(shown):
        shown.append("...")
    return f"{plural(len(others), 'row')} of {len(column.text):,} ({', '.join(shown)})"


def is_time(column: SampleColumn) -> bool:
    """Whether a column holds points in time, in a form that ``data.timestamp`` reads."""
    if column.kind.is_temporal():
        return column.kind != pl.Time and column.kind != pl.Duration
    if not len(column.present) or column.missing_share > 1 - NUMERIC_SHARE:
        return False
    if column.present.str.contains(_ISO).all():
        return True
    if not (column.is_numeric and column.is_whole and _TIME_NAMES.search(column.name)):
        return False
    if (column.present.str.len_bytes() == 8).all():
        return not column.present.str.to_date("%Y%m%d", strict=False).has_nulls()
    low = float(column.numbers.min() or 0)  # type: ignore[arg-type]
    high = float(column.numbers.max() or 0)  # type: ignore[arg-type]
    return any(_EARLIEST * unit <= low and high < _LATEST * unit for unit in _UNITS)


def form_of(column: SampleColumn) -> tuple[str, str] | None:
    """Return how a column of dates such as 31.01.2026 or 31/Jan/2026:10:00:00 +0100 is written, and another reading.

    The second is how else all could be read, "" if the values leave no doubt. None for other columns. The day comes
    first if nothing decides. A few values may have another form.
    """
    if column.kind != pl.String or column.missing_share > 1 - NUMERIC_SHARE or not is_other_date(column):
        return None
    counts = column.present.value_counts(sort=True)
    values, rows = counts[column.name], counts["count"]
    example = values.filter(values.str.contains(_OTHER_DATES))[0]
    orders = _NAMED_ORDERS if re.search(_MONTH, example[:8]) else _NUMBERED_ORDERS
    sign = next(character for character in example if character in "./- ")
    before, after = ("[", "]") if example.startswith("[") else ("", "")
    offset = re.search(_OTHER_OFFSET, example)
    if offset is not None:
        after = f"{offset[1]}%z{after}"
    for clock in _CLOCKS:
        # Take the form that reads most rows. On a tie the first one wins, in which the day comes first.
        fitting, most = list[str](), 0
        for order in orders:
            form = before + sign.join(order) + clock + after
            count = int(rows.filter(standard(values, values, form).is_not_null()).sum())
            if count > most:
                fitting, most = [form], count
            elif count == most:
                fitting.append(form)
        if most >= NUMERIC_SHARE * int(rows.sum()):
            return fitting[0], fitting[1] if len(fitting) > 1 else ""
    return None


def as_written(column: SampleColumn, form: str) -> tuple[SampleColumn, tuple[str, ...]]:
    """Bring a column of times of ``form`` to the usual form, by the clock that they show.

    Returns:
        The times as YYYY-MM-DD HH:MM:SS, and the offsets from UTC that they name, in order.
    """
    text, offsets = column.text, set[str]()
    if form.rstrip("]").endswith("%z"):
        offsets = set(text.str.extract(_OTHER_OFFSET, 2).drop_nulls().unique())
        text = text.str.replace(r" ?[+-]\d\d:?\d\d(\]?)$", "$1")
        form = re.sub(" ?%z", "", form)
    return SampleColumn(standard(text, text, form), ()), tuple(sorted(offsets))


def zone_of(offsets: Sequence[str]) -> str | None:
    """Return the time zone whose clocks show ``offsets``; None if these are several, or no whole hours."""
    if len(offsets) != 1 or not offsets[0].endswith("00"):
        return None
    hours = int(offsets[0][:3])
    # The names of these zones have the sign of POSIX: west of Greenwich is +.
    if not hours or not -12 <= hours <= 14:
        return None
    return f"Etc/GMT{-hours:+d}"


def is_other_date(column: SampleColumn) -> bool:
    """Whether a column holds dates that ``data.time_format`` must describe, such as 31.01.2026 or 1/Jan/2026."""
    share = float(column.present.str.contains(_OTHER_DATES).mean() or 0)  # type: ignore[arg-type]
    return share >= NUMERIC_SHARE


def comma_columns(frame: pl.DataFrame, missing: Iterable[str]) -> list[str]:
    """Return columns of text whose numbers have a decimal comma; none if those of another column have a point."""
    found = list[str]()
    for values in frame.select(pl.col(pl.String)).get_columns():
        present = values.drop_nulls()
        present = present.filter(~present.is_in(["", *missing]))
        if not len(present):
            continue
        points = float(present.str.contains(_POINTS).mean())  # type: ignore[arg-type]
        commas = float(present.str.contains(_COMMAS).mean())  # type: ignore[arg-type]
        whole = float(present.str.contains(_WHOLE).mean())  # type: ignore[arg-type]
        if points > 0.5:
            return []
        if commas > 0.5 and commas + whole >= NUMERIC_SHARE:
            found.append(values.name)
    return found


def first_and_last_day(time: SampleColumn) -> tuple[str, str]:
    """Return the days of the earliest and the latest of a column of times, YYYY-MM-DD, without a few times of 1970."""
    days = list[str]()
    if time.is_numeric and not (time.present.str.len_bytes() == 8).all():
        first = time.numbers.quantile(EARLIEST) or 0
        for number in (first, float(time.numbers.max() or 0)):  # type: ignore[arg-type]
            # Seconds since 1970 have ten digits until 2286. Three digits more are milliseconds, six more microseconds.
            seconds = number / 10 ** max(3 * ((len(f"{number:.0f}") - 10 + 2) // 3), 0)
            days.append(str(np.datetime64(int(seconds), "s").astype("datetime64[D]")))
        return days[0], days[1]
    ordered = time.present.sort()
    if ordered.is_empty():
        return "", ""
    for place in (int(EARLIEST * len(ordered)), -1):
        text = str(ordered[place])
        # Without hyphens it is YYYYMMDD.
        days.append(text[:10] if "-" in text else f"{text[:4]}-{text[4:6]}-{text[6:8]}")
    return days[0], days[1]


def list_settings(column: SampleColumn) -> dict[str, str]:
    """Return ``separator`` and ``weight_separator`` of a column of text that holds lists; {} if it holds single ids."""
    whole = column.distinct
    for separator in _LIST_SEPARATORS:
        parts = column.present.str.split(separator)
        elements = parts.explode().drop_nulls()
        if float(parts.list.len().mean() or 0) < 1.2 or whole < 20:  # type: ignore[arg-type]
            continue
        weighted = float(elements.filter(elements != "").str.contains(_WEIGHTED).mean() or 0) > NUMERIC_SHARE  # type: ignore[arg-type]
        ids = elements.str.split(":").list.first() if weighted else elements
        # Ids recur in other lists; parts of free text mostly do not.
        if ids.n_unique() < whole / 2:
            settings = {"separator": separator}
            if weighted:
                settings["weight_separator"] = ":"
            return settings
    return {}


def bins_of(numbers: pl.Series) -> pl.Series:
    """Return the bin of each number, of BINS that are as even as the values let them be; null where missing."""
    bounds = np.unique(np.quantile(numbers.drop_nulls(), np.arange(1, BINS) / BINS))
    return pl.Series(np.searchsorted(bounds, numbers.to_numpy(), side="right")).set(numbers.is_null(), None)
