"""Rows of one dataset as a model trained on another one reads them, with its id mappings and scales.

Today's rows hold row numbers of today's mapping. A model that was trained on another dataset has another mapping. Both
use the same 64-bit hash of an id, which leads from row to row. All ids without a row today share row 1, and the other
model may have rows for them: the dataset keeps their hashes for its held-out rows. A percentile or a bin does not
determine the number it came from. Neither does a clipped number, a 0 that may be a missing value, or a standardised
number far from the mean, which float32 rounds. These are computed from the raw numbers, which the dataset also keeps.
Where the rows do not show what the other model would see (``comparable``), it cannot be judged as it serves, and
``NotComparableError`` says which setting it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pipeline.config.features import BINNINGS
from pipeline.ingest.ids import as_bits
from pipeline.ingest.schema import DenseSpec
from pipeline.ingest.state import dense_transform, unreadable_sequence
from pipeline.ingest.transform_pass import DenseTransform, dense_column
from pipeline.records.dataset import RESERVED_ROWS, TRANSFORMS, UNSEEN_ROW, vector_columns
from pipeline.serving.comparable import differences
from pipeline.specs.id_mapping import ID_MAPPINGS, FittedMapping, IdMapping
from pipeline.store.artifacts import Store

# Settings that may differ between two mappings that hash ids alike. ``max_ids`` has a check of its own.
_FREE = {"column", "rows", "vocab", "mapping", "spread", "required", "max_ids"}
# Settings of a sparse feature that a record has only where they are set.
_QUIET = {"holds", "weights", "cross_bins", "sequence"}
# Keys of a dense feature's record that its values follow from.
_FITTED = ("transform", "clip", "mean", "std", "missing", "bounds")
_COARSE = "has a mean so far from the model's that float32 rounds its numbers away"
# Largest rounding error, as a share of the standard deviation that the model knows.
_MOST_ROUNDING = 1e-3
_MERGED = "does not tell a zero from a missing value"
_OTHER_MAPPING = "feature {!r} is mapped by {} in the dataset, by {} in the model"


class NotComparableError(Exception):
    """The rows do not hold what the other model needs; the message says which feature, and why."""


@dataclass(frozen=True)
class FeatureScale:
    """A dense feature's fitted transform, both ways."""

    feature: DenseSpec
    fitted: DenseTransform

    @staticmethod
    def of(name: str, record: Mapping[str, Any]) -> FeatureScale:
        """Return the scale of a feature by its ``record`` in ``transforms.json``."""
        clip, transform = tuple(record.get("clip") or ()), record["transform"]
        return FeatureScale(DenseSpec(name=name, column=name, transform=transform, clip=clip), dense_transform(record))

    def values(self, numbers: NDArray[np.floating]) -> NDArray[np.float32]:
        """Return raw ``numbers`` [n] as ingestion transforms them, float32 [n]; NaN: missing."""
        column = pl.Series(f"dense:{self.feature.name}", numbers.astype(np.float64), nan_to_null=True)
        return dense_column(column.to_frame(), self.feature, self.fitted).to_numpy()

    def numbers(self, values: NDArray[np.floating], *, bounds: bool = False) -> NDArray[np.float64]:
        """Return the raw numbers [n] of ``values`` [n] in this scale, which must not be one of bins; NaN: missing.

        In a standardised scale a 0 is a missing value (or the mean itself, which is as good). ``bounds``: the values
        are bounds of bins, and none of them is missing.
        """
        raw = values.astype(np.float64) * self.fitted.std + self.fitted.mean
        if self.feature.logarithmic:
            raw = np.sign(raw) * np.expm1(np.abs(raw))
        return raw if bounds or np.isnan(self.fitted.missing) else np.where(values == 0, np.nan, raw)


@dataclass(frozen=True)
class DenseTranslation:
    """A dense feature's values from the scale ``now`` to the scale ``then``.

    ``raw``: the dataset keeps the feature's raw numbers, and they are taken in place of its values.
    """

    now: FeatureScale
    then: FeatureScale
    raw: bool = False

    def apply(self, values: NDArray[np.floating]) -> NDArray[np.float32]:
        """Translate ``values`` [n] to float32 [n]: raw numbers if ``raw`` is set, else values in the scale ``now``."""
        if self.raw:
            return self.then.values(values)
        then, bounds = self.then, self.then.fitted.bounds
        if bounds is not None:
            # Round the bounds as the values were rounded, so that equal numbers stay equal.
            rounded = self.now.numbers(self.now.values(bounds), bounds=True)
            then = replace(then, fitted=replace(then.fitted, bounds=rounded))
        return then.values(self.now.numbers(values))


