"""The key of a row's event as typed columns: two hashes of it, and whether the row came with a click."""

from __future__ import annotations

import polars as pl
import xxhash

from pipeline.ingest.hashing import hash_ids
from pipeline.ingest.rejects import RejectedRows
from pipeline.ingest.schema import CAME_CLICKED, CLICKED_LATER, EVENT, EVENT_CHECK, DataSpec
from pipeline.ingest.values import absent_in, nulls


def event_columns(
    raw: pl.DataFrame, texts: dict[str, pl.Series], clicked: pl.Series, spec: DataSpec, rejected: RejectedRows
) -> list[pl.Series]:
    """The typed columns of the rows' events; a row without a key is rejected. ``clicked``: labels as they came."""
    column = spec.event_key or ""
    text = texts.get(column)
    if text is None:  # of a list
        text = nulls(pl.String, raw.height)
    rejected.add(absent_in(text, spec).to_numpy(), f"{column} is missing", lambda _: f"{column} is missing", column)
    key, check = hashed(text.fill_null(""))
    own = clicked > 0
    if CLICKED_LATER in raw.columns:
        own |= raw[CLICKED_LATER] == 1
    return [key.alias(EVENT), check.alias(EVENT_CHECK), own.alias(CAME_CLICKED)]


def hashed(text: pl.Series) -> tuple[pl.Series, pl.Series]:
    """The two hashes (UInt64) of each key."""
    return hash_ids(text, xxhash.xxh64_intdigest(b"event")), hash_ids(text, xxhash.xxh64_intdigest(b"event check"))
