"""Rows of one dataset as a model trained on another one reads them: other id mappings, other scales.

Today's rows hold row numbers of today's mapping. A model that was trained on another dataset has another mapping. Both
use the same 64-bit hash of an id, which leads from row to row. All ids without a row today share row 1, and the other
model may have rows for them: the dataset keeps their hashes for its held-out rows. A percentile or a bin does not
determine the number it came from: these are computed from the raw numbers, which the dataset also keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.records import MISSING_ROW, RESERVED_ROWS, UNSEEN_ROW
from pipeline.specs import ID_MAPPINGS
from pipeline.specs.id_mapping import FittedMapping, IdMapping
from pipeline.store import Store

TRANSFORMS = "transforms.json"
MAX_NORM = "max_norm"
FLOAT32_MAX = float(np.finfo(np.float32).max)
# What may differ between two mappings whose ids have the same hashes.
_FREE = {"column", "rows", "vocab", "mapping", "spread", "required", "max_ids"}


class NotComparableError(Exception):
    """The rows do not hold what the other model needs; the message says which feature, and why."""


@dataclass(frozen=True)
class DenseTranslation:
    """A dense feature's values from one fitted transform to another, both records of ``transforms.json``.

    ``raw``: the dataset keeps the feature's raw numbers, and they are taken in place of its values.
    """

    now: Mapping[str, Any]
    then: Mapping[str, Any]
    raw: bool = False

    def apply(self, values: NDArray[np.floating]) -> NDArray[np.float32]:
        """float32 [n] of ``values`` [n]: numbers where ``raw``, else values in the scale ``now``.

        In a standardised scale a 0 is a missing value (or the mean itself, which is as good) and stays one.
        """
        bounds = self.then.get("bounds")
        if self.raw:
            return _scaled(self.then, values, bounds)
        if bounds is not None:  # through the same roundings as the values, so that equal numbers stay equal
            bounds = _numbers(self.now, _scaled(self.now, np.asarray(bounds), None))
        return _scaled(self.then, _numbers(self.now, values), bounds)


@dataclass(frozen=True)
class BinsTranslation:
    """A sparse feature of bins: the raw numbers, which the dataset keeps, to rows of the bins between ``bounds``."""

    bounds: NDArray[np.float64]

    def apply(self, numbers: NDArray[np.float64]) -> NDArray[np.int32]:
        """Row numbers [n] of ``numbers`` [n]; NaN gets the row of missing values."""
        rows = np.searchsorted(self.bounds, numbers, side="right") + RESERVED_ROWS
        return np.where(np.isnan(numbers), MISSING_ROW, rows).astype(np.int32)


@dataclass(frozen=True)
class IdsTranslation:
    """A sparse feature's rows [rows of today's ``table``] in the other one; ``row_of`` finds those of hashes [n].

    ``unseen``: the dataset keeps the hashes of the ids that have no row today.
    """

    table: NDArray[np.int32]
    row_of: Callable[[NDArray[np.uint64]], NDArray[np.int32]]
    unseen: bool

    def apply(self, ids: NDArray[Any], unseen: NDArray[np.uint64] | None) -> NDArray[np.int32]:
        """Row numbers [n] of ``ids`` [n]; ``unseen`` [n]: hashes of those without a row today, 0 for the others."""
        rows: NDArray[np.int32] = self.table[ids]
        if unseen is not None:
            at = np.flatnonzero(unseen)
            rows[at] = self.row_of(unseen[at])
        return rows


def _numbers(record: Mapping[str, Any], values: NDArray[np.floating]) -> NDArray[np.float64]:
    """Raw numbers [n] of ``values`` [n] in the scale ``record``, which is none of bins; NaN: missing."""
    raw = values.astype(np.float64) * record["std"] + record["mean"]
    if record["transform"].startswith("log1p"):
        raw = np.sign(raw) * np.expm1(np.abs(raw))
    return raw if record["transform"] == MAX_NORM else np.where(values == 0, np.nan, raw)


def _scaled(record: Mapping[str, Any], numbers: NDArray[np.floating], bounds: Any) -> NDArray[np.float32]:
    """float32 [n]: raw ``numbers`` [n] (NaN: missing) in the scale ``record``, its bins between ``bounds``."""
    missing, scaled = np.isnan(numbers), numbers.astype(np.float64)
    if record.get("clip"):
        scaled = scaled.clip(*record["clip"])
    if record["transform"] == "percentile":
        shares = np.searchsorted(bounds, scaled, side="right") / max(len(bounds), 1) - 0.5 * (len(bounds) > 0)
        return np.where(missing, 0.0, shares).astype(np.float32)
    if record["transform"].startswith("log1p"):
        scaled = np.sign(scaled) * np.log1p(np.abs(scaled))
    scaled = ((scaled - record["mean"]) / record["std"]).clip(-FLOAT32_MAX, FLOAT32_MAX)
    return np.where(missing, np.nan if record["transform"] == MAX_NORM else 0.0, scaled).astype(np.float32)


@dataclass(frozen=True)
class Translation:
    """By feature, None: nothing changes."""

    dense: dict[str, DenseTranslation | None]
    sparse: dict[str, IdsTranslation | BinsTranslation | None]

    @property
    def raw(self) -> list[str]:
        """Features whose raw numbers ``values`` and ``rows`` want in place of what the dataset's columns hold."""
        dense = [name for name, each in self.dense.items() if each is not None and each.raw]
        return dense + [name for name, each in self.sparse.items() if isinstance(each, BinsTranslation)]

    @property
    def unseen(self) -> list[str]:
        """Features of whose ids without a row today ``rows`` wants the hashes."""
        return [name for name, each in self.sparse.items() if isinstance(each, IdsTranslation) and each.unseen]

    def values(self, feature: str, values: NDArray[np.floating]) -> NDArray[np.floating]:
        """A dense feature in the other model's scale."""
        change = self.dense[feature]
        return values if change is None else change.apply(values)

    def rows(self, feature: str, ids: NDArray[Any], unseen: NDArray[np.uint64] | None = None) -> NDArray[Any]:
        """Row numbers of the other model's table; ``unseen``: as of ``IdsTranslation``."""
        change = self.sparse[feature]
        if isinstance(change, BinsTranslation):
            return change.apply(ids)
        return ids if change is None else change.apply(ids, unseen)


