"""Ids: fields to 64-bit hashes, one or several a row, with their weights; crosses of columns; hashes of whole rows.

A hash is xxhash64 of the UTF-8 bytes of an id, seeded per feature. ``Coded`` has the ids of a block as codes into its
distinct hashes: they are counted and mapped once for each id, not for each lookup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import polars_hash as plh
import pyarrow as pa
import xxhash

from pipeline.core.kernels import load_kernels
from pipeline.ingest.schema import CAME_CLICKED, CLICKED_LATER, EVENT, EVENT_CHECK, DataSpec, SparseSpec
from pipeline.ingest.sketch import bin_of
from pipeline.ingest.values import (
    FLOAT32_MAX,
    RejectedRows,
    absent_in,
    elements_of,
    nulls,
    number_of,
    shown,
    strings_of,
)
from pipeline.records.dataset import RESERVED_ROWS
from pipeline.specs.id_mapping import MappedFeature

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
# Rows mixed at a time.
_IN_CACHE = 1 << 14
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def hash_ids(ids: pl.Series, seed: int, missing: Sequence[str] = ()) -> pl.Series:
    """Return xxhash64 (UInt64) of the UTF-8 bytes of each id; null for null, and for an id that is ``missing``."""
    words = [xxhash.xxh64_intdigest(word.encode(), seed) for word in missing]
    kernels = load_kernels("fields")
    if kernels is not None and ids.dtype == pl.String:
        return pl.Series(kernels.hash(ids.to_arrow(compat_level=pl.CompatLevel.newest()), seed, words))
    hashes = ids.to_frame("id").select(plh.col("id").nchash.xxhash64(seed=seed))["id"]  # type: ignore[attr-defined]
    # Compare hashes, which is faster than comparing texts.
    absent = ids.is_null() | hashes.is_in(pl.Series(words, dtype=pl.UInt64).implode()).fill_null(False)
    if not absent.any():
        return hashes
    return hashes.zip_with(~absent, nulls(pl.UInt64, len(ids)))


def hash_rows_of(hashes: pl.Series, rows: int) -> pl.Series:
    """Return the table row (Int32) of each hash: 2 + hash modulo (rows - 2). Rows of the log: ``hash_rows``."""
    return (hashes % (rows - RESERVED_ROWS)).cast(pl.Int32) + RESERVED_ROWS


def second_rows_of(hashes: pl.Series, rows: int) -> pl.Series:
    """Return another row (Int32) of each hash, nearly independent of the first, by mixing its bits. Nulls get any."""
    mixed = hashes.fill_null(0).to_numpy() * _MULTIPLIER
    mixed = (mixed ^ (mixed >> np.uint64(32))) * _MIX[0]
    return hash_rows_of(pl.Series(mixed ^ (mixed >> np.uint64(29))), rows)


def hash_rows(columns: list[np.ndarray]) -> np.ndarray:
    """Return one uint64 per row of the log over ``columns`` (uint64 words, one array a column, in the schema's order).

    It depends on the row's values alone: not on its place, its file or the format it came in.
    """
    total = np.zeros(len(columns[0]), np.uint64)
    # Mix some rows at a time, so that they stay in the processor's cache for all columns.
    for start in range(0, len(total), _IN_CACHE):
        part = slice(start, start + _IN_CACHE)
        _mix(total[part], [words[part] for words in columns])
    return total


def _mix(total: np.ndarray, columns: list[np.ndarray]) -> None:
    shifted = np.empty_like(total)
    for words in columns:
        np.bitwise_xor(total, words, out=total)
        np.multiply(total, _MULTIPLIER, out=total)
        np.bitwise_xor(total, np.right_shift(total, np.uint64(32), out=shifted), out=total)
    for factor in _MIX:
        np.bitwise_xor(total, np.right_shift(total, np.uint64(30), out=shifted), out=total)
        np.multiply(total, factor, out=total)
    np.bitwise_xor(total, np.right_shift(total, np.uint64(31), out=shifted), out=total)


def estimated_distinct(smallest: np.ndarray, kept: int) -> int:
    """Estimate distinct hashes by the ``kept`` smallest, rising: exact if there are fewer, else to a few % (KMV)."""
    if len(smallest) < kept:
        return len(smallest)
    # Hashes are uniform over 64 bits: the k-th smallest of n distinct ones lies at about k / n of the range.
    return round((kept - 1) / (float(smallest[-1]) / 2.0**64))


def event_key_columns(
    raw: pl.DataFrame, texts: dict[str, pl.Series], clicked: pl.Series, spec: DataSpec, rejected: RejectedRows
) -> list[pl.Series]:
    """Return the typed columns of the rows' events; rejects rows without a key. ``clicked``: labels as they came."""
    column = spec.event_key or ""
    text = texts.get(column)
    if text is None:
        # The column holds lists: no row has a key.
        text = nulls(pl.String, raw.height)
    rejected.add(absent_in(text, spec).to_numpy(), f"{column} is missing", column=column)
    key, check = hash_event_keys(text.fill_null(""))
    own = clicked > 0
    if CLICKED_LATER in raw.columns:
        own |= raw[CLICKED_LATER] == 1
    return [key.alias(EVENT), check.alias(EVENT_CHECK), own.alias(CAME_CLICKED)]


def hash_event_keys(text: pl.Series) -> tuple[pl.Series, pl.Series]:
    """Return the two hashes (UInt64) of each key."""
    return hash_ids(text, xxhash.xxh64_intdigest(b"event")), hash_ids(text, xxhash.xxh64_intdigest(b"event check"))


# Options with which lists explode into their elements and nothing else.
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
    """Return the columns of ``feature``: hashes and ids of its ``values``, also given as ``text``, and weights.

    ``weights``: the column ``feature.weights``. ``beside``: what the ids of a row's list are crossed with.
    """
    if feature.multi:
        return _multi(values, text, feature, spec, rejected, weights, beside)
    if feature.bins:
        # The id of a number is its bits: bounds of bins are only fitted after pass 1.
        number = number_of(values, text, feature.column, spec, rejected)
        shown = number.cast(pl.String) if text is None else text
        return [as_bits(number).alias(f"hash:{feature.name}"), shown.alias(f"id:{feature.name}")]
    if text is None:
        kind = f"{feature.column} is a list; data.sparse.{feature.name}.holds=list makes it multi-valued"
        rejected.add(np.ones(len(values), bool), kind, column=feature.column)
        text = nulls(pl.String, len(values))
    hashes = hash_ids(text, feature.seed, spec.missing)
    return [hashes.alias(f"hash:{feature.name}"), text.alias(f"id:{feature.name}")]


def check_ids(columns: list[pl.Series], feature: SparseSpec, rejected: RejectedRows) -> None:
    """Reject the rows whose ids are missing or not whole numbers, if that is not allowed."""
    column = feature.column
    by_name = {series.name: series for series in columns}
    hashes, ids = by_name[f"hash:{feature.name}"], by_name[f"id:{feature.name}"]
    if feature.required:
        missing = hashes.is_null()
        if feature.multi:
            missing = hashes.list.len().fill_null(0) == 0
        rejected.add(missing.to_numpy(), f"{column} is missing", column=column)
    if feature.integer:
        flat = ids.to_frame("id").with_row_index("row")
        # A single missing value has no hash but still its text. Lists have lost such elements already.
        flat = flat.explode("id") if feature.multi else flat.filter(hashes.is_not_null())
        wrong = flat.filter(pl.col("id").is_not_null() & ~pl.col("id").str.contains(r"^[+-]?\d+$"))
        rejected.add_values(
            wrong.select("row", value="id"),
            f"{column} is no whole number",
            lambda value: f"{column} is {shown(value)}, expected a whole number",
            column,
        )


def as_bits(numbers: pl.Series) -> pl.Series:
    """Return the bits of each float64 as UInt64 (of -0 those of 0); null stays null."""
    # -0 + 0 is 0: equal numbers must have equal bits.
    values = numbers.fill_null(0.0).to_numpy() + 0.0
    return pl.Series(values.view(np.uint64)).zip_with(numbers.is_not_null(), nulls(pl.UInt64, len(values)))


def of_bits(hashes: pl.Series) -> np.ndarray:
    """Return the float64 whose bits these are; NaN for null."""
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
    # Returns lists of ids (and weights) of one row each, without empty and missing elements.
    flat = _elements(values, text, feature, spec, rejected)
    if weights is not None:
        flat = _with_weights(flat, weights, feature, spec, rejected)
    if spec.strip:
        flat = flat.with_columns(pl.col("id").str.strip_chars())
    present = pl.col("id").is_not_null() & ~pl.col("id").is_in(["", *spec.missing])
    flat = flat.filter(present)
    if feature.weighted:
        if "text" not in flat.columns:
            # The ids are text that ends with their weights.
            parts = pl.col("id").str.splitn(feature.weight_separator or ":", 2).struct
            flat = flat.with_columns(parts.field("field_0").alias("id"), parts.field("field_1").alias("text"))
            if spec.strip:
                flat = flat.with_columns(pl.col("id", "text").str.strip_chars())
            flat = flat.filter(present)
        flat = _read_weights(flat, feature, rejected)
    if feature.max_ids is not None:
        # Cut after missing ids were left out, so that they do not count.
        flat = flat.filter(pl.int_range(pl.len()).over("row") < feature.max_ids)
    flat = crossed(flat, beside)
    lengths = np.bincount(flat["row"].to_numpy(), minlength=len(values))
    result = [
        as_lists(hash_ids(flat["id"], feature.seed), lengths).alias(f"hash:{feature.name}"),
        as_lists(flat["id"], lengths).alias(f"id:{feature.name}"),
    ]
    if feature.weighted:
        result.append(as_lists(flat["weight"], lengths).alias(f"weight:{feature.name}"))
    return result


def _elements(
    values: pl.Series, text: pl.Series | None, feature: SparseSpec, spec: DataSpec, rejected: RejectedRows
) -> pl.DataFrame:
    # Returns `row` and `id` of every element of a field, in order; for maps also `text`, the weight. A field of text
    # without a separator is one element.
    if text is not None:
        lists = elements_of(text, feature.separator)
        lists = lists.to_frame("v").select(pl.when(~absent_in(text, spec)).then(pl.col("v")))["v"]
        # A map is text only if a separator divides ids from weights.
        bare = feature.maps and feature.weight_separator is None
        _reject_fields(~absent_in(text, spec) & bare, "text", feature, rejected)
        return lists.to_frame("id").with_row_index("row").explode("id", **_NO_NULLS)
    struct = values.dtype.inner == pl.Struct  # type: ignore[attr-defined]
    filled = (values.list.len() > 0).fill_null(False)
    if struct != feature.maps:
        what = "a map" if struct else "a list"
        _reject_fields(filled, what, feature, rejected)
        values = values.clear().extend_constant(None, len(values))
        return as_text(values.cast(pl.List(pl.String))).to_frame("id").with_row_index("row").explode("id", **_NO_NULLS)
    if not struct:
        return as_text(values).to_frame("id").with_row_index("row").explode("id", **_NO_NULLS)
    pairs = values.to_frame("pair").with_row_index("row").filter(pl.Series(filled)).explode("pair")
    fields = pairs["pair"].dtype.fields  # type: ignore[attr-defined]
    key, weight = pairs["pair"].struct.field(fields[0].name), pairs["pair"].struct.field(fields[1].name)
    return pairs.select("row", strings_of(key).alias("id"), _weight_text(weight).alias("text"))


def _weight_text(weights: pl.Series) -> pl.Series:
    # Returns weights as they are compared and read: numbers as Float64, all else as text.
    return weights.cast(pl.Float64) if weights.dtype.is_numeric() else strings_of(weights)


def _reject_fields(mask: pl.Series, what: str, feature: SparseSpec, rejected: RejectedRows) -> None:
    holds = "map" if what == "a map" else "list"
    expected = "a map" if feature.maps else "a list"
    kind = f"{feature.column} is {what}, not {expected}"
    rejected.add(mask.to_numpy(), kind, lambda _: f"{kind}; data.sparse.{feature.name}.holds={holds}", feature.column)


def _with_weights(
    flat: pl.DataFrame, weights: pl.Series, feature: SparseSpec, spec: DataSpec, rejected: RejectedRows
) -> pl.DataFrame:
    # Adds `text` to `flat`, the weight of each element in the column of weights; a field without any weighs 1 each.
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
        if spec.strip:
            values = values.str.strip_chars()
        # A missing weight is null here and becomes 1 in `_read_weights`.
        values = values.set(values.is_in(["", *spec.missing]).fill_null(False), None)
    column = pl.Series("text", [None], dtype=values.dtype).new_from_index(0, flat.height)
    return flat.with_columns(column.scatter(np.flatnonzero(has_weight), values).alias("text"))


def as_text(values: pl.Series) -> pl.Series:
    """Return values, or lists of them, as strings, or lists of strings."""
    if values.dtype != pl.List:
        return strings_of(values)
    if values.dtype.inner == pl.String:  # type: ignore[attr-defined]
        return values
    # Empty and null lists have no elements here: their length makes them empty again.
    elements = strings_of(values.explode(**_NO_NULLS))
    return as_lists(elements, values.list.len().fill_null(0).to_numpy())


def _read_weights(flat: pl.DataFrame, feature: SparseSpec, rejected: RejectedRows) -> pl.DataFrame:
    one: float | str = 1.0 if flat["text"].dtype.is_numeric() else "1"
    weight = pl.col("text").fill_null(one).cast(pl.Float64, strict=False)
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


def as_lists(values: pl.Series, lengths: np.ndarray) -> pl.Series:
    """Return lists of ``lengths``, which hold ``values`` one after the other."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, dtype=np.int64, out=offsets[1:])
    arrow = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values.to_arrow())
    return pl.Series(values.name, arrow)


def flat_hashes(frame: pl.DataFrame, feature: MappedFeature) -> pl.Series:
    """Return the feature's lookups in row order as UInt64; a row without an id is one null."""
    hashes = frame[f"hash:{feature.name}"]
    return hashes.explode(empty_as_null=True) if feature.multi else hashes


def ids_per_row(frame: pl.DataFrame, feature: MappedFeature) -> np.ndarray:
    """Count how many of ``flat_hashes`` each row has, int64: at least one."""
    if not feature.multi:
        return np.ones(frame.height, np.int64)
    lengths = frame[f"hash:{feature.name}"].list.len().fill_null(0).clip(lower_bound=1)
    return lengths.to_numpy().astype(np.int64)


# Separates the values of a cross: the unit separator, which no log field holds.
CROSS = "\x1f"


def cross_text(
    raw: pl.DataFrame, texts: dict[str, pl.Series], feature: SparseSpec, spec: DataSpec, rejected: RejectedRows
) -> pl.Series:
    """Return each row's id, or in a cross of a list what its elements are crossed with; null if a part is missing.

    The id of a cross is the text of its parts, so its hash is the same in every dataset, record and release. A number
    is taken as text, or as its bin between bounds that the configuration names.

    ``texts``: of the raw columns that are not lists. Rows are rejected if a column holds lists instead of one value.
    """
    columns = feature.cross[1:] if feature.multi else feature.cross
    parts = {}
    for place, column in enumerate(columns):
        bounds = feature.cross_bins.get(column)
        if bounds is not None:
            # The number of the value's bin, as text: how many bounds are not above it.
            numbers = number_of(raw[column], texts.get(column), column, spec, rejected)
            bins = bin_of(numbers.fill_null(0.0).to_numpy(), np.array(bounds, np.float64))
            text = pl.Series(bins).cast(pl.String)
            parts[f"{place}"] = text.zip_with(numbers.is_not_null(), nulls(pl.String, len(text)))
        elif column in texts:
            text = texts[column]
            parts[f"{place}"] = text.zip_with(~absent_in(text, spec), nulls(pl.String, len(text)))
        else:
            kind = f"{column} is a list; of data.sparse.{feature.name}.cross only the first may be, by holds=list"
            rejected.add(np.ones(raw.height, bool), kind, column=column)
            parts[f"{place}"] = nulls(pl.String, raw.height)
    frame = pl.DataFrame(parts)
    # The result is null if any part is.
    return frame.select(pl.concat_str(list(parts), separator=CROSS).alias("id"))["id"]


def crossed(flat: pl.DataFrame, beside: pl.Series | None) -> pl.DataFrame:
    """Cross each id of ``flat`` (``row``, ``id``) with its row's ``beside``; rows without that have no ids left."""
    if beside is None:
        return flat
    own = beside.gather(flat["row"]).alias("beside")
    joined = flat.with_columns(own).filter(pl.col("beside").is_not_null())
    return joined.with_columns(pl.concat_str("id", "beside", separator=CROSS).alias("id")).drop("beside")


def code_ids(hashes: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Find the distinct ``hashes`` (uint64) as they appear, and each one's place in them.

    Returns:
        uint64 [distinct], and int32 [n], where the place of a null is the number of distinct hashes.
    """
    kernels = load_kernels("rows")
    if kernels is not None:
        return kernels.code(hashes)
    encoded = hashes.dictionary_encode()
    distinct, codes = encoded.dictionary.to_numpy(), encoded.indices
    if encoded.null_count:
        codes = codes.fill_null(len(distinct))
    return distinct, codes.to_numpy()


def count_codes(codes: np.ndarray, keep: np.ndarray | None, distinct: int) -> tuple[np.ndarray, np.ndarray]:
    """Count how often each of ``codes``, 0 to ``distinct``, occurs where ``keep`` (bool) says so.

    Returns:
        The counts, and the first place of each code: int64 [distinct + 1]. The place means nothing without a count.
    """
    kernels = load_kernels("rows")
    if kernels is not None:
        return kernels.count(codes, keep, distinct)
    first = np.zeros(distinct + 1, np.int64)
    places = np.arange(len(codes)) if keep is None else np.flatnonzero(keep)
    # Assign backwards, because NumPy keeps the last of several values for one place.
    first[codes[places[::-1]]] = places[::-1]
    return np.bincount(codes[places], minlength=distinct + 1), first


@dataclass(frozen=True)
class Coded:
    """``hashes``: the distinct ones, uint64; ``codes``: each lookup's place in them, ``len(hashes)`` for a missing id.

    ``lengths``: lookups of each row, int64, at least one; None where every row has one.
    """

    hashes: np.ndarray
    codes: np.ndarray
    lengths: np.ndarray | None = None

    @staticmethod
    def of(frame: pl.DataFrame, feature: SparseSpec) -> Coded:
        """Return the lookups of ``feature`` in typed rows."""
        distinct, codes = code_ids(flat_hashes(frame, feature).to_arrow())
        lengths = ids_per_row(frame, feature) if feature.multi else None
        return Coded(distinct, codes, lengths)

    @staticmethod
    def of_codes(hashes: np.ndarray, codes: pl.Series) -> Coded:
        """Restore what ``codes_by_row`` returned as ``codes``."""
        if codes.dtype != pl.List:
            return Coded(hashes, codes.to_numpy())
        return Coded(hashes, codes.explode().to_numpy(), codes.list.len().to_numpy().astype(np.int64))

    def codes_by_row(self) -> pl.Series:
        """Return the codes, or lists of them, in as few bytes as they need."""
        codes = self.codes
        # With so few lookups no code is larger, so the maximum need not be computed.
        if len(codes) <= 1 << 16 or codes.max() < 1 << 16:
            codes = codes.astype(np.uint16)
        return self.by_row(pl.Series(codes))

    def by_row(self, values: pl.Series) -> pl.Series:
        """Turn a value for each lookup into a value, or a list, for each row."""
        if self.lengths is None:
            return values
        return as_lists(values, self.lengths)

    def by_lookup(self, values: np.ndarray) -> np.ndarray:
        """Repeat a value of each row for each of its lookups."""
        if self.lengths is None:
            return values
        return np.repeat(values, self.lengths)

    def of_rows(self, keep: np.ndarray) -> Coded:
        """Return the lookups of the rows ``keep`` (bool [rows]), with all hashes."""
        lengths = None if self.lengths is None else self.lengths[keep]
        return Coded(self.hashes, self.codes[self.by_lookup(keep)], lengths)

    def counts(self, keep: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, int]:
        """Count, in the rows ``keep`` (bool [rows]; None: all), the lookups of each hash, and those without an id.

        Returns these counts with each hash's first lookup between them, which means nothing if the rows do not have
        the hash. All are int64.
        """
        lookups = None
        if keep is not None:
            lookups = self.by_lookup(keep)
        counts, first = count_codes(self.codes, lookups, len(self.hashes))
        return counts[:-1], first[:-1], int(counts[-1])

    def hashes_by_row(self) -> pl.Series:
        """Return the hash, or the list of hashes, of every row; null where missing."""
        # The code of a missing id is one past the last hash.
        known = pl.concat([pl.Series(self.hashes), pl.Series([None], dtype=pl.UInt64)])
        return self.by_row(known.gather(self.codes))


def without_hashes(frame: pl.DataFrame, coded: Iterable[str]) -> pl.DataFrame:
    """Return typed rows without raw ids, and without the hashes of the ``coded`` features."""
    hashes = {f"hash:{name}" for name in coded}
    return frame.select(name for name in frame.columns if name not in hashes and not name.startswith("id:"))


def coded_ids(frame: pl.DataFrame, spec: DataSpec) -> dict[str, Coded]:
    """Return the ids of typed rows by feature, except for those that are numbers."""
    return {feature.name: Coded.of(frame, feature) for feature in spec.sparse if not feature.mapping.numbers}
