"""``data.format=tables``: a dataset for planning alone, made from the figures of tables in the configuration.

It holds what the planner reads, ``schema.json`` and ``profile.json``, and no rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.config.data import DataConfig
from pipeline.config.features import TableFigures
from pipeline.config.fields import check_values
from pipeline.core.errors import ConfigError
from pipeline.records.dataset import DatasetSchema, FeatureProfile, Profile, SparseColumn, TaskColumn
from pipeline.specs.id_mapping import curve_points
from pipeline.store.artifacts import Draft

# Part of the dataset's key. Raise it when the same configuration gives another profile.
VERSION = "tables-1"
EXACT = 4096


def write(data: DataConfig, draft: Draft) -> dict[str, Any]:
    """Write schema and profile of the configured tables; returns the artifact's summary (tables, rows of all tables).

    Raises ConfigError for impossible figures.
    """
    schema, profile = dataset(data)
    draft.write_json("schema.json", schema.to_json())
    draft.write_json("profile.json", profile.to_json())
    return {"tables": len(schema.sparse), "table_rows": sum(column.rows for column in schema.sparse)}


def dataset(data: DataConfig) -> tuple[DatasetSchema, Profile]:
    """Return schema and profile of the configured tables; ConfigError for impossible figures."""
    if not data.tables:
        raise ConfigError(
            "data.format is tables, but data.tables is empty: there is nothing to plan",
            hint="'+data.tables.user={rows: 1000000, pooling: 2}'",
        )
    check_values(data, "data")
    # There are no rows, so there are no files.
    none: dict[str, list[Any]] = {"train": [], "test": []}
    columns, sparse = [], {}
    for name, table in data.tables.items():
        pooling = data.table_defaults.pooling if table.pooling is None else table.pooling
        hot_rows, hot_share = hit_curve(table, data.table_defaults.zipf)
        columns.append(SparseColumn(name=name, rows=table.rows, multi=pooling != 1.0, weighted=table.weighted))
        sparse[name] = FeatureProfile(
            rows=table.rows,
            distinct=table.rows,
            missing_share=0.0,
            pooling=pooling,
            hot_rows=hot_rows,
            hot_share=hot_share,
        )
    tasks = [TaskColumn(name=name, kind=task.kind, given=task.given) for name, task in data.tasks.items()]
    schema = DatasetSchema(
        dense=tuple(f"I{number + 1}" for number in range(data.dense_features)),
        sparse=tuple(columns),
        rows={"train": 0, "test": 0},
        files=none,
        groups=none,
        tasks=tuple(tasks),
    )
    return schema, Profile(rows=schema.rows, label_rate={}, dense={}, sparse=sparse)


def hit_curve(table: TableFigures, default_zipf: float) -> tuple[list[int], list[float]]:
    """Return rows k, and the share of lookups that the k hottest rows serve: as given, else Zipf's; the last is 1."""
    if table.hot_rows:
        rows, shares = list(table.hot_rows), list(table.hot_share)
        if rows[-1] < table.rows:
            rows.append(table.rows)
            shares.append(1.0)
        return rows, shares
    ks = curve_points(table.rows)
    exponent = default_zipf if table.zipf is None else table.zipf
    weights = harmonic(ks, exponent)
    return ks.tolist(), (weights / weights[-1]).tolist()


def harmonic(ks: np.ndarray, exponent: float) -> np.ndarray:
    """Return the sum over i = 1..k of i^-exponent for every k of ``ks``, to a relative error below 1e-7.

    Adds the first 4,096 terms one by one, and the rest by the Euler-Maclaurin formula without its derivatives.
    """
    # A table may have billions of rows, too many for an array.
    first = np.arange(1, min(int(ks[-1]), EXACT) + 1, dtype=np.float64) ** -exponent
    head = np.concatenate([[0.0], np.cumsum(first)])
    far = np.maximum(ks, EXACT).astype(np.float64)
    if abs(exponent - 1.0) < 1e-12:
        integral = np.log(far / EXACT)
    else:
        integral = (far ** (1 - exponent) - float(EXACT) ** (1 - exponent)) / (1 - exponent)
    ends = (far**-exponent - float(EXACT) ** -exponent) / 2
    return head[np.minimum(ks, EXACT)] + np.where(ks > EXACT, integral + ends, 0.0)