def translation(store: Store, dataset: str, version: str) -> Translation:
    """From the dataset at path ``dataset`` to the features of the version at path ``version``.

    Raises NotComparableError where a feature is missing or its ids cannot be translated.
    """
    now, then = (store.read_json(f"{path}/{TRANSFORMS}") for path in (dataset, version))
    kept, hashed = frozenset(now.get("raw", ())), frozenset(now.get("unseen", ()))
    dense = {name: _dense(name, now["dense"], record, kept) for name, record in then["dense"].items()}
    sparse = {
        name: _binned(name, now["sparse"], record, kept)
        if ID_MAPPINGS.get(record["mapping"]).numbers
        else _sparse(store, dataset, version, name, now["sparse"], record, unseen=name in hashed)
        for name, record in then["sparse"].items()
    }
    return Translation(dense, sparse)


def _known(name: str, features: dict[str, dict[str, Any]]) -> dict[str, Any]:
    if name not in features:
        raise NotComparableError(f"it needs feature {name!r}, which the dataset does not have")
    return features[name]


def _dense(name: str, features: dict[str, Any], then: dict[str, Any], kept: frozenset[str]) -> DenseTranslation | None:
    now = _known(name, features)
    if _scale(now) == _scale(then):
        return None
    if now["transform"] == "percentile":
        _require_raw(name, now["transform"], kept)
    return DenseTranslation(now, then, raw=now["transform"] == "percentile")


def _require_raw(name: str, transform: str, kept: frozenset[str]) -> None:
    if name not in kept:
        raise NotComparableError(
            f"feature {name!r} has other bounds of {transform} in the dataset, which does not keep its raw numbers; "
            "stages=[ingest] force=true writes a dataset that does"
        )


def _scale(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "column"}


