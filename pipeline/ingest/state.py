"""The fitted state: what pass 1 says about the transforms of pass 2, how it is stored, and how it is carried on.

``transforms.json``, ``vocab/*.parquet`` and ``candidates/*.parquet`` of a dataset hold all of it. A dataset made with
``data.mapping_from`` takes it over: mappings go on, dense transforms stay as they were fitted first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import polars as pl

from pipeline.artifacts import Artifact, Draft, Store
from pipeline.contracts import DatasetSchema, SparseColumn
from pipeline.errors import ArtifactError, ConfigError
from pipeline.ingest.fit import Partial, VocabCounts
from pipeline.ingest.mapping import FREED, IDS, Mapping, empty, updated
from pipeline.ingest.moments import LOG_QUANTUM
from pipeline.ingest.output import write_frame
from pipeline.ingest.spec import DataSpec, DenseSpec, SparseSpec
from pipeline.ingest.transform import DenseTransform, SparseTransform, State

TRANSFORMS = "transforms.json"
# What decides the row of an id; carried on only where both sides agree.
_SAME = ("mapping", "seed", "separator", "weight_separator")


def fitted_state(
    spec: DataSpec, train: Partial, carried: State | None = None, day: int | None = None, first_day: int = 0
) -> State:
    """The transforms that the ``train`` rows of ``day`` ask for, after ``carried`` ones; both of days since 1970.

    ``first_day``: of the dataset that is being made.
    """
    before = carried or State(dense={}, sparse={})
    dense = {f.name: before.dense.get(f.name) or _fit_dense(f, train) for f in spec.dense}
    sparse = {f.name: _fit_sparse(f, train, before.sparse.get(f.name), day, first_day) for f in spec.sparse}
    return State(dense=dense, sparse=sparse)


def _fit_dense(feature: DenseSpec, train: Partial) -> DenseTransform:
    mean, std = 0.0, 1.0
    if feature.standardised:
        moments = (train.logs if feature.logarithmic else train.raw)[feature.name]
        unit = LOG_QUANTUM if feature.logarithmic else 1.0
        mean, std = moments.mean * unit, moments.std * unit or 1.0
    return DenseTransform(logarithmic=feature.logarithmic, mean=mean, std=std)


def _fit_sparse(
    feature: SparseSpec, train: Partial, before: SparseTransform | None, day: int | None, first_day: int
) -> SparseTransform:
    counts = train.counts[feature.name]
    if not isinstance(counts, VocabCounts):
        return SparseTransform(kind=feature.mapping, rows=feature.rows)
    mapping = empty() if before is None or before.mapping is None else before.mapping
    return vocab_transform(updated(mapping, counts.table(), feature, day, first_day))


def vocab_transform(mapping: Mapping) -> SparseTransform:
    """The transform of a vocabulary."""
    lookup = mapping.known.select("hash", "row").rechunk()
    return SparseTransform(kind="vocab", rows=mapping.rows, lookup=lookup, mapping=mapping)


def dataset_schema(
    spec: DataSpec, state: State, rows: dict[str, int], files: dict[str, list[str]], groups: dict[str, list[list[int]]]
) -> DatasetSchema:
    """``schema.json`` of the dataset."""
    sparse = tuple(
        SparseColumn(name=f.name, rows=state.sparse[f.name].rows, multi=f.lists, weighted=f.weighted)
        for f in spec.sparse
    )
    return DatasetSchema(
        dense=tuple(feature.name for feature in spec.dense), sparse=sparse, rows=rows, files=files, groups=groups,
        true_probability=spec.true_probability,
    )  # fmt: skip


def transforms_json(spec: DataSpec, state: State) -> dict[str, Any]:
    """``transforms.json``: what was fitted, enough (with the vocabularies) to transform other rows the same way."""
    dense = {
        feature.name: {
            "column": feature.column, "transform": feature.transform,
            "mean": state.dense[feature.name].mean, "std": state.dense[feature.name].std, "missing": 0.0,
        }
        for feature in spec.dense
    }  # fmt: skip
    sparse = {
        feature.name: {
            "column": feature.column, "mapping": feature.mapping, "rows": state.sparse[feature.name].rows,
            "hash": "xxhash64", "seed": feature.seed, "separator": feature.separator,
            "weight_separator": feature.weight_separator,
            "vocab": f"vocab/{feature.name}.parquet" if state.sparse[feature.name].mapping is not None else None,
        }
        for feature in spec.sparse
    }  # fmt: skip
    label = {"column": spec.label, "positive": spec.positive, "negative": spec.negative}
    return {"label": label, "missing": list(spec.missing), "strip": spec.strip, "dense": dense, "sparse": sparse}


def write_state(draft: Draft, spec: DataSpec, state: State, compression: str, *, carried_on: bool) -> None:
    """Write what ``read_state`` reads; ``carried_on``: with what only the next day needs, candidates and freed rows."""
    draft.write_json(TRANSFORMS, transforms_json(spec, state))
    for name, fitted in state.sparse.items():
        mapping = fitted.mapping
        if mapping is None:
            continue
        known = mapping.known
        write_frame(draft, f"vocab/{name}.parquet", known if carried_on else known.drop("last_day"), compression)
        if carried_on:
            write_frame(draft, f"candidates/{name}.parquet", mapping.candidates, compression)
            write_frame(draft, f"freed/{name}.parquet", mapping.freed, compression)


def read_state(store: Store, path: str, spec: DataSpec) -> State:
    """The state of the dataset at ``path``, of the features whose settings are the same now; ArtifactError if none.

    ConfigError where a feature's ids would get other rows: its mapping or the rows it hashes into differ.
    """
    dataset = store.get(path, "ingest")
    record = store.read_json(f"{path}/{TRANSFORMS}")
    dense = {
        f.name: DenseTransform(logarithmic=f.logarithmic, mean=then["mean"], std=then["std"])
        for f in spec.dense
        if (then := record["dense"].get(f.name)) is not None and then["transform"] == f.transform
    }
    sparse = {
        f.name: _read_sparse(store, dataset, f, then)
        for f in spec.sparse
        if (then := record["sparse"].get(f.name)) is not None
    }
    return State(dense=dense, sparse=sparse)


def _read_sparse(store: Store, dataset: Artifact, feature: SparseSpec, then: dict[str, Any]) -> SparseTransform:
    now = {"mapping": feature.mapping, "seed": feature.seed, "separator": feature.separator,
           "weight_separator": feature.weight_separator}  # fmt: skip
    if feature.mapping != "vocab":
        now["rows"] = feature.rows
    for name, value in now.items():
        if then[name] != value and name in (*_SAME[:2], "rows"):
            raise ConfigError(
                f"data.sparse.{feature.name}.{name} is {value!r}, but {dataset.path}, whose mapping is to be carried "
                f"on, has {then[name]!r}: every id would get another row",
                hint=f"data.sparse.{feature.name}.{name}={then[name]}, or data.mapping_from=null for new mappings",
            )
    if feature.mapping != "vocab":
        return SparseTransform(kind=feature.mapping, rows=feature.rows)
    return vocab_transform(_read_mapping(store, dataset, feature.name, then["rows"]))


def _read_mapping(store: Store, dataset: Artifact, name: str, rows: int) -> Mapping:
    parts = []
    for file in (f"vocab/{name}.parquet", f"candidates/{name}.parquet"):
        if file not in dataset.files:
            continue
        store.verify(dataset, file)
        try:
            with store.open(f"{dataset.path}/{file}") as source:
                frame = pl.read_parquet(source.read())
        except (OSError, pl.exceptions.PolarsError) as error:
            url = store.url_of(f"{dataset.path}/{file}")
            raise ArtifactError(f"{url} cannot be read: {error}", hint="data.mapping_from=<another day's>") from error
        missing = [pl.lit(None, kind).alias(column) for column, kind in IDS.items() if column not in frame.columns]
        parts.append(frame.with_columns(missing).select(pl.col(column).cast(kind) for column, kind in IDS.items()))
    return replace(empty(), ids=pl.concat(parts), rows=rows, freed=pl.DataFrame(schema=FREED))
