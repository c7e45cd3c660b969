"""Pass 1: what the train rows say about every feature, in partial results that merge in any order.

``Partial`` counts one set of typed rows; ``Fit`` sends every block's rows to train, test, or (split by
day) to the days that may yet turn out to be the last ones.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from pipeline.config import SplitConfig
from pipeline.contracts import LABEL, RESERVED_ROWS
from pipeline.ingest.coded import Coded, without_hashes
from pipeline.ingest.ids import of_bits
from pipeline.ingest.moments import LOG_QUANTUM, Moments, measure, signed_log
from pipeline.ingest.parse import row_hashes
from pipeline.ingest.sketch import Sketch
from pipeline.ingest.spec import DAY, DataSpec, DenseSpec, SparseSpec

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


def _counts_of(feature: SparseSpec) -> Counts:
    if feature.mapping in ("vocab", "learned"):
        return VocabCounts()
    if feature.mapping == "bins":
        return BinCounts()
    return HashedCounts(feature.rows, double=feature.mapping == "double_hash")


def prepared(feature: DenseSpec) -> pl.Expr:
    """The feature's value as it is standardised: clipped, then its logarithm taken, where it says so."""
    value = pl.col(f"dense:{feature.name}")
    if feature.clip:
        value = value.clip(*feature.clip)
    return signed_log(value) if feature.logarithmic else value


def quantised(feature: DenseSpec) -> pl.Expr:
    """``prepared`` for exact sums: a logarithm in whole multiples of LOG_QUANTUM."""
    return (prepared(feature) / LOG_QUANTUM).round() if feature.logarithmic else prepared(feature)


def hash_rows_of(hashes: pl.Series, rows: int) -> pl.Series:
    """Table row of each hash where a feature is hash-mapped: 2 + hash modulo (rows - 2)."""
    return (hashes % (rows - RESERVED_ROWS)).cast(pl.Int64) + RESERVED_ROWS


def second_rows_of(hashes: pl.Series, rows: int) -> pl.Series:
    """Another row of each hash, as good as independent of the first: of its bits, mixed. Nulls get any."""
    mixed = hashes.fill_null(0).to_numpy() * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
    return hash_rows_of(pl.Series(mixed ^ (mixed >> np.uint64(29))), rows)


def coded_ids(frame: pl.DataFrame, spec: DataSpec) -> dict[str, Coded]:
    """The ids of typed rows by feature, of those that have at most one in a row."""
    names = [feature.name for feature in spec.sparse if not feature.multi and feature.mapping != "bins"]
    return {name: Coded.of(frame[f"hash:{name}"]) for name in names}


def flat_hashes(frame: pl.DataFrame, feature: SparseSpec) -> pl.Series:
    """The feature's lookups in row order as UInt64; a row without an id is one null."""
    hashes = frame[f"hash:{feature.name}"]
    return hashes.explode(empty_as_null=True) if feature.multi else hashes


