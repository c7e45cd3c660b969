"""Rows of one dataset as a model of another one would have got them: other id mappings, other scales.

Today's rows hold row numbers of today's mapping. A model that was trained on another dataset has another mapping; both
rest on the same 64-bit hash of an id, so the way from row to row goes by it. An id that today's mapping does not hold
is unseen for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.artifacts import Store
from pipeline.contracts import RESERVED_ROWS, UNSEEN_ROW

TRANSFORMS = "transforms.json"
# Scales that there is a way back from.
AFFINE = ("log1p", "standardise", "log1p_standardise", "none")
# What may differ between two mappings whose ids have the same hashes.
_FREE = {"column", "rows", "vocab", "mapping", "spread", "required", "max_ids"}


class NotComparableError(Exception):
    """The rows do not hold what the other model needs; the message says which feature, and why."""


@dataclass(frozen=True)
class DenseTranslation:
    """z -> z * ``scale`` + ``offset`` in units of the signed logarithm or not (``before``, ``after``); 0 stays 0."""

    mean: float
    std: float
    logarithmic: bool
    to_mean: float
    to_std: float
    to_logarithmic: bool

    def apply(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """float32 [n]; a 0 is a missing value (or the mean itself, which is as good) and stays one."""
        raw = values.astype(np.float64) * self.std + self.mean
        if self.logarithmic != self.to_logarithmic:
            size = np.log1p(np.abs(raw)) if self.to_logarithmic else np.expm1(np.abs(raw))
            raw = np.sign(raw) * size
        return np.where(values == 0, np.float32(0), ((raw - self.to_mean) / self.to_std).astype(np.float32))


@dataclass(frozen=True)
class Translation:
    """By feature, None: nothing changes. A sparse feature's map [rows of today's table] gives the other table's row."""

    dense: dict[str, DenseTranslation | None]
    sparse: dict[str, NDArray[np.int32] | None]

    def values(self, feature: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """A dense feature in the other model's scale."""
        found = self.dense[feature]
        return values if found is None else found.apply(values)

    def rows(self, feature: str, ids: NDArray[np.integer]) -> NDArray[np.integer]:
        """Row numbers of the other model's table."""
        found = self.sparse[feature]
        return ids if found is None else found[ids]


def translation(store: Store, dataset: str, version: str) -> Translation:
    """From the dataset at path ``dataset`` to the features of the version at path ``version``.

    Raises NotComparableError where a feature is missing or its ids cannot be told any more.
    """
    now, then = (store.read_json(f"{path}/{TRANSFORMS}") for path in (dataset, version))
    dense = {name: _dense(name, now["dense"], record) for name, record in then["dense"].items()}
    sparse = {
        name: _sparse(store, dataset, version, name, now["sparse"], record) for name, record in then["sparse"].items()
    }
    return Translation(dense, sparse)


def _known(name: str, features: dict[str, Any]) -> dict[str, Any]:
    if name not in features:
        raise NotComparableError(f"it needs feature {name!r}, which the dataset does not have")
    found: dict[str, Any] = features[name]
    return found


def _dense(name: str, features: dict[str, Any], then: dict[str, Any]) -> DenseTranslation | None:
    now = _known(name, features)
    if _scale(now) == _scale(then):
        return None
    for transform in (now["transform"], then["transform"]):
        if transform not in AFFINE:
            raise NotComparableError(f"feature {name!r} cannot be brought from scale {transform!r} to another one")
    log_now, log_then = (each["transform"].startswith("log1p") for each in (now, then))
    return DenseTranslation(now["mean"], now["std"], log_now, then["mean"], then["std"], log_then)


def _scale(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "column"}


def _sparse(
    store: Store, dataset: str, version: str, name: str, features: dict[str, Any], then: dict[str, Any]
) -> NDArray[np.int32] | None:
    now = _known(name, features)
    for setting in sorted(now.keys() - _FREE):
        if now[setting] != then.get(setting):
            raise NotComparableError(
                f"{setting} of feature {name!r} is {now[setting]!r} in the dataset, {then.get(setting)!r} for it"
            )
    if now["vocab"] is None:
        if (now["mapping"], now["rows"]) != (then["mapping"], then["rows"]):
            raise NotComparableError(
                f"feature {name!r} is mapped by {now['mapping']} into {now['rows']} rows in the dataset, for it by "
                f"{then['mapping']} into {then['rows']}"
            )
        return None
    hashes, rows = read_vocab(store, dataset, name)
    table = np.full(now["rows"], UNSEEN_ROW, np.int32)
    table[:RESERVED_ROWS] = np.arange(RESERVED_ROWS)
    if now.get("spread") and now["spread"] == then.get("spread"):  # rows that unknown ids hash into
        first, count = now["spread"]
        table[first : first + count] = np.arange(first, first + count)
    if then["vocab"] is not None:
        table[rows] = _rows_of(hashes, *read_vocab(store, version, name))
    elif then["mapping"] == "hash":
        table[rows] = (hashes % np.uint64(then["rows"] - RESERVED_ROWS)).astype(np.int32) + RESERVED_ROWS
    else:
        raise NotComparableError(f"feature {name!r} is mapped by vocab in the dataset, for it by {then['mapping']}")
    same = then["rows"] == now["rows"] and bool((table == np.arange(len(table))).all())
    return None if same else table


def read_vocab(store: Store, path: str, feature: str) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Hash and row of every id that has a row in the dataset or version at ``path``, by rising count.

    Where ids share a row, the most frequent one comes last: written in this order it speaks for the row.
    """
    import pyarrow.parquet as pq

    with store.open(f"{path}/vocab/{feature}.parquet") as source:
        table = pq.read_table(source, columns=["hash", "row", "count"]).sort_by("count")
    return table["hash"].to_numpy().astype(np.uint64), table["row"].to_numpy().astype(np.int64)


def _rows_of(hashes: NDArray[np.uint64], known: NDArray[np.uint64], rows: NDArray[np.int64]) -> NDArray[np.int32]:
    """The row of each hash among ``known`` ones; that of unseen ids for others."""
    if not len(known):
        return np.full(len(hashes), UNSEEN_ROW, np.int32)
    order = np.argsort(known)
    places = np.minimum(np.searchsorted(known, hashes, sorter=order), len(known) - 1)
    found = order[places]
    return np.where(known[found] == hashes, rows[found], UNSEEN_ROW).astype(np.int32)
