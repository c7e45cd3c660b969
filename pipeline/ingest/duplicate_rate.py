"""How often the contents of rows repeat, from a sample of them that merges exactly; a row's place as a hash.

Equal rows stay on one side of the hash split. If most rows repeat, as in a log of few features, that holds out whole
contents instead of rows: with one feature, no train row would have any id of the test rows.
"""

from __future__ import annotations

import numpy as np
import polars as pl
import xxhash

from pipeline.core.kernels import load_kernels
from pipeline.ingest.ids import estimated_distinct, hash_rows
from pipeline.ingest.moments import hashes_of
from pipeline.ingest.schema import DataSpec
from pipeline.ingest.sketch import added_up

# Distinct contents in the sample, those with the smallest hashes.
SAMPLE = 4096
# Minimum rows that share a content for it to repeat; fewer may be one row that was delivered again.
OFTEN = 4


class Contents:
    """The ``SAMPLE`` smallest of the hashes of rows' contents, and how many rows have each: the same in any order."""

    def __init__(self) -> None:
        self.hashes = np.zeros(0, np.uint64)
        self.counts = np.zeros(0, np.int64)
        self.rows = 0

    def add(self, hashes: np.ndarray) -> None:
        """Add the content hashes (uint64) of rows."""
        least = hashes
        if len(hashes) > 4 * SAMPLE:
            # Most rows are not part of the sample: a cut that leaves enough distinct ones saves sorting them.
            cut = np.uint64(2 * SAMPLE * 2.0**64 / len(hashes))
            least = hashes[hashes < cut]
        distinct, counts = np.unique(least, return_counts=True)
        if len(distinct) < SAMPLE and len(least) < len(hashes):
            # If many contents repeat, fewer distinct ones than a full sample lie below the cut.
            distinct, counts = np.unique(hashes, return_counts=True)
        new = Contents()
        new.hashes, new.counts, new.rows = distinct[:SAMPLE], counts[:SAMPLE], len(hashes)
        self.merge(new)

    def merge(self, other: Contents) -> None:
        self.rows += other.rows
        # A hash among the smallest of all is among the smallest wherever it occurs: its counts are complete.
        distinct, total = added_up((self.hashes, other.hashes), (self.counts, other.counts))
        self.hashes, self.counts = distinct[:SAMPLE], total[:SAMPLE]

    @property
    def distinct(self) -> int:
        return estimated_distinct(self.hashes, SAMPLE)

    @property
    def repeats(self) -> bool:
        """Whether more than half of the rows have a content that OFTEN rows share."""
        if not self.rows:
            return False
        # Contents that repeat often are rare among distinct contents, and the sample may miss them. So count the
        # others.
        seldom = float(self.counts[self.counts < OFTEN].sum()) * self.distinct / len(self.hashes)
        return seldom < self.rows / 2


def place_hashes(file: str, lines: np.ndarray) -> np.ndarray:
    """Return a stable hash (uint64) of each row's place: its ``file`` and line number."""
    name = np.full(len(lines), xxhash.xxh64_intdigest(file.encode(errors="surrogateescape")), np.uint64)
    return hash_rows([name, lines.astype(np.uint64)])


def row_hashes(frame: pl.DataFrame, spec: DataSpec) -> np.ndarray:
    """Return a stable hash (uint64) of each typed row's features.

    The label is left out: with it, equal rows that differ in the click alone fall on different sides of the split,
    and the side of a row tells its label.
    """
    words, vectors = list[pl.Series](), list[pl.Series]()
    for dense in spec.dense:
        numbers = frame[f"dense:{dense.name}"]
        if dense.vector:
            vectors.append(pl.Series(hashes_of(numbers)))
        else:
            words.append(numbers)
    # The order of the words is part of the hash, and so of the split: vectors come after all numbers.
    words += vectors
    for sparse in spec.sparse:
        hashes = frame[f"hash:{sparse.name}"]
        words.append(_fold(hashes) if sparse.multi else hashes)
    kernels = load_kernels("rows")
    if kernels is not None:
        return kernels.mix([each.to_arrow() for each in words])
    bits = []
    for each in words:
        # A missing hash is 0 and a missing number NaN, as in the kernel.
        missing = np.nan if each.dtype.is_float() else 0
        bits.append(each.fill_null(missing).to_numpy().view(np.uint64))
    return hash_rows(bits)


def _fold(lists: pl.Series) -> pl.Series:
    # Returns one UInt64 per list: the sum of its elements' hashes, each divided by an odd number that depends on its
    # place, so that lists with the same ids in another order differ.
    frame = lists.to_frame("h").with_row_index("row").explode("h").drop_nulls()
    place = pl.int_range(pl.len()).over("row").cast(pl.UInt64)
    folded = frame.with_columns(pl.col("h") // (place * 2 + 1)).group_by("row").agg(pl.col("h").sum())
    # Lists without ids have no row in `folded` and stay 0.
    result = np.zeros(len(lists), np.uint64)
    result[folded["row"].to_numpy()] = folded["h"].to_numpy()
    return pl.Series(result)
