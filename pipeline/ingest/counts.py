"""How often the ids of a feature were looked up, in counts that merge in any order."""

from __future__ import annotations

import numpy as np
import polars as pl

from pipeline.contracts import RESERVED_ROWS
from pipeline.ingest.sketch import Sketch
from pipeline.ingest.spec import SparseSpec

SKETCH = 4096  # distinct ids of a hashed feature are exact up to here, then estimated
_MERGE_ROWS = 1 << 16


class VocabCounts:
    """How often each id of one feature was looked up: frame of ``hash``, ``id``, ``count``."""

    def __init__(self) -> None:
        self.pieces: list[pl.DataFrame] = []
        self.merged_rows = 0

    def add(self, hashes: np.ndarray, ids: pl.Series, counts: np.ndarray) -> None:
        """Count lookups of distinct ``hashes`` with their raw ``ids``."""
        columns = [pl.Series("hash", hashes, pl.UInt64), ids.alias("id"), pl.Series("count", counts, pl.Int64)]
        self._append([pl.DataFrame(columns)])

    def merge(self, other: VocabCounts) -> None:
        """Take in what ``other`` counted."""
        self._append(other.pieces)

    def _append(self, pieces: list[pl.DataFrame]) -> None:
        self.pieces += pieces
        # Merging whenever the pieces outgrow twice the merged table costs O(1) per row in total.
        if sum(piece.height for piece in self.pieces) > 2 * self.merged_rows + _MERGE_ROWS:
            self.table()

    def table(self) -> pl.DataFrame:
        """All counts, one row per id, in no particular order."""
        if not self.pieces:
            return pl.DataFrame(schema={"hash": pl.UInt64, "id": pl.String, "count": pl.Int64})
        if len(self.pieces) > 1:
            # min, not first: should two ids share a hash, the result does not depend on the order of blocks.
            merged = pl.concat(self.pieces).group_by("hash").agg(pl.min("id"), pl.sum("count"))
            self.pieces, self.merged_rows = [merged], merged.height
        return self.pieces[0]


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


def counts_of(feature: SparseSpec) -> Counts:
    """Empty counts as the feature's mapping needs them."""
    if feature.mapping in ("vocab", "learned"):
        return VocabCounts()
    if feature.mapping == "bins":
        return BinCounts()
    return HashedCounts(feature.rows, double=feature.mapping == "double_hash")


def hash_rows_of(hashes: pl.Series, rows: int) -> pl.Series:
    """Table row of each hash where a feature is hash-mapped: 2 + hash modulo (rows - 2)."""
    return (hashes % (rows - RESERVED_ROWS)).cast(pl.Int64) + RESERVED_ROWS


def second_rows_of(hashes: pl.Series, rows: int) -> pl.Series:
    """Another row of each hash, as good as independent of the first: of its bits, mixed. Nulls get any."""
    mixed = hashes.fill_null(0).to_numpy() * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
    return hash_rows_of(pl.Series(mixed ^ (mixed >> np.uint64(29))), rows)