def _binned(name: str, features: dict[str, Any], then: dict[str, Any], kept: frozenset[str]) -> BinsTranslation | None:
    now = _known(name, features)
    if now["mapping"] != then["mapping"]:
        raise NotComparableError(_mapped_otherwise(name, now, then))
    if now["bounds"] == then["bounds"]:
        return None
    _require_raw(name, now["mapping"], kept)
    return BinsTranslation(np.asarray(then["bounds"], np.float64))


def _sparse(
    store: Store, dataset: str, version: str, name: str, features: dict[str, Any], then: dict[str, Any], *, unseen: bool
) -> IdsTranslation | None:
    now = _known(name, features)
    for setting in sorted(now.keys() - _FREE):
        if now[setting] != then.get(setting):
            raise NotComparableError(
                f"{setting} of feature {name!r} is {now[setting]!r} in the dataset, {then.get(setting)!r} in the model"
            )
    if now["vocab"] is None:
        if (now["mapping"], now["rows"]) != (then["mapping"], then["rows"]):
            raise NotComparableError(
                f"feature {name!r} is mapped by {now['mapping']} into {now['rows']} rows in the dataset, by "
                f"{then['mapping']} into {then['rows']} in the model"
            )
        return None
    hashes, rows = read_vocab(store, dataset, name)
    table = np.full(now["rows"], UNSEEN_ROW, np.int32)
    table[:RESERVED_ROWS] = np.arange(RESERVED_ROWS)
    if now.get("spread") and now["spread"] == then.get("spread"):  # rows that unknown ids hash into
        first, count = now["spread"]
        table[first : first + count] = np.arange(first, first + count)
    row_of = _finder(store, version, name, now, then)
    table[rows] = row_of(hashes)
    same = then["rows"] == now["rows"] and bool((table == np.arange(len(table))).all())
    return None if same else IdsTranslation(table, row_of, unseen)


def _finder(
    store: Store, version: str, name: str, now: dict[str, Any], then: dict[str, Any]
) -> Callable[[NDArray[np.uint64]], NDArray[np.int32]]:
    """What finds the rows of hashes in the version's table."""
    if then["vocab"] is not None:
        known, rows = read_vocab(store, version, name)
        order = np.argsort(known, kind="stable")
        known, rows = known[order], rows[order]
        spread = then.get("spread")
        return lambda hashes: _rows_of(hashes, known, rows, spread)
    mapping = ID_MAPPINGS.get(then["mapping"])
    if mapping.rows_per_id > 1 or not mapping.by_hash:
        raise NotComparableError(_mapped_otherwise(name, now, then))
    fitted = mapping.read(name, then, lambda file: None)
    return lambda hashes: _rows_by(mapping, fitted, hashes)


def _mapped_otherwise(name: str, now: Mapping[str, Any], then: Mapping[str, Any]) -> str:
    return f"feature {name!r} is mapped by {now['mapping']} in the dataset, by {then['mapping']} in the model"


def _rows_by(mapping: IdMapping, fitted: FittedMapping, hashes: NDArray[np.uint64]) -> NDArray[np.int32]:
    """The row of each of ``hashes``, where a mapping computes it."""
    import polars as pl

    return mapping.rows(fitted, pl.Series(hashes))[0].to_numpy()


def read_vocab(store: Store, path: str, feature: str) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Hash and row of every id that has a row in the dataset or version at ``path``, by rising count.

    Where ids share a row, the most frequent one comes last: written in this order it speaks for the row.
    """
    import pyarrow.parquet as pq

    with store.open(f"{path}/vocab/{feature}.parquet") as source:
        table = pq.read_table(source, columns=["hash", "row", "count"]).sort_by("count")
    return table["hash"].to_numpy().astype(np.uint64), table["row"].to_numpy().astype(np.int64)


def _rows_of(
    hashes: NDArray[np.uint64], known: NDArray[np.uint64], rows: NDArray[np.int64], spread: list[int] | None
) -> NDArray[np.int32]:
    """The row of each hash among ``known`` ones, which rise; others have that of unseen ids, or go to ``spread``."""
    first, count = spread or (UNSEEN_ROW, 1)
    others = (hashes % np.uint64(count)).astype(np.int32) + np.int32(first)
    if not len(known):
        return others
    places = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
    return np.where(known[places] == hashes, rows[places], others).astype(np.int32)
