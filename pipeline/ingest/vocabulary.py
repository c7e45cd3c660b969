"""Ids that stay: the vocabulary of a feature, continued from day to day.

On the first build ids are ranked by falling count, later ones are appended in the same order. An id keeps its row until
it was not seen for ``evict_after_days``, or until the table is full and an id without a row is looked up more: the row
then becomes that id's. Ids that are too rare, or for which there is no row, wait as candidates with their counts, the
most frequent ``kept_ids`` of them.

How much an id is looked up by now is its heat: its lookups, each of which counts for a tenth less with every day.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl

from pipeline.core.errors import ConfigError
from pipeline.ingest.vocab_counts import kept_ids
from pipeline.records.dataset import RESERVED_ROWS
from pipeline.specs.id_mapping import FittedMapping, MappedFeature, id_columns, no_rows_freed

# Candidates, where nothing is evicted.
FORGET_AFTER_DAYS = 30
# Of the heat that an id has left a day later: half after a week. Less follows new ids sooner and resets more rows: with
# 2 % new ids a day, 0.5 replaced 28 % of a full table every night, 0.9 replaces 7 % and serves as many lookups.
COOLING = 0.9
# By days of age. Products, not powers: every machine rounds them alike.
_LEFT = np.multiply.accumulate(np.concatenate([[1.0], np.full(400, COOLING)]))


def empty() -> FittedMapping:
    """A vocabulary without ids."""
    return FittedMapping(ids=pl.DataFrame(schema=id_columns()), rows=RESERVED_ROWS, freed=no_rows_freed())


def _ranked(ids: pl.DataFrame) -> pl.DataFrame:
    # Ties by hash: any order will do, as long as it is always the same.
    return ids.sort(["count", "hash"], descending=[True, False])


def updated(
    mapping: FittedMapping, counts: pl.DataFrame, feature: MappedFeature, day: int | None, first_day: int
) -> FittedMapping:
    """``mapping`` after the train lookups ``counts`` (hash, id, count) of one day.

    ``first_day``: of the dataset that is being made. A row whose id was seen on an earlier day of it gets no other id:
    one training must not see two ids in a row. ConfigError where the table has more rows than ``feature`` allows.
    """
    if mapping.rows > feature.rows:
        raise ConfigError(
            f"data.sparse.{feature.name}.rows is {feature.rows:,}, but its mapping has {mapping.rows:,} rows already",
            hint=f"data.sparse.{feature.name}.rows={mapping.rows}, or data.mapping_from=null for a new mapping",
        )
    assert mapping.ids is not None and mapping.freed is not None
    ids = mapping.ids
    if day is not None:
        # Ids of a log without days were last seen the day before: they age from then on.
        ids = ids.with_columns(pl.col("last_day").fill_null(day - 1))
    ids, freed = _evicted(_counted(ids, counts, day), feature, day)
    freed = pl.concat([mapping.freed, freed])
    # Without days a dataset is fitted once.
    in_use = pl.lit(day is not None) & (pl.col("last_day") >= first_day)
    held = freed.filter(in_use)["row"]
    used = mapping.ids.filter(in_use)["row"].drop_nulls()
    now = _admitted(replace(mapping, ids=ids, freed=freed), feature, held)
    return _replaced(now, feature, day, used) if feature.when_full == "replace" else now


def _counted(ids: pl.DataFrame, counts: pl.DataFrame, day: int | None) -> pl.DataFrame:
    seen = counts.select(
        "id",
        "hash",
        pl.lit(None, pl.Int32).alias("row"),
        "count",
        pl.lit(day, pl.Int32).alias("last_day"),
        pl.col("count").cast(pl.Float64).alias("heat"),
    )
    if ids.is_empty():
        return seen
    # min, not first: should two ids share a hash, the result does not depend on the order of blocks.
    ids = ids.with_columns(pl.col("heat").fill_null(pl.col("count").cast(pl.Float64)))
    both = pl.concat([ids.with_columns(_heat(ids, day)), seen.with_columns(now=pl.col("heat"), heat=None)])
    merged = both.group_by("hash").agg(
        pl.min("id"),
        pl.max("row"),
        pl.sum("count"),
        pl.max("last_day"),
        pl.max("heat"),
        pl.sum("now"),
        again=pl.len() > 1,
    )
    # Of an id that was not seen the heat stays that of its last day, so that it cools by the days in between alone.
    heat = pl.when(pl.col("again") | pl.col("heat").is_null()).then(pl.col("now")).otherwise(pl.col("heat"))
    return merged.with_columns(heat.alias("heat")).select(list(id_columns()))


def _heat(ids: pl.DataFrame, day: int | None) -> pl.Series:
    known = ids["heat"].fill_null(ids["count"].cast(pl.Float64)).to_numpy()
    if day is None:
        return pl.Series("now", known)
    age = (day - ids["last_day"].fill_null(day)).clip(0, len(_LEFT) - 1).to_numpy()
    return pl.Series("now", known * _LEFT[age])


def _evicted(ids: pl.DataFrame, feature: MappedFeature, day: int | None) -> tuple[pl.DataFrame, pl.DataFrame]:
    if day is None:
        return ids, no_rows_freed()
    limit = feature.evict_after_days
    waiting, age = pl.col("row").is_null(), day - pl.col("last_day")
    old = waiting & (age > (limit or FORGET_AFTER_DAYS))
    if limit is not None:
        old = old | (age > limit)
    gone = ids.filter(old.fill_null(False))
    if gone.is_empty():
        return ids, no_rows_freed()
    return ids.filter(~old.fill_null(False)), gone.filter(~waiting).sort("row").select(no_rows_freed().columns)


def _admitted(mapping: FittedMapping, feature: MappedFeature, held: pl.Series) -> FittedMapping:
    # Give the candidates that are frequent enough a row: a free one, lowest first, then new ones up to the cap.
    ids = mapping.ids
    assert ids is not None
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
    if waiting.height > (most := kept_ids(feature.rows)):
        rest = pl.concat([rest.filter(pl.col("row").is_not_null()), _ranked(waiting).head(most)])
    return replace(mapping, ids=pl.concat([rest, admitted]).rechunk(), rows=mapping.rows + added)


def _replaced(mapping: FittedMapping, feature: MappedFeature, day: int | None, used: pl.Series) -> FittedMapping:
    # Give the hottest ids that still want a row those of the coldest ids, as long as they are colder.
    # Rows in `used` stay. Who loses its row waits as a candidate.
    assert mapping.ids is not None and mapping.freed is not None
    ids = mapping.ids.with_columns(_heat(mapping.ids, day))
    wanting = ids.filter(pl.col("row").is_null() & (pl.col("count") >= feature.min_count))
    wanting = wanting.sort(["now", "hash"], descending=[True, False])
    if wanting.is_empty():
        return mapping
    cold = ids.filter(pl.col("row").is_not_null() & ~pl.col("row").is_in(used.implode())).sort(["now", "hash"])
    most = min(wanting.height, cold.height)
    # One column falls and the other rises, so these are the first ones.
    count = int((wanting["now"].head(most) > cold["now"].head(most)).sum())
    if not count:
        return mapping
    came, gone = wanting.head(count), cold.head(count)
    rest = mapping.ids.join(pl.concat([came, gone]).select("hash"), on="hash", how="anti")
    parts = [rest, came.with_columns(gone["row"]), gone.with_columns(pl.lit(None, pl.Int32).alias("row"))]
    freed = pl.concat([mapping.freed, gone.sort("row").select(no_rows_freed().columns)])
    changed = pl.concat([part.select(list(id_columns())) for part in parts]).rechunk()
    return replace(mapping, ids=changed, freed=freed, replaced=mapping.replaced + count)
