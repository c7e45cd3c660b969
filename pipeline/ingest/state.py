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
from pipeline.errors import ArtifactError, ConfigError
from pipeline.ingest.binning import bin_bounds
from pipeline.ingest.moments import LOG_QUANTUM, Moments
from pipeline.ingest.sampling import CLICKS_FOR, COUNTS_FOR
from pipeline.ingest.schema import DataSpec, DenseSpec, EventSource, SequenceSpec, SparseSpec
from pipeline.ingest.statistics_pass import Fit, Partial
from pipeline.ingest.tasks import typed
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
from pipeline.specs.id_mapping import ID_MAPPINGS, Counts, FittedMapping, FittingDay
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

# The settings of a feature that ``transforms.json`` holds: their names there, and in its spec.
_HISTORY = ("by", "days", "where", "lag_minutes")
_DENSE = {name: name for name in ("column", "transform", "clip", "bins", "required")} | {"min": "low", "max": "high"}
_QUIET = ("table", "holds", "weights", "cross_bins", "sequence")  # of a sparse feature, where they are set
_SPARSE = ("separator", "weight_separator", "cross", "bins", "max_ids", "integer", "required")


def fitted_state(
    spec: DataSpec,
    train: Partial,
    before: FittedState | None,
    day: FittingDay,
    over: Callable[..., Iterable[Any]] = map,
) -> FittedState:
    """The transforms that the ``train`` rows of ``day`` ask for, after those of the day ``before``.

    ``over``: what calls a function for each table, as ``map`` does.
    """
    former = before.sparse if before else {}

    def fit(f: SparseSpec) -> FittedMapping:
        return f.mapping.fit(f, _counts(f, spec, train), former.get(f.name), day)

    tables = dict(zip((f.name for f in spec.owners), over(fit, spec.owners), strict=True))
    return FittedState(dense=fitted_dense(spec, train, before), sparse={f.name: tables[f.owner] for f in spec.sparse})


def fitted_dense(spec: DataSpec, train: Partial, before: FittedState | None) -> dict[str, DenseTransform]:
    """The dense part of ``fitted_state``."""
    former = before.dense if before else {}
    return {f.name: former.get(f.name) or _fit_dense(f, train) for f in spec.dense}


def _counts(feature: SparseSpec, spec: DataSpec, train: Partial) -> Counts:
    sharing = [train.counts[f.name] for f in spec.sparse if f.owner == feature.name]
    if len(sharing) == 1:
        return sharing[0]
    together = feature.mapping.counts(feature, len(spec.sparse))
    for each in sharing:
        together.merge(each)
    return together


def _fit_dense(feature: DenseSpec, train: Partial) -> DenseTransform:
    if feature.binned:
        return DenseTransform(bounds=bin_bounds(train.sketches[feature.name], feature.transform, feature.bins))
    if feature.transform == "max_norm":
        return DenseTransform(missing=math.nan)  # the model's layer tells it from a zero
    if not feature.standardised:
        return DenseTransform()
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
    """``schema.json`` of the dataset."""
    sparse = tuple(
        SparseColumn(name=f.name, rows=state.sparse[f.name].rows, multi=f.lists, weighted=f.weighted, table=f.table)
        for f in spec.sparse
        if not f.sequence
    )
    sequences = tuple(_sequence_columns(each, spec, state) for each in spec.sequences)
    return DatasetSchema(
        dense=tuple(name for feature in spec.dense for name in feature.columns),
        sparse=sparse,
        rows=rows,
        files=files,
        groups=groups,
        true_probability=spec.true_probability,
        tasks=_task_columns(spec),
        row_weights=spec.row_weight is not None,
        sequences=sequences,
        sampled=spec.sampling.correct if spec.sampling.active else "",
    )


def _sequence_columns(sequence: SequenceSpec, spec: DataSpec, state: FittedState) -> SequenceGroup:
    tables = {f.name: f.table for f in spec.sparse}
    return SequenceGroup(
        name=sequence.name,
        max_length=sequence.max_length,
        columns=tuple(
            SequenceColumn(name=name, rows=state.sparse[name].rows, table=tables[name]) for name in sequence.features
        ),
    )


def _task_columns(spec: DataSpec) -> tuple[TaskColumn, ...]:
    return tuple(TaskColumn(name=task.name, kind=task.kind.name, given=task.given) for task in spec.tasks)


