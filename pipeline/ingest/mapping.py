"""Ids that stay: the vocabulary of a feature, carried from day to day.

An id that has a row keeps it. On the first build ids are ranked by falling count, later ones are appended in the same
order; an id that was not seen for ``evict_after_days`` loses its row, which may then become another id's. Ids that are
too rare, or for which there is no row, wait as candidates with their counts, the most frequent ``kept_ids`` of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from pipeline.contracts import RESERVED_ROWS
from pipeline.errors import ConfigError
from pipeline.ingest.counts import kept_ids
from pipeline.ingest.spec import SparseSpec

IDS = {"id": pl.String, "hash": pl.UInt64, "row": pl.Int32, "count": pl.Int64, "last_day": pl.Int32}
FREED = {"row": pl.Int32, "id": pl.String, "last_day": pl.Int32}
FORGET_AFTER_DAYS = 30  # candidates, where nothing is evicted


@dataclass(frozen=True, kw_only=True)
class Mapping:
    """``ids``: id, hash, row (null: a candidate), count over all days, day last seen (null: no day was named).

    ``rows``: of the table so far, reserved ones included. ``freed``: row, id and day last seen of the ids that lost
    their rows since the mapping was read.
    """

    ids: pl.DataFrame
    rows: int
    freed: pl.DataFrame

    @property
    def known(self) -> pl.DataFrame:
        """The ids that have rows, by row."""
        return self.ids.filter(pl.col("row").is_not_null()).sort("row", "hash")

    @property
    def candidates(self) -> pl.DataFrame:
        """The ids that wait for one, by falling count."""
        return _ranked(self.ids.filter(pl.col("row").is_null())).drop("row")


def empty() -> Mapping:
    """A mapping that knows no id."""
    return Mapping(ids=pl.DataFrame(schema=IDS), rows=RESERVED_ROWS, freed=pl.DataFrame(schema=FREED))


def _ranked(ids: pl.DataFrame) -> pl.DataFrame:
    # Ties by hash: any order will do, as long as it is always the same.
    return ids.sort(["count", "hash"], descending=[True, False])


def updated(mapping: Mapping, counts: pl.DataFrame, feature: SparseSpec, day: int | None, first_day: int) -> Mapping:
    """``mapping`` after the train lookups ``counts`` (hash, id, count) of one day.

    ``first_day``: of the dataset that is being made. The row of an id that was seen since then stays empty: one
    training must not see two ids in a row. ConfigError where the table has more rows than ``feature`` allows.
    """
    if mapping.rows > feature.rows:
        raise ConfigError(
            f"data.sparse.{feature.name}.rows is {feature.rows:,}, but its carried mapping has {mapping.rows:,} rows",
            hint=f"data.sparse.{feature.name}.rows={mapping.rows}, or data.mapping_from=null for a new mapping",
        )
    ids, freed = _evicted(_counted(mapping.ids, counts, day), feature, day)
    freed = pl.concat([mapping.freed, freed])
    held = freed.filter(pl.col("last_day") >= first_day)["row"]
    return _admitted(replace(mapping, ids=ids, freed=freed), feature, held)


def _counted(ids: pl.DataFrame, counts: pl.DataFrame, day: int | None) -> pl.DataFrame:
    seen = counts.select(
        "id", "hash", pl.lit(None, pl.Int32).alias("row"), "count", pl.lit(day, pl.Int32).alias("last_day")
    )
    if ids.is_empty():
        return seen
    # min, not first: should two ids share a hash, the result does not depend on the order of blocks.
    merged = pl.concat([ids, seen]).group_by("hash")
    return merged.agg(pl.min("id"), pl.max("row"), pl.sum("count"), pl.max("last_day")).select(list(IDS))


def _evicted(ids: pl.DataFrame, feature: SparseSpec, day: int | None) -> tuple[pl.DataFrame, pl.DataFrame]:
    """``ids`` without those that were not seen for too long, and those of them that had rows."""
    if day is None:
        return ids, pl.DataFrame(schema=FREED)
    limit = feature.evict_after_days
    waiting, age = pl.col("row").is_null(), day - pl.col("last_day")
    old = waiting & (age > (limit or FORGET_AFTER_DAYS))
    if limit is not None:
        old = old | (age > limit)
    gone = ids.filter(old.fill_null(False))
    if gone.is_empty():
        return ids, pl.DataFrame(schema=FREED)
    return ids.filter(~old.fill_null(False)), gone.filter(~waiting).sort("row").select(list(FREED))


def _admitted(mapping: Mapping, feature: SparseSpec, held: pl.Series) -> Mapping:
    """Give the candidates that are frequent enough a row: a free one, lowest first, then new ones up to the cap."""
    ids = mapping.ids
    wanting = _ranked(ids.filter(pl.col("row").is_null() & (pl.col("count") >= feature.min_count)))
    taken = np.zeros(mapping.rows, bool)
    taken[:RESERVED_ROWS] = True
    taken[ids["row"].drop_nulls().to_numpy()] = True
    taken[held.to_numpy()] = True
    free = np.flatnonzero(~taken)
    count = min(wanting.height, len(free) + feature.rows - mapping.rows)
    added = max(count - len(free), 0)
    rows = np.concatenate([free[: count - added], np.arange(mapping.rows, mapping.rows + added)]).astype(np.int32)
    admitted = wanting.head(count).with_columns(pl.Series("row", rows))
    rest = ids.join(admitted.select("hash"), on="hash", how="anti") if count else ids
    waiting = rest.filter(pl.col("row").is_null())
    if waiting.height > (most := kept_ids(feature)):
        rest = pl.concat([rest.filter(pl.col("row").is_not_null()), _ranked(waiting).head(most)])
    return replace(mapping, ids=pl.concat([rest, admitted]).rechunk(), rows=mapping.rows + added)
