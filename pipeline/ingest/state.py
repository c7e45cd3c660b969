"""The fitted state: what pass 1 says about the transforms of pass 2, how it is stored, and how it is carried on.

``transforms.json``, ``vocab/*.parquet`` and ``candidates/*.parquet`` of a dataset hold all of it. A dataset made with
``data.mapping_from`` takes it over: mappings go on, dense transforms stay as they were fitted first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from pipeline.config import SplitConfig
from pipeline.errors import ArtifactError, ConfigError
from pipeline.ingest.counts import BinCounts
from pipeline.ingest.fit import Partial
from pipeline.ingest.moments import LOG_QUANTUM
from pipeline.ingest.output import write_frame
from pipeline.ingest.sharing import Probe, Sharing, probe, shared_rows
from pipeline.ingest.spec import DataSpec, DenseSpec, SparseSpec
from pipeline.ingest.transform import DenseTransform, SparseTransform, State, binned, with_vocabulary
from pipeline.ingest.vocab_counts import VocabCounts
from pipeline.ingest.vocabulary import FREED, IDS, Mapping, empty, updated
from pipeline.records import RESERVED_ROWS, DatasetSchema, SparseColumn
from pipeline.store import Artifact, Draft, Store

TRANSFORMS = "transforms.json"
# The settings of a feature that ``transforms.json`` holds: their names there, and in its spec.
_DENSE = {name: name for name in ("column", "transform", "clip", "bins", "required")} | {"min": "low", "max": "high"}
_SPARSE = ("column", "mapping", "separator", "weight_separator", "cross", "bins", "max_ids", "integer", "required")


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """What fitting one day takes, beside its counts. ``day``, and ``first_day`` of the dataset: days since 1970.

    ``sample``: gives the typed train rows of the day, for what has to look at them again; ``seed``: of that.
    """

    day: int | None = None
    first_day: int = 0
    sample: Callable[[], Iterable[pl.DataFrame]] = tuple
    seed: int = 0


def fitted_state(spec: DataSpec, train: Partial, carried: State | None = None, how: Fitting | None = None) -> State:
    """The transforms that the ``train`` rows of a day ask for, after ``carried`` ones."""
    how, before = how or Fitting(), carried or State(dense={}, sparse={})
    dense = {f.name: before.dense.get(f.name) or _fit_dense(f, train) for f in spec.dense}
    probed = None
    if any(f.mapping == "learned" and f.name not in before.sparse for f in spec.sparse):
        probed = probe(spec, how.sample(), how.seed)
    sparse = {f.name: _fit_sparse(f, train, before.sparse.get(f.name), how, probed) for f in spec.sparse}
    return State(dense=dense, sparse=sparse)


def _fit_dense(feature: DenseSpec, train: Partial) -> DenseTransform:
    if feature.transform == "percentile":
        return DenseTransform(bounds=train.sketches[feature.name].bounds(feature.bins))
    if feature.transform == "max_norm":
        return DenseTransform(missing=math.nan)  # the model's layer tells it from a zero
    if not feature.standardised:
        return DenseTransform()
    moments = train.prepared.get(feature.name, train.raw[feature.name])
    unit = LOG_QUANTUM if feature.logarithmic else 1.0
    return DenseTransform(mean=moments.mean * unit, std=moments.std * unit or 1.0)


def _fit_sparse(
    feature: SparseSpec, train: Partial, before: SparseTransform | None, how: Fitting, probed: Probe | None
) -> SparseTransform:
    counts = train.counts[feature.name]
    if isinstance(counts, VocabCounts) and feature.mapping == "vocab":
        mapping = empty() if before is None or before.mapping is None else before.mapping
        counts.settle(mapping.ids["hash"])
        return vocab_transform(updated(mapping, counts.table(), feature, how.day, how.first_day))
    if before is not None:
        return before
    if isinstance(counts, VocabCounts):
        assert probed is not None
        return learned_transform(shared_rows(feature, counts, probed))
    if isinstance(counts, BinCounts):
        bounds = counts.sketch.bounds(feature.rows - RESERVED_ROWS)
        return SparseTransform(kind="bins", rows=feature.rows, bounds=bounds)
    return SparseTransform(kind=feature.mapping, rows=feature.rows)


def vocab_transform(mapping: Mapping) -> SparseTransform:
    """The transform of a vocabulary."""
    lookup = mapping.known.select("hash", "row").rechunk()
    return SparseTransform(kind="vocab", rows=mapping.rows, lookup=lookup, mapping=mapping)


def learned_transform(sharing: Sharing) -> SparseTransform:
    """The transform of rows that ids share."""
    ids = sharing.lookup.with_columns(pl.lit(None, pl.Int32).alias("last_day"), pl.lit(None, pl.Float64).alias("heat"))
    ids = ids.select(list(IDS))
    rows = sharing.first + sharing.unseen
    return SparseTransform(
        kind="learned", rows=rows, lookup=ids.select("hash", "row").rechunk(),
        mapping=replace(empty(), ids=ids, rows=rows), spread=(sharing.first, sharing.unseen),
    )  # fmt: skip


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
    """``transforms.json``: what was fitted, enough (with the vocabularies) to transform other rows the same way.

    ``raw``: features whose raw numbers the dataset keeps of its held-out rows; ``unseen``: those of whose held-out ids
    without a row it keeps the hashes.
    """
    dense = {
        f.name: {
            **{key: getattr(f, name) for key, name in _DENSE.items()},
            "mean": state.dense[f.name].mean, "std": state.dense[f.name].std,
            "missing": None if math.isnan(state.dense[f.name].missing) else 0.0,
            "bounds": _listed(state.dense[f.name].bounds),
        }
        for f in spec.dense
    }  # fmt: skip
    sparse = {
        f.name: {
            **{name: getattr(f, name) for name in _SPARSE},
            "rows": state.sparse[f.name].rows, "hash": "xxhash64", "seed": f.seed,
            "bounds": _listed(state.sparse[f.name].bounds), "spread": state.sparse[f.name].spread,
            "vocab": f"vocab/{f.name}.parquet" if state.sparse[f.name].mapping is not None else None,
        }
        for f in spec.sparse
    }  # fmt: skip
    label = {"column": spec.label, "positive": spec.positive, "negative": spec.negative}
    return {"label": label, "missing": list(spec.missing), "strip": spec.strip, "dense": dense, "sparse": sparse,
            "raw": binned(state), "unseen": with_vocabulary(state)}  # fmt: skip


def _listed(bounds: np.ndarray | None) -> list[float] | None:
    return None if bounds is None else bounds.tolist()


def _bounds(record: dict[str, Any]) -> np.ndarray | None:
    return None if record.get("bounds") is None else np.array(record["bounds"], np.float64)


def spec_of(record: dict[str, Any]) -> DataSpec:
    """The features of ``transforms.json``, for records that carry the same columns; no day, no split."""
    dense = tuple(
        DenseSpec(name=feature, **{name: _as_tuple(f[key]) for key, name in _DENSE.items()})
        for feature, f in record["dense"].items()
    )
    sparse = tuple(
        SparseSpec(
            name=feature,
            rows=f["rows"],
            min_count=1,
            evict_after_days=None,
            **{name: _as_tuple(f[name]) for name in _SPARSE},
        )  # fmt: skip
        for feature, f in record["sparse"].items()
    )
    label = record["label"]
    columns = [label["column"], *(f.column for f in dense), *(c for f in sparse for c in (f.cross or (f.column,)))]
    return DataSpec(
        label=label["column"], positive=label["positive"], negative=label["negative"], dense=dense, sparse=sparse,
        day_column=None, timestamp=None, true_probability=False, missing=tuple(record["missing"]),
        strip=record["strip"], split=SplitConfig(), columns=dict.fromkeys(columns, ""),
    )  # fmt: skip


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def write_state(draft: Draft, spec: DataSpec, state: State, compression: str, *, carried_on: bool) -> None:
    """Write what ``read_state`` reads; ``carried_on``: with what only the next day needs, candidates and freed rows."""
    draft.write_json(TRANSFORMS, transforms_json(spec, state))
    for name, fitted in state.sparse.items():
        mapping = fitted.mapping
        if mapping is None:
            continue
        known = mapping.known
        write_frame(
            draft, f"vocab/{name}.parquet", known if carried_on else known.drop("last_day", "heat"), compression
        )
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
        f.name: DenseTransform(
            mean=then["mean"],
            std=then["std"],
            missing=math.nan if then["missing"] is None else 0.0,
            bounds=_bounds(then),
        )  # fmt: skip
        for f in spec.dense
        if (then := record["dense"].get(f.name)) is not None
        and (then["transform"], tuple(then["clip"]), then["bins"]) == (f.transform, f.clip, f.bins)
    }
    sparse = {
        f.name: _read_sparse(store, dataset, f, then)
        for f in spec.sparse
        if (then := record["sparse"].get(f.name)) is not None
    }
    return State(dense=dense, sparse=sparse)


def _read_sparse(store: Store, dataset: Artifact, feature: SparseSpec, then: dict[str, Any]) -> SparseTransform:
    now = {"mapping": feature.mapping, "seed": feature.seed}
    if feature.mapping not in ("vocab", "learned"):
        now["rows"] = feature.rows
    for name, value in now.items():
        if then[name] != value:
            raise ConfigError(
                f"data.sparse.{feature.name}.{name} is {value!r}, but {dataset.path}, whose mapping is to be carried "
                f"on, has {then[name]!r}: every id would get another row",
                hint=f"data.sparse.{feature.name}.{name}={then[name]}, or data.mapping_from=null for new mappings",
            )
    if feature.mapping == "learned":
        mapping = _read_mapping(store, dataset, feature.name, then["rows"])
        first, count = then["spread"]
        return learned_transform(Sharing(mapping.ids.select("id", "hash", "row", "count"), first, count))
    if feature.mapping != "vocab":
        return SparseTransform(kind=feature.mapping, rows=feature.rows, bounds=_bounds(then))
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