def transforms_json(spec: DataSpec, state: FittedState) -> dict[str, Any]:
    """``transforms.json``: what was fitted, enough (with the vocabularies) to transform other rows the same way.

    ``raw``: features whose raw numbers the dataset keeps of its held-out rows; ``unseen``: those of whose held-out ids
    without a row it keeps the hashes.
    """
    dense = {
        f.name: {
            **{key: getattr(f, name) for key, name in _DENSE.items()},
            "mean": state.dense[f.name].mean,
            "std": state.dense[f.name].std,
            "missing": None if math.isnan(state.dense[f.name].missing) else 0.0,
            "bounds": None if (bounds := state.dense[f.name].bounds) is None else bounds.tolist(),
            **({"width": f.width, "separator": f.separator} if f.vector else {}),
        }
        for f in spec.dense
    }
    sparse = {
        f.name: {
            "column": f.column,
            "mapping": f.mapping.name,
            **{name: getattr(f, name) for name in _SPARSE},
            "rows": state.sparse[f.name].rows,
            "hash": "xxhash64",
            "seed": f.seed,
            **f.mapping.record(f.owner, state.sparse[f.name]),
            **{name: value for name in _QUIET if (value := getattr(f, name))},
            **({"bins_by": f.bins_by} if f.bins_by != PERCENTILE else {}),
        }
        for f in spec.sparse
    }
    label = {"column": spec.label, "positive": spec.positive, "negative": spec.negative}
    sequences = {"sequences": _sequences_json(spec)} if spec.sequences else {}
    decimal = {"decimal": spec.decimal} if spec.decimal != "." else {}
    return {
        "label": label,
        "missing": list(spec.missing),
        "strip": spec.strip,
        "quote": spec.quote,
        **decimal,
        "dense": dense,
        "sparse": sparse,
        "raw": lossy(spec, state),
        "unseen": with_vocabulary(state),
        **sequences,
    }


def _sequences_json(spec: DataSpec) -> dict[str, Any]:
    built = {
        plan.name: {**{name: getattr(plan, name) for name in _HISTORY}, "of": dict(plan.of)} for plan in spec.histories
    }
    return {
        "row_time": spec.row_time,
        "time_zone": spec.time_zone,
        **({} if spec.time_format is None else {"time_format": spec.time_format}),
        "groups": {
            each.name: {
                "columns": {name: asdict(source) for name, source in each.columns.items()},
                "time": None if each.time is None else asdict(each.time),
                "max_length": each.max_length,
                "age_bins": each.age_bins,
                "drop_leaks": each.drop_leaks,
                "history": built.get(each.name),  # None: the log had it; earlier releases did not say
            }
            for each in spec.sequences
        },
    }