@dataclass(frozen=True)
class IdsTranslation:
    """A sparse feature's rows in the other model's table, by its mapping ``fitted`` there.

    ``table``: the row for each row of today's table; None for bins, which are computed from the raw numbers.
    ``unseen``: the dataset keeps the hashes of the ids that have no row today.
    """

    mapping: IdMapping
    fitted: FittedMapping
    table: NDArray[np.int32] | None
    unseen: bool = False

    def apply(self, ids: NDArray[Any], unseen: NDArray[np.uint64] | None) -> NDArray[np.int32]:
        """Translate ``ids`` [n], rows of today's table, to rows [n]. For bins, ``ids`` are raw numbers; NaN: missing.

        ``unseen`` [n]: hashes of the ids without a row today, 0 for the others.
        """
        if self.table is None:
            return self.rows_of(as_bits(pl.Series(ids, nan_to_null=True)))
        rows = self.table[ids]
        if unseen is not None:
            at = np.flatnonzero(unseen)
            rows[at] = self.rows_of(pl.Series(unseen[at]))
        return rows

    def rows_of(self, hashes: pl.Series) -> NDArray[np.int32]:
        """Return the row of each of ``hashes``."""
        return self.mapping.rows(self.fitted, hashes)[0].to_numpy()


@dataclass(frozen=True)
class Translation:
    """How the rows of a dataset become those of another model.

    Attributes:
        dense: By column; None: nothing changes.
        sparse: By feature; None: nothing changes.
        longest: By feature, lookups of a row that the other model makes, where the dataset may have more.
    """

    dense: dict[str, DenseTranslation | None]
    sparse: dict[str, IdsTranslation | None]
    longest: dict[str, int] = field(default_factory=dict)

    @property
    def raw(self) -> list[str]:
        """Features for which ``values`` and ``rows`` need raw numbers in place of what the dataset's columns hold."""
        names = [name for name, each in self.dense.items() if each is not None and each.raw]
        # A feature without a table is binned: its rows are computed from the raw numbers.
        names += [name for name, each in self.sparse.items() if each is not None and each.table is None]
        return names

    @property
    def unseen(self) -> list[str]:
        """Features for which ``rows`` needs the hashes of ids that have no row today."""
        return [name for name, each in self.sparse.items() if each is not None and each.unseen]

    def values(self, feature: str, values: NDArray[np.floating]) -> NDArray[np.floating]:
        """Translate a dense feature to the other model's scale."""
        change = self.dense[feature]
        return values if change is None else change.apply(values)

    def rows(self, feature: str, ids: NDArray[Any], unseen: NDArray[np.uint64] | None = None) -> NDArray[Any]:
        """Return row numbers of the other model's table; ``unseen``: see ``IdsTranslation``."""
        change = self.sparse[feature]
        return ids if change is None else change.apply(ids, unseen)


def translation(store: Store, dataset: str, version: str, allow: Collection[str] = ()) -> Translation:
    """Return how rows of a dataset become those that a version would have got.

    Args:
        store: The store that holds both.
        dataset: Path of the dataset.
        version: Path of the version.
        allow: ``checkpoint.allow``: settings that differ because the log changed, not what is read from it.

    Raises:
        NotComparableError: A feature is missing, its ids cannot be translated, or the rows do not show what the version
            would see.
    """
    now, then = store.read_json(f"{dataset}/{TRANSFORMS}"), store.read_json(f"{version}/{TRANSFORMS}")
    raw, unseen = frozenset(now.get("raw", ())), frozenset(now.get("unseen", ()))
    for group in ("dense", "sparse"):
        for name in then[group]:
            if name not in now[group]:
                raise NotComparableError(f"it needs feature {name!r}, which the dataset does not have")
    problem = unreadable_sequence(now, then) or next(differences(store, dataset, version, now, then, allow), "")
    if problem:
        raise NotComparableError(problem)
    dense: dict[str, DenseTranslation | None] = {}
    for name, record in then["dense"].items():
        width = record.get("width", 1)
        columns = vector_columns(name, width) if width > 1 else [name]
        dense |= dict.fromkeys(columns, _translate_dense(name, now["dense"][name], record, raw))
    sparse: dict[str, IdsTranslation | None] = {}
    for name, record in then["sparse"].items():
        if ID_MAPPINGS.get(record["mapping"]).numbers:
            sparse[name] = _translate_bins(name, now["sparse"][name], record, raw)
        else:
            sparse[name] = _translate_ids(store, dataset, version, name, now["sparse"][name], record, name in unseen)
    longest = {}
    for name, record in then["sparse"].items():
        most, current = record.get("max_ids"), now["sparse"][name].get("max_ids")
        # Ids that ingestion cut off are lost. Where it kept more than the model takes, the first ones are used.
        if current is not None and (most is None or current < most):
            takes, setting = ("all of them", "null") if most is None else (most, most)
            raise NotComparableError(
                f"feature {name!r} has at most {current} ids per row in the dataset, where the model takes {takes}; "
                f"data.sparse.{name}.max_ids={setting} keeps them"
            )
        if most is not None and current != most:
            longest[name] = most * ID_MAPPINGS.get(record["mapping"]).rows_per_id
    return Translation(dense, sparse, longest)


