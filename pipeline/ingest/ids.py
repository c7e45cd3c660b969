"""Ids: fields to 64-bit hashes, one or several a row, with their weights; numbers as ids; crosses of columns."""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa

from pipeline.ingest.hashing import hash_ids
from pipeline.ingest.rejects import RejectedRows, shown
from pipeline.ingest.schema import DataSpec, SparseSpec
from pipeline.ingest.sketch import bin_of
from pipeline.ingest.values import FLOAT32_MAX, absent_in, elements_of, nulls, number_of, strings_of
from pipeline.specs.id_mapping import MappedFeature

# How lists explode into their elements and nothing else.
_NO_NULLS = {"empty_as_null": False, "keep_nulls": False}


def ids_of(
    values: pl.Series,
    text: pl.Series | None,
    feature: SparseSpec,
    spec: DataSpec,
    rejected: RejectedRows,
    weights: pl.Series | None = None,
    beside: pl.Series | None = None,
) -> list[pl.Series]:
    """The columns of ``feature``: hashes and ids of its ``values``, which are also given as ``text``, and weights.

    ``weights``: the column ``feature.weights``. ``beside``: what the ids of a row's list are crossed with.
    """
    if feature.multi:
        return _multi(values, text, feature, spec, rejected, weights, beside)
    if feature.bins:
        number = number_of(values, text, feature.column, spec, rejected)
        shown = number.cast(pl.String) if text is None else text
        return [as_bits(number).alias(f"hash:{feature.name}"), shown.alias(f"id:{feature.name}")]
    if text is None:
        kind = f"{feature.column} is a list; data.sparse.{feature.name}.holds=list makes it multi-valued"
        rejected.add(np.ones(len(values), bool), kind, lambda _: kind, feature.column)
        text = nulls(pl.String, len(values))
    hashes = hash_ids(text, feature.seed, spec.missing)
    return [hashes.alias(f"hash:{feature.name}"), text.alias(f"id:{feature.name}")]


def check_ids(columns: list[pl.Series], feature: SparseSpec, rejected: RejectedRows) -> None:
    """Reject the rows whose ids are missing or no whole numbers, where that is not allowed."""
    column = feature.column
    by_name = {series.name: series for series in columns}
    hashes, ids = by_name[f"hash:{feature.name}"], by_name[f"id:{feature.name}"]
    if feature.required:
        missing = hashes.list.len().fill_null(0) == 0 if feature.multi else hashes.is_null()
        rejected.add(missing.to_numpy(), f"{column} is missing", lambda _: f"{column} is missing", column)
    if feature.integer:
        flat = ids.to_frame("id").with_row_index("row")
        flat = flat.explode("id") if feature.multi else flat.filter(hashes.is_not_null())
        wrong = flat.filter(pl.col("id").is_not_null() & ~pl.col("id").str.contains(r"^[+-]?\d+$"))
        rejected.add_values(
            wrong.select("row", value="id"),
            f"{column} is no whole number",
            lambda value: f"{column} is {shown(value)}, expected a whole number",
            column,
        )


def as_bits(numbers: pl.Series) -> pl.Series:
    """The bits of each float64 as UInt64 (of -0 those of 0); null stays null."""
    values = numbers.fill_null(0.0).to_numpy() + 0.0
    return pl.Series(values.view(np.uint64)).zip_with(numbers.is_not_null(), nulls(pl.UInt64, len(values)))


def of_bits(hashes: pl.Series) -> np.ndarray:
    """The float64 whose bits these are; NaN for null."""
    values = hashes.fill_null(0).to_numpy().view(np.float64)
    return np.where(hashes.is_null().to_numpy(), np.nan, values)


