"""Crosses: ids that are made of the values of several columns, of which the first may hold a list.

The id of a cross is the text of its parts, so its hash is the same in every dataset, record and release. A number is
taken as text, or as its bin between bounds that the configuration names.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from pipeline.ingest.rejects import RejectedRows
from pipeline.ingest.schema import DataSpec, SparseSpec
from pipeline.ingest.sketch import bin_of
from pipeline.ingest.values import absent_in, nulls, number_of

CROSS = "\x1f"  # between the values of a cross: the unit separator, which no log field holds


def cross_text(
    raw: pl.DataFrame, texts: dict[str, pl.Series], feature: SparseSpec, spec: DataSpec, rejected: RejectedRows
) -> pl.Series:
    """The id of each row, or of a cross of a list what is crossed with its elements: null where a part is missing.

    ``texts``: of the raw columns that are no lists. Rows are rejected where a column holds lists instead of one value.
    """
    columns = feature.cross[1:] if feature.multi else feature.cross
    parts = {}
    for place, column in enumerate(columns):
        bounds = feature.cross_bins.get(column)
        if bounds is not None:
            parts[f"{place}"] = _bins(raw, texts, column, np.array(bounds, np.float64), spec, rejected)
        elif column in texts:
            text = texts[column]
            parts[f"{place}"] = text.zip_with(~absent_in(text, spec), nulls(pl.String, len(text)))
        else:
            parts[f"{place}"] = _no_lists(column, feature, raw.height, rejected)
    frame = pl.DataFrame(parts)
    return frame.select(pl.concat_str(list(parts), separator=CROSS).alias("id"))["id"]  # null if any part is


def _no_lists(column: str, feature: SparseSpec, rows: int, rejected: RejectedRows) -> pl.Series:
    """Rejects all rows, which hold lists in ``column``; nulls."""
    kind = f"{column} is a list; of data.sparse.{feature.name}.cross only the first may be, by holds=list"
    rejected.add(np.ones(rows, bool), kind, lambda _: kind, column)
    return nulls(pl.String, rows)


def _bins(
    raw: pl.DataFrame,
    texts: dict[str, pl.Series],
    column: str,
    bounds: np.ndarray,
    spec: DataSpec,
    rejected: RejectedRows,
) -> pl.Series:
    """The number of each value's bin, as text: how many of ``bounds`` are not above it; null: missing."""
    numbers = number_of(raw[column], texts.get(column), column, spec, rejected)
    bins = pl.Series(bin_of(numbers.fill_null(0.0).to_numpy(), bounds)).cast(pl.String)
    return bins.zip_with(numbers.is_not_null(), nulls(pl.String, len(bins)))


def crossed(flat: pl.DataFrame, beside: pl.Series | None) -> pl.DataFrame:
    """``flat`` (``row``, ``id``) with each id crossed with its row's ``beside``; rows without that have no ids left."""
    if beside is None:
        return flat
    own = beside.gather(flat["row"]).alias("beside")
    joined = flat.with_columns(own).filter(pl.col("beside").is_not_null())
    return joined.with_columns(pl.concat_str("id", "beside", separator=CROSS).alias("id")).drop("beside")