def unreadable_sequence(rows: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """Why a model cannot read the sequences of ``rows``: "" where it can, or has none.

    Both are records of ``transforms.json``: of the rows' dataset, and of the dataset that the model was trained on. A
    model has vectors for the places of ``max_length`` events and no more; the id of an age is the number of its bin.
    """
    groups = rows.get("sequences", {}).get("groups", {})
    for name, own in model.get("sequences", {}).get("groups", {}).items():
        given = groups.get(name)
        if given is None:
            return f"it needs sequence {name!r}, which the dataset does not have"
        if given["max_length"] > own["max_length"]:
            return (
                f"sequence {name!r} has up to {given['max_length']} events in the dataset, "
                f"{own['max_length']} in the model"
            )
        if own["time"] is not None and given["age_bins"] != own["age_bins"]:
            bins = f"{given['age_bins']} bins in the dataset, {own['age_bins']} in the model"
            return f"ages of sequence {name!r} have {bins}"
    return ""


def _sequences_of(record: Mapping[str, Any]) -> tuple[SequenceSpec, ...]:
    return tuple(
        SequenceSpec(
            name=name,
            columns={feature: EventSource(**source) for feature, source in each["columns"].items()},
            time=None if each["time"] is None else EventSource(**each["time"]),
            max_length=each["max_length"],
            age_bins=each["age_bins"],
            drop_leaks=each["drop_leaks"],
        )
        for name, each in record.get("groups", {}).items()
    )


def spec_of(record: dict[str, Any]) -> DataSpec:
    """The features of ``transforms.json``, for records that carry the same columns; no day, no split."""
    dense = tuple(
        DenseSpec(
            name=feature,
            **{name: _as_tuple(f[key]) for key, name in _DENSE.items()},
            width=f.get("width", 1),
            separator=f.get("separator", ","),
        )
        for feature, f in record["dense"].items()
    )
    sparse = tuple(
        SparseSpec(
            name=feature,
            column=f["column"],
            mapping=ID_MAPPINGS.get(f["mapping"]),
            rows=f["rows"],
            min_count=1,
            evict_after_days=None,
            **{name: f[name] for name in _QUIET if name in f},
            bins_by=f.get("bins_by", PERCENTILE),
            **{name: _as_tuple(f[name]) for name in _SPARSE},
        )
        for feature, f in record["sparse"].items()
    )
    label = record["label"]
    columns = [label["column"], *(f.column for f in dense), *(c for f in sparse for c in (f.cross or (f.column,)))]
    columns += [f.weights for f in sparse if f.weights]
    timed = record.get("sequences", {})
    sequences, row_time = _sequences_of(timed), timed.get("row_time")
    columns += [source.column for each in sequences for source in each.sources] + ([row_time] if row_time else [])
    return DataSpec(
        label=label["column"],
        positive=label["positive"],
        negative=label["negative"],
        dense=dense,
        sparse=sparse,
        day_column=None,
        timestamp=None,
        true_probability=False,
        missing=tuple(record["missing"]),
        strip=record["strip"],
        split=SplitConfig(),
        columns=dict.fromkeys(columns, ""),
        sequences=sequences,
        row_time=row_time,
        time_zone=timed.get("time_zone"),
        decimal=record.get("decimal", "."),
        time_format=timed.get("time_format"),
    )


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def continued_state(store: Store, path: str, spec: DataSpec) -> FittedState:
    """The state of the dataset at ``path``, to be continued; ConfigError if ids would get other rows."""
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
    """The state of the dataset or version at ``path``, of the features that it has; ArtifactError if there is none.

    A dense feature whose transform, clip or bins are others now is left out.
    """
    dataset = store.get(path, "ingest")
    record = store.read_json(f"{path}/{TRANSFORMS}")
    dense = {
        f.name: dense_transform(then)
        for f in spec.dense
        if (then := record["dense"].get(f.name)) is not None
        and (then["transform"], tuple(then["clip"]), then["bins"]) == (f.transform, f.clip, f.bins)
        and then.get("width", 1) == f.width
    }
    tables = {
        f.name: f.mapping.read(f.name, then, lambda file: _frame(store, dataset, file))
        for f in spec.owners
        if (then := record["sparse"].get(f.name)) is not None
    }
    sparse = {f.name: tables[f.owner] for f in spec.sparse if f.name in record["sparse"] and f.owner in tables}
    return FittedState(dense=dense, sparse=sparse)


def dense_transform(record: Mapping[str, Any]) -> DenseTransform:
    """The fit behind a dense feature's ``record`` of ``transforms.json``."""
    missing, bounds = record["missing"], record.get("bounds")
    return DenseTransform(
        mean=record["mean"],
        std=record["std"],
        missing=math.nan if missing is None else 0.0,
        bounds=None if bounds is None else np.array(bounds, np.float64),
    )


def _frame(store: Store, dataset: Artifact, file: str) -> pl.DataFrame | None:
    if file not in dataset.files:
        return None
    store.verify(dataset, file)
    try:
        with store.open(f"{dataset.path}/{file}") as source:
            return pl.read_parquet(source.read())
    except (OSError, pl.exceptions.PolarsError) as error:
        url = store.url_of(f"{dataset.path}/{file}")
        raise ArtifactError(f"{url} cannot be read: {error}", hint="data.mapping_from=<another day's>") from error


def make_profile(spec: DataSpec, fit: Fit, state: FittedState) -> Profile:
    """``profile.json`` of a fitted log, for the planner and people; every share is of train rows or train lookups."""
    rows, positives = fit.rows, fit.positives
    return Profile(
        rows=rows,
        label_rate={split: positives[split] / count if count else 0.0 for split, count in rows.items()},
        dense={f.name: _dense(fit.train.raw[f.name], fit.train.rows * f.width) for f in spec.dense},
        sparse={feature.name: _sparse(feature, fit.train, state) for feature in spec.sparse},
        tasks={t.name: _dense(fit.train.labels[typed(t.name)], fit.train.rows) for t in spec.tasks} or None,
        row_weight=_dense(fit.train.labels[ROW_WEIGHT], fit.train.rows) if spec.row_weight else None,
        base_rate=_base_rate(fit.train),
        sequences={name: lengths.profile() for name, lengths in fit.train.lengths.items()} or None,
    )


def _base_rate(train: Partial) -> float | None:
    # The click rate of the rows that the train rows stand for; None where each stands for itself.
    if COUNTS_FOR not in train.labels:
        return None
    rows = train.labels[COUNTS_FOR].mean
    return train.labels[CLICKS_FOR].mean / rows if rows else None


def _dense(moments: Moments, rows: int) -> DenseProfile:
    seen = moments.count > 0
    return DenseProfile(
        missing_share=1 - moments.count / rows,
        minimum=moments.minimum if seen else 0.0,
        maximum=moments.maximum if seen else 0.0,
        mean=moments.mean,
        std=moments.std,
    )


def _sparse(feature: SparseSpec, train: Partial, state: FittedState) -> FeatureProfile:
    counts, missing = train.counts[feature.name], train.missing[feature.name]
    fitted = state.sparse[feature.name]
    hot_rows, hot_share = counts.curve(fitted, missing)
    of = train.rows if not feature.sequence else max(train.lookups[feature.name], 1)
    lookups = missing + feature.mapping.rows_per_id * (train.lookups[feature.name] - missing)
    return FeatureProfile(
        rows=fitted.rows,
        distinct=counts.distinct,
        missing_share=missing / of,
        pooling=lookups / train.rows,
        hot_rows=hot_rows,
        hot_share=hot_share,
    )
