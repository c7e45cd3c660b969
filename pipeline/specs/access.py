"""How unevenly the rows of a table are looked up."""

from __future__ import annotations

import numpy as np

from pipeline.records import RESERVED_ROWS

POINTS_PER_DECADE = 4


def access_histogram(counts: np.ndarray) -> tuple[list[int], list[float]]:
    """Log-spaced k up to the table's rows, and the share of lookups that its k hottest rows serve."""
    ks = curve_points(max(len(counts), RESERVED_ROWS))
    served = np.cumsum(np.sort(counts)[::-1])
    total = max(int(served[-1]), 1)
    return ks.tolist(), (served[ks - 1] / total).tolist()


def curve_points(rows: int) -> np.ndarray:
    """Log-spaced k from 1 to ``rows``, int64."""
    points = int(np.ceil(np.log10(rows) * POINTS_PER_DECADE)) + 1
    return np.unique(np.geomspace(1, rows, points).round().astype(np.int64))
