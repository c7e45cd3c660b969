"""What a memory limit leaves for hot rows in ``benchmarks.ssd``: figures of this machine and this model alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.planning.candidates import BATCHES_MOVING, NUMBER_BYTES, ROW_BYTES

STATE_BYTES = 4  # a row
AHEAD = 4  # batches read ahead, as ``train.prefetch_batches``


@dataclass(frozen=True)
class Tables:
    """``count`` equal tables of ``rows`` rows of ``dim`` values; ``batch`` ids of each are looked up in a step."""

    count: int
    rows: int
    dim: int
    batch: int

    @property
    def row_bytes(self) -> int:
        """A row and its optimizer state."""
        return 4 * self.dim + STATE_BYTES


def cold_rows(tables: Tables, exponent: float, kept: int) -> float:
    """Distinct rows beyond the first ``kept`` that a batch is expected to look up in one table, of Zipf ids."""
    weights = np.arange(1, tables.rows + 1, dtype=np.float64) ** -exponent
    chance = weights[kept:] / weights.sum()
    return float(-np.expm1(tables.batch * np.log1p(-chance)).sum())


def cache_rows(tables: Tables, limit: int, process: int, exponent: float, share: float) -> int:
    """Rows of a table for ``share`` of what ``limit`` bytes leave beside the process, places and rows on their way."""
    free = limit - process - ROW_BYTES * tables.rows * tables.count
    kept = 0
    for _ in range(8):  # more rows kept, fewer on their way
        moving = (AHEAD + BATCHES_MOVING) * cold_rows(tables, exponent, kept) * (4 * tables.dim + 4 + NUMBER_BYTES)
        kept = min(tables.rows, int(share * max(0.0, free / tables.count - moving) / tables.row_bytes))
    return kept
