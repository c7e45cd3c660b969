"""How long the rows of embedding tables are: histograms of their norms, from a sample of each table's rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.embeddings.row_access import RowAccess
from pipeline.embeddings.tables import TableSpec

MOST_ROWS = 2048  # of a table; they are evenly spaced, the same ones each time
# Bins are half octaves: bin i holds norms from 2^(i / 2) up to 2^((i + 1) / 2). Shorter rows are in the first one.
LOWEST, HIGHEST = -48, 47


def sampled(table: TableSpec) -> Tensor:
    """Global row numbers (int64) of the sample of ``table``; all of them where they are few."""
    if table.rows <= MOST_ROWS:
        return torch.arange(table.rows)
    return torch.linspace(0, table.rows - 1, MOST_ROWS, dtype=torch.float64).long()


@torch.no_grad()
def squared_norms(access: RowAccess) -> Tensor:
    """float64, on the CPU: of the sample of each table one after another, what this rank's columns add to them.

    The sum over all ranks is the squared norms, however the tables are sharded.
    """
    rows = {name: sampled(table) for name, table in access.tables.items()}
    squares = {name: torch.zeros(len(places), dtype=torch.float64) for name, places in rows.items()}
    for shard in access.local_shards():
        places = rows[shard.table] - shard.row
        here = torch.nonzero((places >= 0) & (places < shard.rows)).flatten()
        if not shard.owner or not len(here):
            continue
        values = torch.empty(len(here), shard.columns, device=shard.device)
        shard.copy(places[here].to(shard.device), values, {})
        squares[shard.table][here] += values.double().square().sum(1).cpu()
    return torch.cat(list(squares.values()))


def histograms(tables: Mapping[str, TableSpec], squares: Tensor) -> dict[str, dict[str, Any]]:
    """By table: the sample's ``rows``, smallest, mean and largest norm, the mean of squares, and ``counts`` by bin.

    ``squares``: the sum of ``squared_norms`` over all ranks. ``low``: the bin of the first count. Rows that are not
    finite are left out, and tables without others: they are the guards' to tell, and no numbers for a record.
    """
    parts = squares.cpu().split([len(sampled(table)) for table in tables.values()])
    finite = {name: part[part.isfinite()].numpy() for name, part in zip(tables, parts, strict=True)}
    return {name: _histogram(own) for name, own in finite.items() if len(own)}


def _histogram(squares: np.ndarray) -> dict[str, Any]:
    octaves = np.full(len(squares), float(LOWEST))
    np.log2(squares, where=squares > 0, out=octaves)  # the logarithm of a norm is half of it
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
