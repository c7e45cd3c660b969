"""How often the ids of a feature were looked up, in counts that merge in any order."""

from __future__ import annotations

import numpy as np
import polars as pl

from pipeline.ingest.sketch import Sketch
from pipeline.ingest.spec import SparseSpec
from pipeline.ingest.vocab_counts import IDS_IN_MEMORY, IDS_OF_A_FEATURE, LEAST_KEPT, VocabCounts
from pipeline.records import RESERVED_ROWS

SKETCH = 4096  # distinct ids of a hashed feature are exact up to here, then estimated


class HashedCounts:
    """Lookups per table row of one hash-mapped feature, and a sketch of its distinct ids.

    What was added is kept by id until it is asked for, not for all ``rows`` of the table: many small ones merge into
    one.
    """

    def __init__(self, rows: int, *, double: bool = False) -> None:
        self.rows = rows
        self.smallest = np.zeros(0, np.uint64)
        self.ways = (hash_rows_of, second_rows_of) if double else (hash_rows_of,)
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
        """Distinct ids: exact below SKETCH, else within a few percent (k-minimum-values estimate)."""
        if len(self.smallest) < SKETCH:
            return len(self.smallest)
        return round((SKETCH - 1) / (float(self.smallest[-1]) / 2.0**64))


class BinCounts:
    """The values of a feature that is cut into bins."""

    def __init__(self) -> None:
        self.sketch = Sketch()

    def merge(self, other: BinCounts) -> None:
        """Take in what ``other`` counted."""
        self.sketch.merge(other.sketch)


Counts = VocabCounts | HashedCounts | BinCounts


def counts_of(feature: SparseSpec, vocabularies: int = 1) -> Counts:
    """Empty counts as the feature's mapping needs them; ``vocabularies``: features that share the memory for ids."""
    if feature.mapping in ("vocab", "learned"):
        return VocabCounts(kept_ids(feature), min(IDS_IN_MEMORY // max(vocabularies, 1), IDS_OF_A_FEATURE))
    if feature.mapping == "bins":
        return BinCounts()
    return HashedCounts(feature.rows, double=feature.mapping == "double_hash")


def kept_ids(feature: SparseSpec) -> int:
    """How many ids of a feature are told apart where there are too many to hold in memory."""
    return max(2 * feature.rows, LEAST_KEPT)


def hash_rows_of(hashes: pl.Series, rows: int) -> pl.Series:
    """Table row of each hash where a feature is hash-mapped: 2 + hash modulo (rows - 2)."""
    return (hashes % (rows - RESERVED_ROWS)).cast(pl.Int64) + RESERVED_ROWS


def second_rows_of(hashes: pl.Series, rows: int) -> pl.Series:
    """Another row of each hash, as good as independent of the first: of its bits, mixed. Nulls get any."""
    mixed = hashes.fill_null(0).to_numpy() * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
    return hash_rows_of(pl.Series(mixed ^ (mixed >> np.uint64(29))), rows)
