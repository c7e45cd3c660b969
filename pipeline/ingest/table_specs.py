"""``data.format=tables``: a dataset for planning alone, made from the tables' figures in the configuration.

It holds what the planner reads, ``schema.json`` and ``profile.json``, and no rows.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from pipeline.config import DataConfig, DeclaredTable
from pipeline.errors import ConfigError
from pipeline.ingest.profiling import curve_points
from pipeline.records import DatasetSchema, FeatureProfile, Profile, SparseColumn
from pipeline.store import Draft

VERSION = "tables-1"  # part of the dataset's key: raise it where the same configuration gives another profile
EXACT = 4096
MOST_ROWS = 2**31 - 1  # row numbers are int32
MOST_IDS = 1e6
MOST_SKEWED = 10.0


def write(data: DataConfig, draft: Draft) -> dict[str, Any]:
    """Write schema and profile of the configured tables; returns the artifact's summary (tables, rows of all tables).

    Raises ConfigError for figures that cannot be.
    """
    schema, profile = dataset(data)
    draft.write_json("schema.json", schema.to_json())
    draft.write_json("profile.json", profile.to_json())
    return {"tables": len(schema.sparse), "table_rows": sum(column.rows for column in schema.sparse)}


def dataset(data: DataConfig) -> tuple[DatasetSchema, Profile]:
    """Schema and profile of the configured tables; ConfigError for figures that cannot be."""
    check(data)
    none: dict[str, list[Any]] = {"train": [], "test": []}
    columns, sparse = [], {}
    for name, table in data.tables.items():
        pooling = data.table_defaults.pooling if table.pooling is None else table.pooling
        hot_rows, hot_share = hit_curve(table, data.table_defaults.zipf)
        columns.append(SparseColumn(name=name, rows=table.rows, multi=pooling != 1.0, weighted=table.weighted))
        sparse[name] = FeatureProfile(
            rows=table.rows, distinct=table.rows, missing_share=0.0, pooling=pooling, hot_rows=hot_rows,
            hot_share=hot_share,
        )  # fmt: skip
    schema = DatasetSchema(
        dense=tuple(f"I{number + 1}" for number in range(data.dense_features)), sparse=tuple(columns),
        rows={"train": 0, "test": 0}, files=none, groups=none,
    )  # fmt: skip
    return schema, Profile(rows=schema.rows, label_rate={}, dense={}, sparse=sparse)


def check(data: DataConfig) -> None:
    """Raise ConfigError for the first table whose name or figures cannot be."""
    if not data.tables:
        raise ConfigError(
            "data.format is tables, but data.tables is empty: there is nothing to plan",
            hint="'+data.tables.user={rows: 1000000, pooling: 2}'",
        )
    for name, table in data.tables.items():
        if set(name) & set("/."):
            hint = f"data.tables.{re.sub('[/.]', '_', name)} in its place"
            raise ConfigError(f"data.tables has a table called {name!r}, expected no '/' and no '.' in it", hint=hint)
        path = f"data.tables.{name}"
        _check_figure(f"{path}.rows", table.rows, 1, MOST_ROWS)
        _check_figure(f"{path}.pooling", table.pooling, 0.0, MOST_IDS)
        _check_figure(f"{path}.zipf", table.zipf, 0.0, MOST_SKEWED)
        _check_curve(path, table)


def _check_figure(path: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:  # not a number compares as neither
        mend = max(low, min(value, high)) if math.isfinite(value) else low
        raise ConfigError(f"{path} is {value:,.10g}, expected {low:g} to {high:,.10g}", hint=f"{path}={mend:.10g}")


def _check_curve(path: str, table: DeclaredTable) -> None:
    rows, shares = table.hot_rows, table.hot_share
    rising = all(a < b for a, b in zip(rows, rows[1:], strict=False)) and shares == sorted(shares)
    inside = all(1 <= k <= table.rows for k in rows) and all(0.0 < share <= 1.0 for share in shares)
    ended = not rows or rows[-1] < table.rows or shares[-1:] == [1.0]
    if len(rows) != len(shares) or not rising or not inside or not ended:
        raise ConfigError(
            f"{path} has hot_rows {rows} and hot_share {shares}, expected two lists of one length, rows rising from 1 "
            f"to at most {table.rows}, shares rising to 1, which all {table.rows} rows have",
            hint=f"{path}.hot_rows=[{max(table.rows // 10, 1)},{table.rows}] {path}.hot_share=[0.8,1.0]",
        )
    if rows and table.zipf is not None:
        raise ConfigError(f"{path} has both zipf and a hit curve, expected one of them", hint=f"{path}.zipf=null")


def hit_curve(table: DeclaredTable, default_zipf: float) -> tuple[list[int], list[float]]:
    """Rows k, and the share of lookups that the k hottest rows serve: as given, else Zipf's; the last share is 1."""
    if table.hot_rows:
        end = [table.rows] if table.hot_rows[-1] < table.rows else []
        return [*table.hot_rows, *end], [*table.hot_share, *(1.0 for _ in end)]
    ks = curve_points(table.rows)
    exponent = default_zipf if table.zipf is None else table.zipf
    weights = harmonic(ks, exponent)
    return ks.tolist(), (weights / weights[-1]).tolist()


def harmonic(ks: np.ndarray, exponent: float) -> np.ndarray:
    """Sum over i = 1..k of i^-exponent for every k of ``ks``, to a relative error below 1e-7.

    The first 4,096 terms one by one, the rest by the Euler-Maclaurin formula without its derivatives.
    """
    first = np.arange(1, min(int(ks[-1]), EXACT) + 1, dtype=np.float64) ** -exponent
    head = np.concatenate([[0.0], np.cumsum(first)])
    far = np.maximum(ks, EXACT).astype(np.float64)
    if abs(exponent - 1.0) < 1e-12:
        integral = np.log(far / EXACT)
    else:
        integral = (far ** (1 - exponent) - float(EXACT) ** (1 - exponent)) / (1 - exponent)
    ends = (far**-exponent - float(EXACT) ** -exponent) / 2
    return head[np.minimum(ks, EXACT)] + np.where(ks > EXACT, integral + ends, 0.0)
