"""Rows of earlier days whose click came later, taken from their own day's dataset to be trained on once more.

The rows are stored there as they were transformed that day. Their ids are mapped by hash to the rows of today's
mapping; an id that had no row then has none now. Labels of tasks that cannot happen without a click are missing,
because the 0 that they had was that of a row without a click.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import polars as pl

from pipeline.ingest.blocks import TRAIN_EVENT
from pipeline.ingest.ids import as_lists
from pipeline.ingest.labels import after_click
from pipeline.ingest.parse import parse
from pipeline.ingest.repeats import events_of
from pipeline.ingest.schema import DataSpec
from pipeline.ingest.state import read_state, transforms_json, unreadable_sequence
from pipeline.ingest.transform_pass import FittedState, transform
from pipeline.records.dataset import LABEL, MISSING_ROW, TRANSFORMS, UNSEEN_ROW, DatasetSchema, task_column
from pipeline.records.record import read
from pipeline.specs.id_mapping import FittedMapping
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

log = logging.getLogger(__name__)


def corrected_rows(
    store: Store, datasets: Sequence[Artifact], events: pl.DataFrame, day: int, spec: DataSpec, state: FittedState
) -> pl.DataFrame | None:
    """Return the train rows with ``events`` (key, check) of ``day``, clicked, as ``state`` transforms them.

    Args:
        store: The store of the datasets.
        datasets: The datasets of the day, the best first. Several models of one log may each have one; the first that
            was made with today's features, columns and transforms has the rows.
        events: The key and check of each event.
        day: Days since 1970.
        spec: Today's schema.
        state: Today's transforms and mappings.

    Returns:
        The rows; None where all datasets were made with others.
    """
    # An empty frame, transformed, has the columns and types of today's rows.
    raw = pl.DataFrame(schema=dict.fromkeys(spec.columns, pl.String))
    now = transform(parse(raw, np.zeros(0, np.int64), spec).frame, spec, state)
    record = transforms_json(spec, state)
    for dataset in datasets:
        schema = read(DatasetSchema, store, f"{dataset.path}/schema.json")
        before = read_state(store, dataset.path, spec)
        then = store.read_json(f"{dataset.path}/{TRANSFORMS}")
        readable = not unreadable_sequence(then, record)
        if readable and _has_columns(store, dataset, schema, now) and _alike(spec, before, state):
            return _clicked(store, dataset, schema, events, day, spec, before, state, now.columns)
    log.warning(
        "%s has other features or transforms: its %s late clicks are not trained on",
        datasets[0].path,
        f"{events.height:,}",
    )
    return None


def _clicked(
    store: Store,
    dataset: Artifact,
    schema: DatasetSchema,
    events: pl.DataFrame,
    day: int,
    spec: DataSpec,
    before: FittedState,
    state: FittedState,
    names: Sequence[str],
) -> pl.DataFrame:
    # Returns the rows of `dataset`, whose state is `before`, in columns `names`.
    rows = _taken(store, dataset, schema, _places(store, dataset, events, day))
    columns: list[pl.Expr | pl.Series] = [pl.lit(1.0, pl.Float32).alias(LABEL)]
    for task in after_click(spec):
        # The dataset has 0, because the row had no click. Now that it has one, labels of what follows it are unknown.
        columns.append(pl.lit(np.nan, pl.Float32).alias(task_column(task)))
    for f in spec.sparse:
        columns.append(_moved(rows[f.name], before.sparse[f.name], state.sparse[f.name]))
    return rows.select(names).with_columns(columns)


def _has_columns(store: Store, dataset: Artifact, schema: DatasetSchema, now: pl.DataFrame) -> bool:
    # Whether the train rows of `dataset` have all columns of `now` with the same types. Without files they have none.
    if not schema.files["train"]:
        return False
    # All files of a split are written with one schema.
    with store.open(f"{dataset.path}/{schema.files['train'][0]}") as source:
        then = pl.read_parquet_schema(source)
    # Further columns are not selected. Types must agree, because these rows are written beside today's.
    return all(then.get(column) == kind for column, kind in now.schema.items())


def _alike(spec: DataSpec, before: FittedState, now: FittedState) -> bool:
    # Whether rows of one state can be brought to the other: dense transforms and tables without a vocabulary must
    # agree.
    for f in spec.dense:
        then = before.dense.get(f.name)
        if then is None or (then.mean, then.std) != (now.dense[f.name].mean, now.dense[f.name].std):
            return False
        if not _same_bounds(then.bounds, now.dense[f.name].bounds):
            return False
    for s in spec.sparse:
        was, is_now = before.sparse.get(s.name), now.sparse[s.name]
        if was is None or (was.lookup is None) != (is_now.lookup is None):
            return False
        if was.lookup is None and (was.rows != is_now.rows or not _same_bounds(was.bounds, is_now.bounds)):
            return False
    return True


def _same_bounds(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other)


def _places(store: Store, dataset: Artifact, events: pl.DataFrame, day: int) -> np.ndarray:
    # Returns the train rows that have one of the `events` of `day`. Other days may have other rows with the same key.
    places, before = [np.zeros(0, np.int64)], 0
    for block in events_of(store, dataset):
        train = block.filter(pl.col("split") == TRAIN_EVENT).with_row_index("row", before)
        before += train.height
        # Events are in the order of the rows of their split, so the n-th train event is that of the n-th train row.
        own = train.filter(pl.col("day") == day).join(events, on=["key", "check"], how="semi")
        places.append(own["row"].to_numpy().astype(np.int64))
    return np.sort(np.concatenate(places))


def _taken(store: Store, dataset: Artifact, schema: DatasetSchema, places: np.ndarray) -> pl.DataFrame:
    parts, start = list[pl.DataFrame](), 0
    for name, groups in zip(schema.files["train"], schema.groups["train"], strict=True):
        stop = start + sum(groups)
        own = places[slice(*np.searchsorted(places, [start, stop]))] - start
        # The first file is read in any case: without rows there must still be a frame with the columns.
        if len(own) or not parts:
            store.verify(dataset, name)
            with store.open(f"{dataset.path}/{name}") as source:
                parts.append(pl.read_parquet(source.read())[own])
        start = stop
    return pl.concat(parts)


def _moved(rows: pl.Series, before: FittedMapping, now: FittedMapping) -> pl.Series:
    if before.lookup is None or now.lookup is None:
        return rows
    to = np.full(before.rows, UNSEEN_ROW, np.int32)
    to[MISSING_ROW] = MISSING_ROW
    # Unknown ids are spread over some rows by their hash: if the spread is the same, they keep their rows.
    if before.spread is not None and before.spread == now.spread:
        to[before.spread[0] : sum(before.spread)] = np.arange(before.spread[0], sum(before.spread))
    same = before.lookup.select("hash", "row").join(now.lookup.select("hash", now="row"), on="hash")
    to[same["row"].to_numpy()] = same["now"].to_numpy()
    if rows.dtype != pl.List:
        return pl.Series(rows.name, to[rows.to_numpy()])
    return as_lists(pl.Series(rows.name, to[rows.explode().to_numpy()]), rows.list.len().to_numpy())
