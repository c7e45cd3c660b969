"""Rows of a checkpoint whose ids changed: compares the vocabularies of the checkpoint's dataset and of this one.

A mapping that continues another one (``data.mapping_from``) keeps the row of every id, but gives the rows of evicted
ids to new ids. Two mappings that start from nothing have nothing in common. Either way a row starts anew unless its id
is the same.
"""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq

from pipeline.config.checkpoint import CheckpointConfig
from pipeline.config.data import DataConfig
from pipeline.errors import ArtifactError
from pipeline.records.dataset import DatasetSchema, dataset_path
from pipeline.records.record import read
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact


def remapped_rows(
    store: Store, init: Artifact, dataset: Artifact, data: DataConfig, checkpoint: CheckpointConfig
) -> dict[str, np.ndarray]:
    """{table: global rows, int64 [n]} of checkpoint ``init`` that belong to another id, or to none, in ``dataset``.

    Only tables with a vocabulary: the others keep their rows by the hash. {} where both have the same dataset, and
    where the checkpoint's dataset is gone and ``data.mapping_from`` is null. ArtifactError where it is gone and
    ``data.mapping_from`` names another dataset.
    """
    key = init.inputs.get("dataset", "")
    recorded = init.config.get("data", {})
    before = dataset_path(str(recorded.get("name")), key, recorded.get("day"))
    if not key or key == dataset.key:
        return {}
    then = store.find(before)
    if then is None and data.mapping_from is None:
        return {}
    former = {now: old for old, now in checkpoint.rename.items()}
    changed = {}
    sizes = {} if then is None else _table_rows(store, then)
    for name in (column for column in (*data.sparse, *data.event_tables) if _vocab(column) in dataset.files):
        old = former.get(name, name)
        if then is not None and _vocab(old) in then.files:
            # The hash's seed is the feature's name.
            column = "hash" if old == name else "id"
            ids = _by_row(store, then, old, column, sizes[old])
            changed[name] = _differing(ids, _by_row(store, dataset, name, column))
        elif then is None:
            if data.mapping_from != before:
                raise ArtifactError(
                    f"checkpoint.init_from={checkpoint.init_from} was trained on dataset {before}, which no "
                    f"longer exists: the rows of table {name!r} whose ids changed are unknown",
                    hint="checkpoint.init_from=null, or a checkpoint of the day before",
                )
            changed[name] = _freed(store, dataset, name)
    return {name: rows for name, rows in changed.items() if len(rows)}


def _vocab(feature: str) -> str:
    return f"vocab/{feature}.parquet"


def _table_rows(store: Store, dataset: Artifact) -> dict[str, int]:
    """Rows of every table of ``dataset``."""
    schema = read(DatasetSchema, store, f"{dataset.path}/schema.json")
    return {column.name: column.rows for column in schema.id_columns}


def _by_row(store: Store, dataset: Artifact, feature: str, column: str, size: int = 0) -> np.ndarray:
    """Hash (uint64) or id (object) of each row of ``feature``'s table, ``size`` or more; 0 or None without an id."""
    with store.open(f"{dataset.path}/{_vocab(feature)}") as source:
        table = pq.read_table(source, columns=["row", column])
    rows, values = table["row"].to_numpy(), table[column].to_numpy()
    size = max(size, int(rows.max(initial=-1)) + 1)
    by_row = np.zeros(size, np.uint64) if column == "hash" else np.full(size, None, object)
    by_row[rows] = values
    return by_row


def _differing(then: np.ndarray, now: np.ndarray) -> np.ndarray:
    """Rows of ``then`` with another value, or none, in ``now``; rows beyond the end of ``then`` were never trained."""
    size = min(len(then), len(now))
    gone = np.arange(size, len(then))
    return np.concatenate([np.flatnonzero(then[:size] != now[:size]), gone]).astype(np.int64)


def _freed(store: Store, dataset: Artifact, feature: str) -> np.ndarray:
    """The rows of ``feature`` that ``dataset`` lists as freed when it continued the mapping of the one before."""
    with store.open(f"{dataset.path}/freed/{feature}.parquet") as source:
        return np.unique(pq.read_table(source, columns=["row"])["row"].to_numpy()).astype(np.int64)
