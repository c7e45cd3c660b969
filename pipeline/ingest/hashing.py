"""Stable 64-bit hashes: of ids (xxhash64 of their UTF-8 bytes, seed per feature), of events' keys and of whole rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
import polars_hash as plh
import xxhash

from pipeline.ingest.rejects import RejectedRows
from pipeline.ingest.schema import CAME_CLICKED, CLICKED_LATER, EVENT, EVENT_CHECK, DataSpec
from pipeline.ingest.values import absent_in, nulls
from pipeline.native.text_kernels import hashed
from pipeline.records.dataset import RESERVED_ROWS

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
# Rows mixed at a time.
_IN_CACHE = 1 << 14
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def hash_ids(ids: pl.Series, seed: int, missing: Sequence[str] = ()) -> pl.Series:
    """xxhash64 (UInt64) of the UTF-8 bytes of each id; null stays null, and so does an id that is ``missing``."""
    words = [hash_of(word, seed) for word in missing]
    own = hashed(ids.to_arrow(compat_level=pl.CompatLevel.newest()), seed, words) if ids.dtype == pl.String else None
    if own is not None:
        return pl.Series(own)
    hashes = ids.to_frame("id").select(plh.col("id").nchash.xxhash64(seed=seed))["id"]  # type: ignore[attr-defined]
    absent = ids.is_null() | hashes.is_in(pl.Series(words, dtype=pl.UInt64).implode()).fill_null(False)
    return hashes.zip_with(~absent, nulls(pl.UInt64, len(ids))) if absent.any() else hashes


def hash_of(text: str, seed: int) -> int:
    """xxhash64 of the UTF-8 bytes of ``text``."""
    return xxhash.xxh64_intdigest(text.encode(), seed)


def hash_rows_of(hashes: pl.Series, rows: int) -> pl.Series:
    """Table row (Int32) of each hash: 2 + hash modulo (rows - 2)."""
    return (hashes % (rows - RESERVED_ROWS)).cast(pl.Int32) + RESERVED_ROWS


def second_rows_of(hashes: pl.Series, rows: int) -> pl.Series:
    """Another row (Int32) of each hash, as good as independent of the first: of its bits, mixed. Nulls get any."""
    mixed = hashes.fill_null(0).to_numpy() * _MULTIPLIER
    mixed = (mixed ^ (mixed >> np.uint64(32))) * _MIX[0]
    return hash_rows_of(pl.Series(mixed ^ (mixed >> np.uint64(29))), rows)


def hash_rows(columns: list[np.ndarray]) -> np.ndarray:
    """One uint64 per row over ``columns`` (uint64 words, one array per column, in the schema's order).

    Depends on the row's values alone: not on its place, its file or the format it came in.
    """
    total = np.zeros(len(columns[0]), np.uint64)
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
    """Distinct hashes by the at most ``kept`` smallest, rising: exact below that, else within a few percent (KMV)."""
    if len(smallest) < kept:
        return len(smallest)
    return round((kept - 1) / (float(smallest[-1]) / 2.0**64))


def event_key_columns(
    raw: pl.DataFrame, texts: dict[str, pl.Series], clicked: pl.Series, spec: DataSpec, rejected: RejectedRows
) -> list[pl.Series]:
    """The typed columns of the rows' events; a row without a key is rejected. ``clicked``: labels as they came."""
    column = spec.event_key or ""
    text = texts.get(column)
    if text is None:  # of a list
        text = nulls(pl.String, raw.height)
    rejected.add(absent_in(text, spec).to_numpy(), f"{column} is missing", lambda _: f"{column} is missing", column)
    key, check = hash_event_keys(text.fill_null(""))
    own = clicked > 0
    if CLICKED_LATER in raw.columns:
        own |= raw[CLICKED_LATER] == 1
    return [key.alias(EVENT), check.alias(EVENT_CHECK), own.alias(CAME_CLICKED)]


def hash_event_keys(text: pl.Series) -> tuple[pl.Series, pl.Series]:
    """The two hashes (UInt64) of each key."""
    return hash_ids(text, xxhash.xxh64_intdigest(b"event")), hash_ids(text, xxhash.xxh64_intdigest(b"event check"))
