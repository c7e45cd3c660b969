"""Measures the lengths of embedding rows: histograms of their norms, from a sample of each table's rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.embeddings.row_access import RowAccess
from pipeline.embeddings.tables import TableSpec

# The most rows that are sampled from a table; they are evenly spaced, and the same ones each time.
MOST_ROWS = 2048
# Bins are half octaves: bin i holds norms from 2^(i / 2) up to 2^((i + 1) / 2). Shorter rows are in the first one.
LOWEST, HIGHEST = -48, 47


def sampled(table: TableSpec) -> Tensor:
    """Return the global row numbers (int64) of the sample of ``table``; all of them if they are few."""
    if table.rows <= MOST_ROWS:
        return torch.arange(table.rows)
    return torch.linspace(0, table.rows - 1, MOST_ROWS, dtype=torch.float64).long()


@torch.no_grad()
def squared_norms(access: RowAccess) -> Tensor:
    """Return what this rank's columns add to the squared norms of the sampled rows, one table after another.

    The sum over all ranks is the squared norms, however the tables are sharded. The result is float64, on the CPU.
    """
    rows, squares = {}, {}
    for name, table in access.tables.items():
        rows[name] = sampled(table)
        squares[name] = torch.zeros(len(rows[name]), dtype=torch.float64)
    for shard in access.local_shards():
        places = rows[shard.table] - shard.row
        local = torch.nonzero((places >= 0) & (places < shard.rows)).flatten()
        if not shard.owner or not len(local):
            continue
        values = torch.empty(len(local), shard.columns, device=shard.device)
        shard.copy(places[local].to(shard.device), values, {})
        squares[shard.table][local] += values.double().square().sum(1).cpu()
    return torch.cat(list(squares.values()))


def histograms(tables: Mapping[str, TableSpec], squares: Tensor) -> dict[str, dict[str, Any]]:
    """Return the histogram of the norms of each table's sampled rows, by table.

    Args:
        squares: The sum of ``squared_norms`` over all ranks.

    Returns:
        For each table, the sample's ``rows``, ``smallest``, ``mean`` and ``largest`` norm, the ``mean_square``, and
        ``counts`` by bin, the first of which is bin ``low``.
    """
    by_table = {}
    parts = squares.cpu().split([len(sampled(table)) for table in tables.values()])
    for name, part in zip(tables, parts, strict=True):
        # Guards report rows that are not finite; a JSON record has no numbers for them.
        finite = part[part.isfinite()].numpy()
        if len(finite):
            by_table[name] = _histogram(finite)
    return by_table


def _histogram(squares: np.ndarray) -> dict[str, Any]:
    octaves = np.full(len(squares), float(LOWEST))
    # The logarithm of a norm is half of that of its square, and a bin is half an octave.
    np.log2(squares, where=squares > 0, out=octaves)
    bins = np.clip(np.floor(octaves), LOWEST, HIGHEST).astype(int)
    low = int(bins.min())
    norms = np.sqrt(squares)
    return {
        "rows": len(norms),
        "smallest": float(norms.min()),
        "mean": float(norms.mean()),
        "largest": float(norms.max()),
        "mean_square": float(squares.mean()),
        "low": low,
        "counts": np.bincount(bins - low).tolist(),
    }