def _translate_dense(
    name: str, now: dict[str, Any], then: dict[str, Any], raw_features: frozenset[str]
) -> DenseTranslation | None:
    # Translates all columns of a feature: one for a number, ``width`` for a vector.
    width = then.get("width", 1)
    if width != now.get("width", 1):
        today = now.get("width", 1)
        raise NotComparableError(f"feature {name!r} has width {today} in the dataset, {width} in the model")
    # The same fit gives the same values, so there is nothing to translate.
    if all(now.get(key) == then.get(key) for key in _FITTED):
        return None
    now_scale, then_scale = FeatureScale.of(name, now), FeatureScale.of(name, then)
    now_clip, then_clip = now["clip"], then["clip"]
    clipped = bool(now_clip) and (not then_clip or now_clip[0] > then_clip[0] or now_clip[1] < then_clip[1])
    merged = now_scale.feature.zero_is_missing and not then_scale.feature.zero_is_missing
    coarse = False
    if now_scale.feature.linear and then_scale.feature.linear:
        # float32 rounds a number by its distance from the mean. The error matters relative to the model's own
        # deviation.
        distance = abs(now_scale.fitted.mean - then_scale.fitted.mean)
        coarse = distance * float(np.finfo(np.float32).eps) > _MOST_ROUNDING * then_scale.fitted.std
    cut = f"is clipped to {now_clip}"
    if width > 1:
        for lost, reason in ((clipped, cut), (coarse, _COARSE), (merged, _MERGED)):
            if lost:
                raise NotComparableError(f"feature {name!r}, a vector, {reason} in the dataset")
    binned = now["transform"] in BINNINGS
    other_bounds = f"has other bounds of {now['transform']}"
    for lost, reason in ((binned, other_bounds), (clipped, cut), (merged, _MERGED), (coarse, _COARSE)):
        if lost:
            _require_raw(name, reason, raw_features)
    if "unit" in (now["transform"], then["transform"]):
        raise NotComparableError(
            f"feature {name!r} has transform {now['transform']} in the dataset, {then['transform']} in the model"
        )
    raw = binned or clipped or merged or (now_scale.feature.linear and name in raw_features)
    return DenseTranslation(now_scale, then_scale, raw)


def _require_raw(name: str, loss: str, raw_features: frozenset[str]) -> None:
    if name not in raw_features:
        raise NotComparableError(
            f"feature {name!r} {loss} in the dataset, which does not keep its raw numbers; "
            "stages=[ingest] force=true writes a dataset that does"
        )


def _translate_bins(
    name: str, now: dict[str, Any], then: dict[str, Any], raw_features: frozenset[str]
) -> IdsTranslation | None:
    if now["mapping"] != then["mapping"]:
        raise NotComparableError(_OTHER_MAPPING.format(name, now["mapping"], then["mapping"]))
    if now["bounds"] == then["bounds"]:
        return None
    _require_raw(name, f"has other bounds of {now['mapping']}", raw_features)
    mapping = ID_MAPPINGS.get(then["mapping"])
    return IdsTranslation(mapping, mapping.read(name, then, lambda file: None), None)


def _translate_ids(
    store: Store, dataset: str, version: str, name: str, now: dict[str, Any], then: dict[str, Any], unseen: bool
) -> IdsTranslation | None:
    for setting in sorted((now.keys() | (then.keys() & _QUIET)) - _FREE):
        if now.get(setting) != then.get(setting):
            raise NotComparableError(
                f"{setting} of feature {name!r} is {now.get(setting)!r} in the dataset, {then.get(setting)!r} in the "
                "model"
            )
    if now["vocab"] is None:
        if (now["mapping"], now["rows"]) != (then["mapping"], then["rows"]):
            raise NotComparableError(
                f"feature {name!r} is mapped by {now['mapping']} into {now['rows']} rows in the dataset, by "
                f"{then['mapping']} into {then['rows']} in the model"
            )
        return None
    _, today = _read_mapping(store, dataset, name, now)
    mapping, fitted = _read_mapping(store, version, name, then)
    if mapping.rows_per_id > 1:
        raise NotComparableError(_OTHER_MAPPING.format(name, now["mapping"], then["mapping"]))
    table = np.full(now["rows"], UNSEEN_ROW, np.int32)
    table[:RESERVED_ROWS] = np.arange(RESERVED_ROWS)
    # Rows that unknown ids hash into stay the same.
    if today.spread and today.spread == fitted.spread:
        table[today.spread[0] :][: today.spread[1]] = np.arange(today.spread[0], sum(today.spread))
    # If ids share a row, the most frequent one comes last, so that its row is the one that stays.
    known = today.known.sort("count", "hash")
    change = IdsTranslation(mapping, fitted, table, unseen)
    table[known["row"].to_numpy()] = change.rows_of(known["hash"])
    same = then["rows"] == now["rows"] and bool((table == np.arange(len(table))).all())
    if same:
        return None
    return change


def _read_mapping(store: Store, path: str, name: str, record: Mapping[str, Any]) -> tuple[IdMapping, FittedMapping]:
    # Returns the mapping of a feature and its fit in the dataset or version at ``path``, without candidates.
    def read_table(file: str) -> pl.DataFrame | None:
        if file != record["vocab"]:
            return None
        with store.open(f"{path}/{file}") as source:
            return pl.read_parquet(source.read())

    mapping = ID_MAPPINGS.get(record["mapping"])
    return mapping, mapping.read(name, record, read_table)