class Partial:
    """Counts and moments of one set of typed rows."""

    def __init__(self, spec: DataSpec) -> None:
        self.spec = spec
        self.rows = 0
        self.positives = 0
        self.raw = {feature.name: Moments() for feature in spec.dense}
        self.prepared = {feature.name: Moments() for feature in spec.dense if feature.logarithmic or feature.clip}
        self.sketches = {feature.name: Sketch() for feature in spec.dense}
        self.missing = {feature.name: 0 for feature in spec.sparse}
        self.lookups = {feature.name: 0 for feature in spec.sparse}
        self.counts = {feature.name: _counts_of(feature) for feature in spec.sparse}

    def add(self, frame: pl.DataFrame, coded: dict[str, Coded], keep: np.ndarray | None = None) -> None:
        """Count the typed rows of ``frame``, or those of ``keep`` (bool [rows]); ``coded``: ids of some features."""
        chosen = without_hashes(frame, coded)
        if keep is not None:
            chosen = chosen.filter(pl.Series(keep))
        self.rows += chosen.height
        self.positives += int(chosen[LABEL].sum())
        self._add_dense(chosen)
        labels = chosen[LABEL].to_numpy()
        for dense in self.spec.dense:
            self.sketches[dense.name].add(chosen[f"dense:{dense.name}"].to_numpy(), labels)
        for feature in self.spec.sparse:
            counts = self.counts[feature.name]
            if feature.name in coded:
                self._add_ids(feature.name, coded[feature.name], frame[f"id:{feature.name}"], keep)
            elif isinstance(counts, BinCounts):
                self.lookups[feature.name] += chosen.height
                self.missing[feature.name] += chosen[f"hash:{feature.name}"].null_count()
                counts.sketch.add(of_bits(chosen[f"hash:{feature.name}"]), labels)
            else:
                rows = frame if keep is None else frame.filter(pl.Series(keep))
                ids = rows[f"id:{feature.name}"].explode(empty_as_null=True)
                self._add_ids(feature.name, Coded.of(flat_hashes(rows, feature)), ids, None)

    def _add_ids(self, name: str, coded: Coded, ids: pl.Series, keep: np.ndarray | None) -> None:
        counts, missing = coded.counts(keep)
        self.missing[name] += missing
        self.lookups[name] += int(counts.sum()) + missing
        seen = counts > 0
        self.counts[name].add(coded.hashes[seen], ids[coded.first_rows()[seen]], counts[seen])  # type: ignore[union-attr]

    def _add_dense(self, frame: pl.DataFrame) -> None:
        raw = [pl.col(f"dense:{name}") for name in self.raw]
        prepared = [quantised(feature) for feature in self.spec.dense if feature.name in self.prepared]
        targets = [*self.raw.values(), *self.prepared.values()]
        if not targets:
            return
        for target, moments in zip(targets, measure(frame, [*raw, *prepared]), strict=True):
            target.merge(moments)

    def merge(self, other: Partial) -> None:
        """Take in what ``other`` counted."""
        self.rows += other.rows
        self.positives += other.positives
        for name, moments in self.raw.items():
            moments.merge(other.raw[name])
        for name, moments in self.prepared.items():
            moments.merge(other.prepared[name])
        for name, sketch in self.sketches.items():
            sketch.merge(other.sketches[name])
        for name, counts in self.counts.items():
            self.missing[name] += other.missing[name]
            self.lookups[name] += other.lookups[name]
            counts.merge(other.counts[name])  # type: ignore[arg-type]


class Fit:
    """The split and what was counted of its train rows.

    ``test``: that all rows are test rows, or none, where whole days are ingested one after the other; None where that
    depends on the row.
    """

    def __init__(self, spec: DataSpec, test: bool | None = None) -> None:
        self.spec = spec
        self.split: SplitConfig = spec.split
        self.test = test
        self.train = Partial(spec)
        self.days: dict[int, Partial] = {}
        self.test_rows = 0
        self.test_positives = 0

    def add(self, frame: pl.DataFrame, coded: dict[str, Coded]) -> pl.Series | None:
        """Count a block of typed rows; returns which are test rows, None if that is not known yet."""
        if self.split.by == "day" and self.test is None:
            self._add_days(frame, coded)
            return None
        if self.test is None:
            test = hash_split(row_hashes(frame, self.spec), self.split.test_share)
        else:
            test = pl.Series([self.test]).new_from_index(0, frame.height)
        self.test_rows += int(test.sum())
        self.test_positives += int(frame[LABEL].filter(test).sum())
        if not self.test:
            self.train.add(frame, coded, (~test).to_numpy())
        return test

    def _add_days(self, frame: pl.DataFrame, coded: dict[str, Coded]) -> None:
        """Only the last ``test_days`` days seen so far can be test days: all before them are train."""
        days = frame[DAY].to_numpy()
        for day in np.unique(days).tolist():
            self.days.setdefault(day, Partial(self.spec)).add(frame, coded, days == day)
            self._settle()

    def _settle(self) -> None:
        while len(self.days) > self.split.test_days:
            self.train.merge(self.days.pop(min(self.days)))

    def merge(self, other: Fit) -> None:
        """Take in what ``other``, of other blocks or of the next day, counted."""
        self.train.merge(other.train)
        for day, part in other.days.items():
            self.days.setdefault(day, Partial(self.spec)).merge(part)
        self._settle()
        self.test_rows += other.test_rows
        self.test_positives += other.test_positives

    @property
    def first_test_day(self) -> int:
        """Where the split is by row's day: rows of it and later ones are test rows, once all blocks were added."""
        return min(self.days, default=0)

    @property
    def rows(self) -> dict[str, int]:
        """Rows per split."""
        held = sum(part.rows for part in self.days.values())
        return {"train": self.train.rows, "test": self.test_rows + held}

    @property
    def positives(self) -> dict[str, int]:
        """Clicks per split."""
        held = sum(part.positives for part in self.days.values())
        return {"train": self.train.positives, "test": self.test_positives + held}


def hash_split(hashes: np.ndarray, test_share: float) -> pl.Series:
    """True for the share of rows whose hash falls below ``test_share`` of its range."""
    return pl.Series((hashes >> np.uint64(32)) < np.uint64(round(test_share * 2.0**32)))