def _multi(
    values: pl.Series,
    text: pl.Series | None,
    feature: SparseSpec,
    spec: DataSpec,
    rejected: RejectedRows,
    weights: pl.Series | None,
    beside: pl.Series | None,
) -> list[pl.Series]:
    # Lists of ids (and weights) of one row each; empty and missing elements are left out.
    flat = _elements(values, text, feature, spec, rejected)
    if weights is not None:
        flat = _with_weights(flat, weights, feature, spec, rejected)
    if spec.strip:
        flat = flat.with_columns(pl.col("id").str.strip_chars())
    present = pl.col("id").is_not_null() & ~pl.col("id").is_in(["", *spec.missing])
    flat = flat.filter(present)
    if feature.weighted:
        if "text" not in flat.columns:
            # Ids with their weights behind them, as text.
            parts = pl.col("id").str.splitn(feature.weight_separator or ":", 2).struct
            flat = flat.with_columns(parts.field("field_0").alias("id"), parts.field("field_1").alias("text"))
            if spec.strip:
                flat = flat.with_columns(pl.col("id", "text").str.strip_chars())
            flat = flat.filter(present)
        flat = _read_weights(flat, feature, rejected)
    if feature.max_ids is not None:
        flat = flat.filter(pl.int_range(pl.len()).over("row") < feature.max_ids)
    flat = crossed(flat, beside)
    ends = np.cumsum(np.bincount(flat["row"].to_numpy(), minlength=len(values)))
    offsets = np.concatenate([[0], ends])
    result = [
        as_lists(hash_ids(flat["id"], feature.seed), offsets).alias(f"hash:{feature.name}"),
        as_lists(flat["id"], offsets).alias(f"id:{feature.name}"),
    ]
    if feature.weighted:
        result.append(as_lists(flat["weight"], offsets).alias(f"weight:{feature.name}"))
    return result


def _elements(
    values: pl.Series, text: pl.Series | None, feature: SparseSpec, spec: DataSpec, rejected: RejectedRows
) -> pl.DataFrame:
    # `row` and `id` of every element of a field, in order; of maps also `text`, the weight.
    # A field of text without a separator is one element.
    if text is not None:
        lists = elements_of(text, feature.separator)
        lists = lists.to_frame("v").select(pl.when(~absent_in(text, spec)).then(pl.col("v")))["v"]
        bare = feature.maps and feature.weight_separator is None
        _reject_fields(~absent_in(text, spec) & bare, "text", feature, rejected)
        return lists.to_frame("id").with_row_index("row").explode("id", **_NO_NULLS)
    struct = values.dtype.inner == pl.Struct  # type: ignore[attr-defined]
    filled = (values.list.len() > 0).fill_null(False)
    if struct != feature.maps:
        _reject_fields(filled, "a map" if struct else "a list", feature, rejected)
        values = values.clear().extend_constant(None, len(values))
        return as_text(values.cast(pl.List(pl.String))).to_frame("id").with_row_index("row").explode("id", **_NO_NULLS)
    if not struct:
        return as_text(values).to_frame("id").with_row_index("row").explode("id", **_NO_NULLS)
    pairs = values.to_frame("pair").with_row_index("row").filter(pl.Series(filled)).explode("pair")
    fields = pairs["pair"].dtype.fields  # type: ignore[attr-defined]
    key, weight = pairs["pair"].struct.field(fields[0].name), pairs["pair"].struct.field(fields[1].name)
    return pairs.select("row", strings_of(key).alias("id"), _weight_text(weight).alias("text"))


def _weight_text(weights: pl.Series) -> pl.Series:
    # Weights as they are compared and read: numbers as Float64, all else as text.
    return weights.cast(pl.Float64) if weights.dtype.is_numeric() else strings_of(weights)


def _reject_fields(mask: pl.Series, what: str, feature: SparseSpec, rejected: RejectedRows) -> None:
    holds = "map" if what == "a map" else "list"
    kind = f"{feature.column} is {what}, not {'a map' if feature.maps else 'a list'}"
    rejected.add(mask.to_numpy(), kind, lambda _: f"{kind}; data.sparse.{feature.name}.holds={holds}", feature.column)


def _with_weights(
    flat: pl.DataFrame, weights: pl.Series, feature: SparseSpec, spec: DataSpec, rejected: RejectedRows
) -> pl.DataFrame:
    # `flat` with `text`, the weight of each element by the column of weights; a field of none weighs 1 each.
    if weights.dtype != pl.List:
        text = strings_of(weights)
        weights = elements_of(text, feature.separator)
        weights = weights.zip_with(~absent_in(text, spec), nulls(pl.List(pl.String), len(text)))
    lengths = weights.list.len().fill_null(0).to_numpy().astype(np.int64)
    ids = np.bincount(flat["row"].to_numpy(), minlength=len(weights))
    wrong = (lengths > 0) & (lengths != ids)
    rejected.add(
        wrong,
        f"{feature.column} and {feature.weights} differ in length",
        lambda i: f"{feature.column} has {ids[i]} ids, and {feature.weights} has {lengths[i]} weights",
        feature.column,
    )
    good = (lengths > 0) & ~wrong
    flat = flat.filter(~pl.Series(wrong)[flat["row"]])
    has_weight = pl.Series(good)[flat["row"]].to_numpy()
    values = _weight_text(weights.filter(pl.Series(good)).explode(**_NO_NULLS))
    if values.dtype == pl.String:
        values = values.str.strip_chars() if spec.strip else values
        values = values.set(values.is_in(["", *spec.missing]).fill_null(False), None)
    column = pl.Series("text", [None], dtype=values.dtype).new_from_index(0, flat.height)
    return flat.with_columns(column.scatter(np.flatnonzero(has_weight), values).alias("text"))


