"""How often the rows of a hashed feature and the values of a binned one were looked up; counts merge in any order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from pipeline.ingest.hashing import estimated_distinct
from pipeline.ingest.sketch import Sketch
from pipeline.records.dataset import MISSING_ROW
from pipeline.specs.id_mapping import BINS, FittedMapping, HeldCounts, IdCounts

# Distinct ids of a hashed feature are exact up to here, then estimated.
SKETCH = 4096


class HashedCounts(IdCounts):
    """Lookups per table row of one hash-mapped feature, and a sketch of its distinct ids.

    ``ways``: functions of hashes and ``rows`` to row numbers, those that a lookup sums. Additions are kept by id until
    the counts are asked for: many small counts merge into one array of ``rows``.
    """

    def __init__(self, rows: int, mapping: str, ways: Sequence[Callable[[pl.Series, int], pl.Series]]) -> None:
        self.rows = rows
        self.mapping = mapping
        self.ways = ways
        self.smallest = np.zeros(0, np.uint64)
        self._all: np.ndarray | None = None
        self._pieces: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, hashes: np.ndarray, ids: pl.Series, counts: np.ndarray) -> None:
        """Count lookups of distinct ``hashes``."""
        for rows_of in self.ways:
            self._pieces.append((rows_of(pl.Series(hashes), self.rows).to_numpy(), counts))
        self._keep(hashes)

    def merge(self, other: HashedCounts) -> None:
        """Take in what ``other`` counted."""
        self._pieces += other._pieces
        if other._all is not None:
            self._pieces.append((np.arange(self.rows), other._all))
        self._keep(other.smallest)
        _ = self.counts

    @property
    def counts(self) -> np.ndarray:
        """Lookups of every row, int64 [rows]."""
        if self._all is None:
            self._all = np.zeros(self.rows, np.int64)
        for rows, counts in self._pieces:
            np.add.at(self._all, rows, counts)
        self._pieces = []
        return self._all

    def _keep(self, hashes: np.ndarray) -> None:
        self.smallest = np.unique(np.concatenate([self.smallest, hashes]))[:SKETCH]

    @property
    def distinct(self) -> int:
        """Distinct ids."""
        return estimated_distinct(self.smallest, SKETCH)

    @property
    def kind(self) -> str:
        """The mapping and its rows: other rows mean other ids."""
        return f"{self.mapping} of {self.rows}"

    def per_row(self, fitted: FittedMapping, missing: int) -> np.ndarray:
        counts = self.counts.copy()
        counts[MISSING_ROW] = missing
        return counts

    def distribution(self, ids: int, bins: int) -> dict[str, Any]:
        """Shares of the most frequent rows."""
        keys = np.argsort(-self.counts, kind="stable")[:ids]
        shares = self.counts[keys] / max(int(self.counts.sum()), 1)
        return {"distinct": self.distinct, "keys": keys.tolist(), "shares": shares.tolist()}

    def shares_of(self, then: Mapping[str, Any]) -> np.ndarray:
        """Shares of the rows ``then["keys"]``."""
        counts, keys = self.counts, np.array(then["keys"], np.int64)
        shares: np.ndarray = np.where(keys < len(counts), counts[keys % len(counts)], 0) / max(int(counts.sum()), 1)
        return shares


class BinCounts(HeldCounts):
    """The values of a feature that is cut into bins."""

    kind = BINS

    def __init__(self) -> None:
        self.sketch = Sketch()

    @property
    def distinct(self) -> int:
        """Distinct values: buckets of the sketch."""
        return len(self.sketch.used)

    def merge(self, other: BinCounts) -> None:
        """Add the counts of ``other``."""
        self.sketch.merge(other.sketch)

    def per_row(self, fitted: FittedMapping, missing: int) -> np.ndarray:
        assert fitted.bounds is not None
        per_bin = (self.sketch.shares(fitted.bounds) * self.sketch.total).round().astype(np.int64)
        return np.concatenate([[missing, 0], per_bin])

    def distribution(self, ids: int, bins: int) -> dict[str, Any]:
        """Shares of bins that are as even as the values let them be."""
        return self.sketch.distribution(bins)

    def shares_of(self, then: Mapping[str, Any]) -> np.ndarray:
        """Shares of the bins between ``then["bounds"]``."""
        return self.sketch.shares_of(then)
