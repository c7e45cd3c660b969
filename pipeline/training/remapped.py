"""Rows of a checkpoint that belong to other ids by now: the vocabularies of its data set and of this one, compared.

A carried mapping (``data.mapping_from``) keeps the row of every id, but gives the rows of evicted ids to new ones; two
mappings of their own have nothing in common. Either way a row starts anew unless its id is the same.
"""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq

from pipeline.config import Config
from pipeline.errors import ArtifactError
from pipeline.records import DatasetSchema, dataset_path, read
from pipeline.store import Artifact, Store


def remapped_rows(store: Store, init: Artifact, dataset: Artifact, config: Config) -> dict[str, np.ndarray]:
    """{table: global rows, int64 [n]} of checkpoint ``init`` whose id is another in ``dataset``, or none.

    Of tables with a vocabulary; others keep their rows by the hash. Nothing where both are of the same data set, or
    where the checkpoint's is gone and nothing was carried. ArtifactError where it is gone and something was.
    """
    key = init.inputs.get("dataset", "")
    data = init.config.get("data", {})
    before = dataset_path(str(data.get("name")), key, data.get("day"))
    if not key or key == dataset.key:
        return {}
    then = store.find(before)
    if then is None and config.data.mapping_from is None:
        return {}
    former = {now: old for old, now in config.checkpoint.rename.items()}
    changed = {}
    sizes = {} if then is None else table_rows(store, then)
    for name in (column for column in config.data.sparse if _vocab(column) in dataset.files):
        old = former.get(name, name)
        if then is not None and _vocab(old) in then.files:
            column = "hash" if old == name else "id"  # the hash's seed is the feature's name
            ids = _by_row(store, then, old, column, sizes[old])
            changed[name] = _differing(ids, _by_row(store, dataset, name, column))
        elif then is None:
            changed[name] = _listed(store, dataset, name, before, config)
    return {name: rows for name, rows in changed.items() if len(rows)}


def _vocab(feature: str) -> str:
    return f"vocab/{feature}.parquet"


def table_rows(store: Store, dataset: Artifact) -> dict[str, int]:
    """Rows of every table of ``dataset``."""
    schema = read(DatasetSchema, store, f"{dataset.path}/schema.json")
    return {column.name: column.rows for column in schema.sparse}


def _by_row(store: Store, dataset: Artifact, feature: str, column: str, size: int = 0) -> np.ndarray:
    """Hash (uint64) or id (object) of every row of ``feature``'s table, at least ``size``; 0 or None: there is none."""
    with store.open(f"{dataset.path}/{_vocab(feature)}") as source:
        table = pq.read_table(source, columns=["row", column])
    rows, values = table["row"].to_numpy(), table[column].to_numpy()
    size = max(size, int(rows.max(initial=-1)) + 1)
    found = np.zeros(size, np.uint64) if column == "hash" else np.full(size, None, object)
    found[rows] = values
    return found


def _differing(then: np.ndarray, now: np.ndarray) -> np.ndarray:
    """Rows of ``then`` that hold another value, or none, in ``now``; rows behind its end were never trained."""
    size = min(len(then), len(now))
    gone = np.arange(size, len(then))
    return np.concatenate([np.flatnonzero(then[:size] != now[:size]), gone]).astype(np.int64)


def _listed(store: Store, dataset: Artifact, feature: str, before: str, config: Config) -> np.ndarray:
    """The rows that ``dataset`` says it freed, which is all there is to know where it was carried from ``before``."""
    if config.data.mapping_from != before:
        raise ArtifactError(
            f"the data set {before}, on which checkpoint.init_from={config.checkpoint.init_from} was trained, is gone: "
            f"nothing tells which rows of table {feature!r} belong to other ids by now",
            hint="checkpoint.init_from=null, or a checkpoint of the day before",
        )
    with store.open(f"{dataset.path}/freed/{feature}.parquet") as source:
        return np.unique(pq.read_table(source, columns=["row"])["row"].to_numpy()).astype(np.int64)
