"""What a column of several values a row is: ids, weights of ids, a map of ids to weights, or a vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

# Share of rows with a key, on average, below which objects are maps and no records.
PRESENT = 0.7
LEAST_WIDTH = 2
_TEXT_SEPARATORS = (";", "|", " ", ",")
_NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
_FRACTION = r"[.eE]"
# Rows of text that are looked at.
LOOKED_AT = 5000


def with_maps(frame: pl.DataFrame) -> pl.DataFrame:
    """``frame`` with columns of objects as lists of pairs, where their keys are ids: numbers, most of them absent."""
    columns = []
    for values in frame.get_columns():
        fields = values.dtype.fields if isinstance(values.dtype, pl.Struct) else []
        if len(fields) > 1 and all(field.dtype.is_numeric() or field.dtype == pl.Null for field in fields):
            present = values.struct.unnest().select(pl.all().is_not_null().mean()).row(0)
            if sum(present) / len(present) < PRESENT * (1 - values.null_count() / len(values)):
                pairs: list[list[dict[str, object]] | None] = []
                for row in values.to_list():
                    if row is None:
                        pairs.append(None)
                    else:
                        pairs.append([{"key": key, "value": value} for key, value in row.items() if value is not None])
                kind = pl.List(pl.Struct({"key": pl.String, "value": pl.Float64}))
                values = pl.Series(values.name, pairs, dtype=kind, strict=False)
        columns.append(values)
    return pl.DataFrame(columns)


def is_map(kind: pl.DataType) -> bool:
    """Whether a column of ``kind`` holds lists of a key and a number."""
    inner = kind.inner if isinstance(kind, pl.List | pl.Array) else None
    fields = inner.fields if isinstance(inner, pl.Struct) else []
    return len(fields) == 2 and fields[1].dtype.is_numeric() and not fields[0].dtype.is_nested()


def width_of(values: pl.Series) -> int | None:
    """The numbers of every vector of a column of lists; None where it holds none: other lengths, or whole numbers."""
    lengths = values.list.len().drop_nulls()
    if not values.dtype.inner.is_float() or lengths.n_unique() != 1:  # type: ignore[attr-defined]
        return None
    width = int(lengths[0])
    return width if width >= LEAST_WIDTH and not _whole(values) else None


def _whole(values: pl.Series) -> bool:
    # Whether all numbers in lists are whole: ids, as programs write them that know no others.
    flat = values.explode().drop_nulls()
    return bool((flat == flat.floor()).all()) and bool(len(flat))


def holds_numbers(values: pl.Series) -> bool:
    """Whether a column of lists holds numbers of which some are not whole: weights, or vectors."""
    return bool(values.dtype.inner.is_float()) and not _whole(values)  # type: ignore[attr-defined]


def weights_of(columns: Mapping[str, pl.Series], ids: Sequence[str], numbers: Sequence[str]) -> dict[str, str]:
    """For a column of ids that of its weights: of ``numbers``, as long as it in every row, and not always as long."""
    chosen: dict[str, str] = {}
    for name in numbers:
        lengths = columns[name].list.len().fill_null(0)
        if lengths.n_unique() < 2:
            continue
        alike = [one for one in ids if one not in chosen and (columns[one].list.len().fill_null(0) == lengths).all()]
        if alike:
            chosen[max(alike, key=lambda one: _common(one, name))] = name
    return chosen


def _common(one: str, other: str) -> int:
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)


def text_vector(text: pl.Series) -> tuple[int, str] | None:
    """(width, separator) of the vectors that a column of text holds; None where it holds none."""
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


def unit_length(values: pl.Series, width: int) -> bool:
    """Whether all vectors of a column of lists have length 1."""
    some = values.drop_nulls()
    matrix = some.explode().cast(pl.Float64).fill_null(0.0).to_numpy().reshape(-1, width)
    return bool(np.abs(np.linalg.norm(matrix, axis=1) - 1).max(initial=0.0) < 1e-3) and len(some) > 0