def as_text(values: pl.Series) -> pl.Series:
    """Values, or lists of them, as strings, or lists of strings."""
    if values.dtype != pl.List:
        return strings_of(values)
    if values.dtype.inner == pl.String:  # type: ignore[attr-defined]
        return values
    elements = strings_of(values.explode(empty_as_null=False, keep_nulls=False))
    offsets = np.concatenate([[0], np.cumsum(values.list.len().fill_null(0).to_numpy())])
    return as_lists(elements, offsets)


def _read_weights(flat: pl.DataFrame, feature: SparseSpec, rejected: RejectedRows) -> pl.DataFrame:
    numeric = flat["text"].dtype.is_numeric()
    weight = pl.col("text").fill_null(1.0 if numeric else "1").cast(pl.Float64, strict=False)
    flat = flat.with_columns(pl.when(weight.abs() <= FLOAT32_MAX).then(weight).cast(pl.Float32).alias("weight"))
    flat = flat.with_columns(
        pl.when(pl.col("weight") != 0).then("weight").otherwise(pl.col("weight").abs()).alias("weight")
    )
    wrong = flat.filter(pl.col("weight").is_null()).select("row", value=pl.col("text").cast(pl.String))
    rejected.add_values(
        wrong,
        f"a weight of {feature.column} is not a finite number",
        lambda value: f"{feature.column} has weight {shown(value)}, expected a finite number",
        feature.column,
    )
    return flat.drop("text")


def as_lists(values: pl.Series, offsets: np.ndarray) -> pl.Series:
    """Row i of the result holds values[offsets[i]:offsets[i + 1]]."""
    arrow = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values.to_arrow())
    return pl.Series(values.name, arrow)


def flat_hashes(frame: pl.DataFrame, feature: MappedFeature) -> pl.Series:
    """The feature's lookups in row order as UInt64; a row without an id is one null."""
    hashes = frame[f"hash:{feature.name}"]
    return hashes.explode(empty_as_null=True) if feature.multi else hashes


def ids_per_row(frame: pl.DataFrame, feature: MappedFeature) -> np.ndarray:
    """How many of ``flat_hashes`` each row has, int64: at least one."""
    if not feature.multi:
        return np.ones(frame.height, np.int64)
    lengths = frame[f"hash:{feature.name}"].list.len().fill_null(0).clip(lower_bound=1)
    return lengths.to_numpy().astype(np.int64)


# Between the values of a cross: the unit separator, which no log field holds.
CROSS = "\x1f"


def cross_text(
    raw: pl.DataFrame, texts: dict[str, pl.Series], feature: SparseSpec, spec: DataSpec, rejected: RejectedRows
) -> pl.Series:
    """The id of each row, or of a cross of a list what is crossed with its elements: null where a part is missing.

    The id of a cross is the text of its parts, so its hash is the same in every dataset, record and release. A number
    is taken as text, or as its bin between bounds that the configuration names.

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
            kind = f"{column} is a list; of data.sparse.{feature.name}.cross only the first may be, by holds=list"
            rejected.add(np.ones(raw.height, bool), kind, lambda _, kind=kind: kind, column)  # type: ignore[misc]
            parts[f"{place}"] = nulls(pl.String, raw.height)
    frame = pl.DataFrame(parts)
    # Null if any part is.
    return frame.select(pl.concat_str(list(parts), separator=CROSS).alias("id"))["id"]


def _bins(
    raw: pl.DataFrame,
    texts: dict[str, pl.Series],
    column: str,
    bounds: np.ndarray,
    spec: DataSpec,
    rejected: RejectedRows,
) -> pl.Series:
    # The number of each value's bin, as text: how many of `bounds` are not above it; null: missing.
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
