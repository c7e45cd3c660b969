"""The fitted state: what pass 1 says about the transforms of pass 2, how it is stored and continued.

``transforms.json``, ``vocab/*.parquet`` and ``candidates/*.parquet`` of a dataset hold all of it. A dataset made with
``data.mapping_from`` takes it over: mappings go on, dense transforms stay as they were fitted first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import polars as pl

from pipeline.config.features import PERCENTILE
from pipeline.config.ingest import SplitConfig
from pipeline.core.errors import ArtifactError, ConfigError
from pipeline.ingest.labels import CLICKS_FOR, COUNTS_FOR, typed
from pipeline.ingest.moments import LOG_QUANTUM, Moments
from pipeline.ingest.schema import DataSpec, DenseSpec, EventSource, SequenceSpec, SparseSpec
from pipeline.ingest.sketch import bin_bounds
from pipeline.ingest.statistics_pass import Partial, SplitCounts
from pipeline.ingest.transform_pass import DenseTransform, FittedState, lossy, with_vocabulary
from pipeline.records.dataset import (
    ROW_WEIGHT,
    TRANSFORMS,
    DatasetSchema,
    DenseProfile,
    FeatureProfile,
    Profile,
    SequenceColumn,
    SequenceGroup,
    SparseColumn,
    TaskColumn,
)
from pipeline.specs.id_mapping import ID_MAPPINGS, FittedMapping, FittingDay
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

# Settings of histories and of features that ``transforms.json`` holds.
_HISTORY = ("by", "days", "where", "lag_minutes")
_DENSE = ("column", "transform", "clip", "bins", "required", "min", "max")
_SPARSE = ("separator", "weight_separator", "cross", "bins", "max_ids", "integer", "required")
# Settings of a sparse feature that are written only if they are set, because earlier releases did not write them.
_OPTIONAL = ("table", "holds", "weights", "cross_bins", "sequence")
# Settings that have other names in specs.
_IN_SPEC = {"min": "low", "max": "high"}


def fitted_state(
    spec: DataSpec,
    train: Partial,
    before: FittedState | None,
    day: FittingDay,
    over: Callable[..., Iterable[Any]] = map,
) -> FittedState:
    """Fit the transforms that the train rows ask for, after those of the day before.

    Args:
        spec: the schema.
        train: what pass 1 counted of the train rows of ``day``.
        before: the state of the day before; None fits anew.
        day: what mappings may know about the day and its rows.
        over: calls a function for each table, as ``map`` does.
    """
    former = before.sparse if before else {}

    def fit(feature: SparseSpec) -> FittedMapping:
        # Features that share a table are counted separately and fitted together. Their counts are added up in a new
        # object, because the profile still needs those of each feature.
        sharing = [train.counts[other.name] for other in spec.sparse if other.owner == feature.name]
        counts = sharing[0]
        if len(sharing) > 1:
            counts = feature.mapping.counts(feature, len(spec.sparse))
            for part in sharing:
                counts.merge(part)
        return feature.mapping.fit(feature, counts, former.get(feature.name), day)

    owners = [owner.name for owner in spec.owners]
    tables = dict(zip(owners, over(fit, spec.owners), strict=True))
    sparse = {feature.name: tables[feature.owner] for feature in spec.sparse}
    return FittedState(dense=fitted_dense(spec, train, before), sparse=sparse)


def fitted_dense(spec: DataSpec, train: Partial, before: FittedState | None) -> dict[str, DenseTransform]:
    """Return the dense part of ``fitted_state``: a transform stays as it was fitted first.

    A model that is trained further must get the same numbers for the same values, whatever the newest day's mean is.
    """
    former = before.dense if before else {}
    dense = {}
    for feature in spec.dense:
        fitted = former.get(feature.name)
        if fitted is None:
            fitted = _fit_dense(feature, train)
        dense[feature.name] = fitted
    return dense


def _fit_dense(feature: DenseSpec, train: Partial) -> DenseTransform:
    if feature.binned:
        return DenseTransform(bounds=bin_bounds(train.sketches[feature.name], feature.transform, feature.bins))
    if feature.transform == "max_norm":
        # The model's layer tells a missing value from a zero.
        return DenseTransform(missing=math.nan)
    if not feature.standardised:
        return DenseTransform()
    # Logarithms were measured in multiples of LOG_QUANTUM, so that their sums are exact.
    moments = train.prepared.get(feature.name, train.raw[feature.name])
    unit = LOG_QUANTUM if feature.logarithmic else 1.0
    return DenseTransform(mean=moments.mean * unit, std=moments.std * unit or 1.0)


def dataset_schema(
    spec: DataSpec,
    state: FittedState,
    rows: dict[str, int],
    files: dict[str, list[str]],
    groups: dict[str, list[list[int]]],
) -> DatasetSchema:
    """Return ``schema.json`` of the dataset.

    Args:
        spec: the schema of the log.
        state: the fitted mappings, which have the sizes of tables.
        rows: rows by split.
        files: Parquet files by split.
        groups: rows of each row group of each file, by split.
    """
    dense, sparse, sequences = list[str](), list[SparseColumn](), list[SequenceGroup]()
    for number in spec.dense:
        dense += number.columns
    of_events = dict[str, SequenceColumn]()
    for f in spec.sparse:
        table_rows = state.sparse[f.name].rows
        if f.sequence:
            of_events[f.name] = SequenceColumn(name=f.name, rows=table_rows, table=f.table)
        else:
            column = SparseColumn(name=f.name, rows=table_rows, multi=f.lists, weighted=f.weighted, table=f.table)
            sparse.append(column)
    for sequence in spec.sequences:
        columns = tuple(of_events[name] for name in sequence.features)
        sequences.append(SequenceGroup(name=sequence.name, max_length=sequence.max_length, columns=columns))
    tasks = [TaskColumn(name=task.name, kind=task.kind.name, given=task.given) for task in spec.tasks]
    sampled = ""
    if spec.sampling.active:
        sampled = spec.sampling.correct
    return DatasetSchema(
        dense=tuple(dense),
        sparse=tuple(sparse),
        rows=rows,
        files=files,
        groups=groups,
        true_probability=spec.true_probability,
        tasks=tuple(tasks),
        row_weights=spec.row_weight is not None,
        sequences=tuple(sequences),
        sampled=sampled,
    )


def transforms_json(spec: DataSpec, state: FittedState) -> dict[str, Any]:
    """Return ``transforms.json``: what was fitted, enough (with the vocabularies) to transform other rows the same way.

    ``raw``: features whose raw numbers the dataset keeps for its held-out rows; ``unseen``: features for which it
    keeps the hashes of held-out ids that have no row.
    """
    dense = {}
    for f in spec.dense:
        fitted = state.dense[f.name]
        record = {key: getattr(f, _IN_SPEC.get(key, key)) for key in _DENSE}
        record["mean"], record["std"] = fitted.mean, fitted.std
        # Null stands for NaN, which JSON cannot express.
        record["missing"] = None if math.isnan(fitted.missing) else 0.0
        record["bounds"] = None if fitted.bounds is None else fitted.bounds.tolist()
        if f.vector:
            record["width"], record["separator"] = f.width, f.separator
        dense[f.name] = record
    sparse = {feature.name: _sparse_json(feature, state.sparse[feature.name]) for feature in spec.sparse}
    record = {
        "label": {"column": spec.label, "positive": spec.positive, "negative": spec.negative},
        "missing": list(spec.missing),
        "strip": spec.strip,
        "quote": spec.quote,
    }
    if spec.decimal != ".":
        record["decimal"] = spec.decimal
    record |= {"dense": dense, "sparse": sparse, "raw": lossy(spec, state), "unseen": with_vocabulary(state)}
    if spec.sequences:
        record["sequences"] = _sequences_json(spec)
    return record


def _sparse_json(feature: SparseSpec, fitted: FittedMapping) -> dict[str, Any]:
    record: dict[str, Any] = {"column": feature.column, "mapping": feature.mapping.name}
    for name in _SPARSE:
        record[name] = getattr(feature, name)
    record |= {"rows": fitted.rows, "hash": "xxhash64", "seed": feature.seed}
    record |= feature.mapping.record(feature.owner, fitted)
    for name in _OPTIONAL:
        if value := getattr(feature, name):
            record[name] = value
    if feature.bins_by != PERCENTILE:
        record["bins_by"] = feature.bins_by
    return record


def _sequences_json(spec: DataSpec) -> dict[str, Any]:
    built = {}
    for plan in spec.histories:
        built[plan.name] = {name: getattr(plan, name) for name in _HISTORY} | {"of": dict(plan.of)}
    record: dict[str, Any] = {"row_time": spec.row_time, "time_zone": spec.time_zone}
    if spec.time_format is not None:
        record["time_format"] = spec.time_format
    record["groups"] = {}
    for sequence in spec.sequences:
        time = None if sequence.time is None else asdict(sequence.time)
        record["groups"][sequence.name] = {
            "columns": {name: asdict(source) for name, source in sequence.columns.items()},
            "time": time,
            "max_length": sequence.max_length,
            "age_bins": sequence.age_bins,
            "drop_leaks": sequence.drop_leaks,
            # None means that the log had the sequence. Earlier releases did not say.
            "history": built.get(sequence.name),
        }
    return record


def unreadable_sequence(rows: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """Say why a model cannot read the sequences of ``rows``: "" if it can, or has none.

    Both are records of ``transforms.json``: of the rows' dataset, and of the dataset that the model was trained on. A
    model has vectors for the places of ``max_length`` events and no more; the id of an age is the number of its bin.
    """
    dataset_groups = rows.get("sequences", {}).get("groups", {})
    for name, expected in model.get("sequences", {}).get("groups", {}).items():
        given = dataset_groups.get(name)
        if given is None:
            return f"it needs sequence {name!r}, which the dataset does not have"
        if given["max_length"] > expected["max_length"]:
            return (
                f"sequence {name!r} has up to {given['max_length']} events in the dataset, "
                f"{expected['max_length']} in the model"
            )
        if expected["time"] is not None and given["age_bins"] != expected["age_bins"]:
            bins = f"{given['age_bins']} bins in the dataset, {expected['age_bins']} in the model"
            return f"ages of sequence {name!r} have {bins}"
    return ""


def spec_of(record: dict[str, Any]) -> DataSpec:
    """Return the schema behind ``transforms.json``, for records that carry the same columns; no day, no split."""
    label = record["label"]
    columns = [label["column"]]
    dense, sparse, sequences = list[DenseSpec](), list[SparseSpec](), list[SequenceSpec]()
    for name, f in record["dense"].items():
        settings = _settings_of(f, _DENSE)
        number = DenseSpec(name=name, width=f.get("width", 1), separator=f.get("separator", ","), **settings)
        dense.append(number)
        columns.append(number.column)
    weights = []
    for name, f in record["sparse"].items():
        settings = _settings_of(f, {*_SPARSE, *(f.keys() & _OPTIONAL)})
        # This schema fits nothing, so settings that only fitting reads may have any value.
        feature = SparseSpec(
            name=name,
            column=f["column"],
            mapping=ID_MAPPINGS.get(f["mapping"]),
            rows=f["rows"],
            min_count=1,
            evict_after_days=None,
            bins_by=f.get("bins_by", PERCENTILE),
            **settings,
        )
        sparse.append(feature)
        columns += feature.cross or (feature.column,)
        if feature.weights:
            weights.append(feature.weights)
    columns += weights
    timed = record.get("sequences", {})
    for name, group in timed.get("groups", {}).items():
        time = group["time"]
        if time is not None:
            time = EventSource(**time)
        sequence = SequenceSpec(
            name=name,
            columns={feature: EventSource(**source) for feature, source in group["columns"].items()},
            time=time,
            max_length=group["max_length"],
            age_bins=group["age_bins"],
            drop_leaks=group["drop_leaks"],
        )
        sequences.append(sequence)
        columns += [source.column for source in sequence.sources]
    row_time = timed.get("row_time")
    if row_time:
        columns.append(row_time)
    return DataSpec(
        label=label["column"],
        positive=label["positive"],
        negative=label["negative"],
        dense=tuple(dense),
        sparse=tuple(sparse),
        day_column=None,
        timestamp=None,
        true_probability=False,
        missing=tuple(record["missing"]),
        strip=record["strip"],
        split=SplitConfig(),
        columns=dict.fromkeys(columns, ""),
        sequences=tuple(sequences),
        row_time=row_time,
        time_zone=timed.get("time_zone"),
        decimal=record.get("decimal", "."),
        time_format=timed.get("time_format"),
    )


def _settings_of(record: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    # Returns the fields of a spec that `record` holds under `keys`. Lists of JSON become tuples again, because specs
    # are hashed.
    settings = {}
    for key in keys:
        value = record[key]
        if isinstance(value, list):
            value = tuple(value)
        settings[_IN_SPEC.get(key, key)] = value
    return settings


def continued_state(store: Store, path: str, spec: DataSpec) -> FittedState:
    """Return the state of the dataset at ``path``, to be continued; ConfigError if ids would get other rows."""
    dataset = store.get(path, "ingest")
    record = store.read_json(f"{path}/{TRANSFORMS}")["sparse"]
    for f in spec.sparse:
        former = record.get(f.name, {}).get("table", "")
        if f.name in record and former != f.table:
            raise ConfigError(
                f"data.sparse.{f.name}.table is {f.table or None!r}, but {path}, whose mapping continues, has "
                f"{former or None!r}: every id would get another row",
                hint=f"data.sparse.{f.name}.table={former or 'null'}, or data.mapping_from=null for new mappings",
            )
        if f.name in record and not f.table:
            f.mapping.require_compatible(f, record[f.name], path, dataset.config)
    return read_state(store, path, spec)


def read_state(store: Store, path: str, spec: DataSpec) -> FittedState:
    """Return the state of the dataset or version at ``path``, for the features it has; ArtifactError if there is none.

    A dense feature whose transform, clip or bins are different now is left out.
    """
    dataset = store.get(path, "ingest")
    record = store.read_json(f"{path}/{TRANSFORMS}")
    dense, sparse, tables = dict[str, DenseTransform](), dict[str, FittedMapping](), dict[str, FittedMapping]()
    for f in spec.dense:
        former = record["dense"].get(f.name)
        if former is None or former.get("width", 1) != f.width:
            continue
        if (former["transform"], tuple(former["clip"]), former["bins"]) == (f.transform, f.clip, f.bins):
            dense[f.name] = dense_transform(former)
    for owner in spec.owners:
        former = record["sparse"].get(owner.name)
        if former is not None:
            tables[owner.name] = owner.mapping.read(owner.name, former, lambda file: _read_table(store, dataset, file))
    for feature in spec.sparse:
        if feature.name in record["sparse"] and feature.owner in tables:
            sparse[feature.name] = tables[feature.owner]
    return FittedState(dense=dense, sparse=sparse)


def dense_transform(record: Mapping[str, Any]) -> DenseTransform:
    """Return the fit of a dense feature by its ``record`` in ``transforms.json``."""
    bounds = record.get("bounds")
    if bounds is not None:
        bounds = np.array(bounds, np.float64)
    # Null stands for NaN.
    missing = math.nan if record["missing"] is None else 0.0
    return DenseTransform(mean=record["mean"], std=record["std"], missing=missing, bounds=bounds)


def _read_table(store: Store, dataset: Artifact, file: str) -> pl.DataFrame | None:
    if file not in dataset.files:
        return None
    store.verify(dataset, file)
    try:
        with store.open(f"{dataset.path}/{file}") as source:
            return pl.read_parquet(source.read())
    except (OSError, pl.exceptions.PolarsError) as error:
        url = store.url_of(f"{dataset.path}/{file}")
        raise ArtifactError(f"{url} cannot be read: {error}", hint="data.mapping_from=<another day's>") from error


def make_profile(spec: DataSpec, split_counts: SplitCounts, state: FittedState) -> Profile:
    """Return ``profile.json`` of a fitted log, for the planner and people; shares are of train rows or lookups."""
    train = split_counts.train
    label_rate, dense, sparse = dict[str, float](), dict[str, DenseProfile](), dict[str, FeatureProfile]()
    for split, count in split_counts.rows.items():
        label_rate[split] = split_counts.positives[split] / count if count else 0.0
    for number in spec.dense:
        dense[number.name] = _dense_profile(train.raw[number.name], train.rows * number.width)
    for feature in spec.sparse:
        sparse[feature.name] = _sparse_profile(feature, train, state)
    tasks = {task.name: _dense_profile(train.labels[typed(task.name)], train.rows) for task in spec.tasks}
    row_weight = None
    if spec.row_weight:
        row_weight = _dense_profile(train.labels[ROW_WEIGHT], train.rows)
    # The click rate of the rows that the train rows stand for; None if each stands for itself.
    base_rate = None
    if COUNTS_FOR in train.labels and train.labels[COUNTS_FOR].mean:
        base_rate = train.labels[CLICKS_FOR].mean / train.labels[COUNTS_FOR].mean
    sequences = {name: lengths.profile() for name, lengths in train.lengths.items()}
    return Profile(
        rows=split_counts.rows,
        label_rate=label_rate,
        dense=dense,
        sparse=sparse,
        tasks=tasks or None,
        row_weight=row_weight,
        base_rate=base_rate,
        sequences=sequences or None,
    )


def _dense_profile(moments: Moments, rows: int) -> DenseProfile:
    minimum, maximum = moments.minimum, moments.maximum
    if not moments.count:
        # Without values they are infinite, which JSON cannot express.
        minimum = maximum = 0.0
    return DenseProfile(
        missing_share=1 - moments.count / rows,
        minimum=minimum,
        maximum=maximum,
        mean=moments.mean,
        std=moments.std,
    )


def _sparse_profile(feature: SparseSpec, train: Partial, state: FittedState) -> FeatureProfile:
    counts, missing = train.counts[feature.name], train.missing[feature.name]
    fitted = state.sparse[feature.name]
    hot_rows, hot_share = counts.curve(fitted, missing)
    # The missing share is one of lookups for a sequence, and one of rows for any other feature.
    total = train.rows
    if feature.sequence:
        total = max(train.lookups[feature.name], 1)
    # A missing value looks up one row, however many rows an id has.
    lookups = missing + feature.mapping.rows_per_id * (train.lookups[feature.name] - missing)
    return FeatureProfile(
        rows=fitted.rows,
        distinct=counts.distinct,
        missing_share=missing / total,
        pooling=lookups / train.rows,
        hot_rows=hot_rows,
        hot_share=hot_share,
    )
