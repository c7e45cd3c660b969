"""How often the rows of a hashed feature and the values of a binned one were looked up; counts merge in any order.

A vocabulary counts every id, exactly and in bounded memory: beyond a limit the counts go to disk. There they are
partitioned by hash, so that all counts of an id are in one partition, and each partition is small enough to be added
up by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from pipeline.ingest.ids import estimated_distinct
from pipeline.ingest.sketch import Sketch
from pipeline.ingest.spill import KeyPartitions
from pipeline.records.dataset import MISSING_ROW, RESERVED_ROWS
from pipeline.specs.id_mapping import BINS, FittedMapping, HeldCounts, IdCounts

# Distinct ids of a hashed feature are exact up to here, then estimated.
SKETCH = 4096


class HashedCounts(IdCounts):
    """Lookups per table row of one hash-mapped feature, and a sketch of its distinct ids.

    ``ways``: functions of hashes and ``rows`` to the row numbers that a lookup sums. Additions are kept by id until the
    counts are asked for: many small counts merge into one array of ``rows``.
    """

    def __init__(self, rows: int, mapping: str, ways: Sequence[Callable[[pl.Series, int], pl.Series]]) -> None:
        self.rows = rows
        self.mapping = mapping
        self.ways = ways
        self.smallest = np.zeros(0, np.uint64)
        self._all: np.ndarray | None = None
        self._pieces: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, hashes: np.ndarray, ids: pl.Series, counts: np.ndarray) -> None:
        for rows_of in self.ways:
            self._pieces.append((rows_of(pl.Series(hashes), self.rows).to_numpy(), counts))
        self.smallest = np.unique(np.concatenate([self.smallest, hashes]))[:SKETCH]

    def merge(self, other: HashedCounts) -> None:
        """Add the counts of ``other``."""
        self._pieces += other._pieces
        if other._all is not None:
            # Once `counts` was asked for, pieces are summed in this array, which is a piece with every row.
            self._pieces.append((np.arange(self.rows), other._all))
        # The smallest hashes of all are among the smallest of either.
        self.smallest = np.unique(np.concatenate([self.smallest, other.smallest]))[:SKETCH]
        # Reading `counts` adds up the pieces. Those of all blocks would take more memory than the array of rows.
        _ = self.counts

    @property
    def counts(self) -> np.ndarray:
        """Lookups of every row, int64 [rows]."""
        # Allocated on first use: the few ids of a block take less memory than an array of all rows.
        if self._all is None:
            self._all = np.zeros(self.rows, np.int64)
        for rows, counts in self._pieces:
            # Unlike `+=`, this adds up the ids of a piece that share a row.
            np.add.at(self._all, rows, counts)
        self._pieces = []
        return self._all

    @property
    def distinct(self) -> int:
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
        keys = np.argsort(-self.counts, kind="stable")[:ids]
        shares = self.counts[keys] / max(int(self.counts.sum()), 1)
        return {"distinct": self.distinct, "keys": keys.tolist(), "shares": shares.tolist()}

    def shares_of(self, then: Mapping[str, Any]) -> np.ndarray:
        counts, keys = self.counts, np.array(then["keys"], np.int64)
        # `np.where` evaluates both sides: the modulo keeps keys of a table that was larger then within bounds.
        here = np.where(keys < len(counts), counts[keys % len(counts)], 0)
        shares: np.ndarray = here / max(int(counts.sum()), 1)
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
        self.sketch.merge(other.sketch)

    def per_row(self, fitted: FittedMapping, missing: int) -> np.ndarray:
        assert fitted.bounds is not None
        per_bin = (self.sketch.shares(fitted.bounds) * self.sketch.total).round().astype(np.int64)
        return np.concatenate([[missing, 0], per_bin])

    def distribution(self, ids: int, bins: int) -> dict[str, Any]:
        return self.sketch.distribution(bins)

    def shares_of(self, then: Mapping[str, Any]) -> np.ndarray:
        return self.sketch.shares_of(then)


COUNTS = {"hash": pl.UInt64, "id": pl.String, "count": pl.Int64}
# Maximum number of distinct ids of all features together, about 64 bytes each.
IDS_IN_MEMORY = 1 << 23
# Maximum number of distinct ids of one feature, because they take several times as much memory while merged.
IDS_OF_A_FEATURE = 1 << 21
LEAST_KEPT = 1 << 18
_MERGE_ROWS = 1 << 15
_PARTITION_BITS = 6


class VocabCounts(IdCounts):
    """How often each id of one feature was looked up; what was counted merges in any order.

    ``kept``: most ids of ``table`` once there were more than ``limit`` distinct ones in memory.
    """

    IDS = "ids"
    # Unlike the kind of `HashedCounts`, this one names no rows: ids are compared by their hashes.
    kind = IDS

    def __init__(self, kept: int = LEAST_KEPT, limit: int = IDS_OF_A_FEATURE) -> None:
        self.kept, self.limit = kept, limit
        self.pieces: list[pl.DataFrame] = []
        self.merged_rows = 0
        self._disk: KeyPartitions | None = None
        self._settled: _Settled | None = None

    @staticmethod
    def sharing(rows: int, vocabularies: int) -> VocabCounts:
        """Return empty counts for a table of ``rows``; ``vocabularies`` features share the memory for ids."""
        return VocabCounts(kept_ids(rows), min(IDS_IN_MEMORY // max(vocabularies, 1), IDS_OF_A_FEATURE))

    def add(self, hashes: np.ndarray, ids: pl.Series, counts: np.ndarray) -> None:
        """Count lookups of distinct ``hashes`` with their raw ``ids``."""
        columns = [pl.Series("hash", hashes, pl.UInt64), ids.alias("id"), pl.Series("count", counts, pl.Int64)]
        self._append([pl.DataFrame(columns)])

    def merge(self, other: VocabCounts) -> None:
        if other._disk is not None:
            for part in other._disk.blocks():
                self._append([part])
        copies = []
        for piece in other.pieces:
            # Copy the piece to memory of its own. Otherwise it would lie between buffers that are freed with the block,
            # and fragment the heap: after 128 blocks by some 7 % of the peak (docs/measurements/ingestion.md).
            half = piece.height // 2
            copies.append(pl.concat([piece.head(half), piece.slice(half)], rechunk=True))
        self._append(copies)

    def shares(self, count: int) -> list[VocabCounts]:
        merged = self._merged()
        if count == 1 and self._disk is None:
            return [self]
        parts = [VocabCounts(self.kept, self.limit) for _ in range(count)]
        bounds = [(number << 64) // count for number in range(1, count)]
        on_disk: Iterable[pl.DataFrame] = self._disk.blocks() if self._disk is not None else ()
        for table in itertools.chain(on_disk, [merged]):
            hashes = table["hash"].to_numpy()
            order = np.argsort(hashes)
            cuts = [0, *np.searchsorted(hashes[order], np.array(bounds, np.uint64)).tolist(), len(order)]
            for part, (start, stop) in zip(parts, itertools.pairwise(cuts), strict=True):
                if stop > start:
                    part.pieces.append(table[order[start:stop]])
        return parts

    def condensed(self, wanted: pl.Series) -> VocabCounts:
        """Return what a fit and the checks need: sums, the ``kept`` most frequent ids and the ``wanted`` ones."""
        self.settle(wanted)
        return self.joined([self], wanted)

    @staticmethod
    def joined(pieces: Sequence[VocabCounts], wanted: pl.Series) -> VocabCounts:
        """Join the ``condensed`` counts of all ranges of hashes."""
        tables, distinct, total = [], 0, 0
        for piece in pieces:
            part = piece._all()
            tables.append(part.table)
            distinct += part.distinct
            total += part.total
        joined = VocabCounts(pieces[0].kept, pieces[0].limit)
        table = pl.concat(tables)
        if table.height > joined.kept:
            # Ties go by hash, as everywhere, so that the order of the pieces decides nothing.
            ranked = table.sort(["count", "hash"], descending=[True, False])
            rest = ranked.slice(joined.kept).filter(pl.col("hash").is_in(wanted.implode()))
            table = pl.concat([ranked.head(joined.kept), rest]).rechunk()
        joined._settled = _Settled(table, distinct, total)
        return joined

    def _append(self, pieces: list[pl.DataFrame]) -> None:
        self.pieces += pieces
        self._settled = None
        # Merging whenever the added rows outgrow half of the merged table costs amortised O(1) per row.
        rows = sum(piece.height for piece in self.pieces)
        if rows - self.merged_rows > self.merged_rows // 2 + _MERGE_ROWS or rows > 2 * self.limit:
            self._merged()
            if self.merged_rows > self.limit:
                self._disk = self._disk or KeyPartitions("hash", waiting=0, bits=_PARTITION_BITS)
                self._disk.add(self.pieces[0])
                self.pieces, self.merged_rows = [], 0

    def _merged(self) -> pl.DataFrame:
        # Merges the pieces in memory into one table, which replaces them. It is empty if nothing was counted or all is
        # on disk.
        if not self.pieces:
            return pl.DataFrame(schema=COUNTS)
        # A single piece has distinct hashes already.
        if len(self.pieces) > 1:
            merged = _added_up(self.pieces)
            self.pieces = [merged]
            self.merged_rows = merged.height
        return self.pieces[0]

    @property
    def on_disk(self) -> bool:
        """Whether there were more than ``limit``."""
        return self._disk is not None

    def settle(self, wanted: pl.Series | None = None) -> None:
        """Add up what is on disk, if anything is: ``table`` then has the hashes ``wanted`` among others."""
        if wanted is None:
            wanted = pl.Series([], dtype=pl.UInt64)
        known = self._settled
        if self._disk is None or (known is not None and wanted.is_in(known.table["hash"].implode()).all()):
            return
        self._disk.add(self._merged())
        self.pieces, self.merged_rows = [], 0
        best, named = pl.DataFrame(schema=COUNTS), []
        distinct = total = 0
        # A partition has all counts of its ids, so its sums are final: the most frequent ids so far suffice.
        for counted in self._disk:
            part = _added_up([counted])
            distinct += part.height
            total += int(part["count"].sum())
            named.append(part.filter(pl.col("hash").is_in(wanted.implode())))
            best = pl.concat([best, part]).sort(["count", "hash"], descending=[True, False]).head(self.kept)
        rest = pl.concat(named).join(best.select("hash"), on="hash", how="anti")
        self._settled = _Settled(pl.concat([best, rest]).rechunk(), distinct, total)

    def _all(self) -> _Settled:
        if self._disk is None and self._settled is None:
            # All ids are in memory: nothing has to be settled, and the table has every one of them.
            merged = self._merged()
            return _Settled(merged, merged.height, int(merged["count"].sum()))
        if self._settled is None:
            # No caller named hashes that the table must have.
            self.settle()
        assert self._settled is not None
        return self._settled

    def table(self) -> pl.DataFrame:
        """Counts, one row per id, in no particular order: of all ids, or (many on disk) the ``kept`` most frequent."""
        return self._all().table

    @property
    def distinct(self) -> int:
        return self._all().distinct

    @property
    def total(self) -> int:
        return self._all().total

    def per_row(self, fitted: FittedMapping, missing: int) -> np.ndarray:
        """See ``HeldCounts``; a continued row may have no lookup."""
        known = np.zeros(fitted.rows - RESERVED_ROWS, np.int64)
        if fitted.lookup is not None:
            seen = self.table().join(fitted.lookup, on="hash", how="inner").select("row", "count")
            np.add.at(known, seen["row"].to_numpy() - RESERVED_ROWS, seen["count"].to_numpy())
        return np.concatenate([[missing, self.total - int(known.sum())], known])

    def distribution(self, ids: int, bins: int) -> dict[str, Any]:
        top = self.table().top_k(ids, by=["count", "hash"]).sort(["count", "hash"], descending=True)
        shares = top["count"].to_numpy() / max(self.total, 1)
        return {"distinct": self.distinct, "keys": top["hash"].to_numpy().tolist(), "shares": shares.tolist()}

    def shares_of(self, then: Mapping[str, Any]) -> np.ndarray:
        wanted = pl.DataFrame({"hash": pl.Series(then["keys"], dtype=pl.UInt64)})
        seen = wanted.join(self.table(), on="hash", how="left", maintain_order="left")["count"].fill_null(0)
        return seen.to_numpy() / max(self.total, 1)


def kept_ids(rows: int) -> int:
    """Return how many ids of a feature with a table of ``rows`` are told apart if there are too many for memory."""
    return max(2 * rows, LEAST_KEPT)


@dataclass(frozen=True)
class _Settled:
    """The sums over all that was counted, and a ``table`` of the ids that are told apart."""

    table: pl.DataFrame
    distinct: int
    total: int


def _added_up(pieces: list[pl.DataFrame]) -> pl.DataFrame:
    # Use min and not first: should two ids share a hash, the result does not depend on the order of blocks.
    return pl.concat(pieces).group_by("hash").agg(pl.min("id"), pl.sum("count"))
