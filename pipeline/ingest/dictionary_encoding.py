"""Ids of a block as codes into its distinct hashes: counted and mapped once for each id, not for each lookup."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import polars as pl

from pipeline.ingest.ids import as_lists, flat_hashes, ids_per_row
from pipeline.ingest.schema import DataSpec, SparseSpec
from pipeline.native.column_kernels import coded, counted


@dataclass(frozen=True)
class Coded:
    """``hashes``: the distinct ones, uint64; ``codes``: each lookup's place in them, ``len(hashes)`` for a missing id.

    ``lengths``: lookups of each row, int64, at least one; None where every row has one.
    """

    hashes: np.ndarray
    codes: np.ndarray
    lengths: np.ndarray | None = None

    @staticmethod
    def of(frame: pl.DataFrame, feature: SparseSpec) -> Coded:
        """The lookups of ``feature`` in typed rows."""
        distinct, codes = coded(flat_hashes(frame, feature).to_arrow())
        return Coded(distinct, codes, ids_per_row(frame, feature) if feature.multi else None)

    @staticmethod
    def of_codes(hashes: np.ndarray, codes: pl.Series) -> Coded:
        """As ``codes_by_row`` gives the ``codes``."""
        if codes.dtype != pl.List:
            return Coded(hashes, codes.to_numpy())
        return Coded(hashes, codes.explode().to_numpy(), codes.list.len().to_numpy().astype(np.int64))

    def codes_by_row(self) -> pl.Series:
        """The codes, or lists of them, in as few bytes as they need."""
        codes = self.codes
        if len(codes) <= 1 << 16 or codes.max() < 1 << 16:
            codes = codes.astype(np.uint16)
        return self.by_row(pl.Series(codes))

    def by_row(self, values: pl.Series) -> pl.Series:
        """A value of each lookup as a value, or as a list, of each row."""
        if self.lengths is None:
            return values
        return as_lists(values, np.concatenate([[0], np.cumsum(self.lengths)]))

    def by_lookup(self, values: np.ndarray) -> np.ndarray:
        """A value of each row for each of its lookups."""
        return values if self.lengths is None else np.repeat(values, self.lengths)

    def of_rows(self, keep: np.ndarray) -> Coded:
        """The lookups of the rows ``keep`` (bool [rows]); all hashes."""
        lengths = None if self.lengths is None else self.lengths[keep]
        return Coded(self.hashes, self.codes[self.by_lookup(keep)], lengths)

    def counts(self, keep: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, int]:
        """Of the rows ``keep`` (bool [rows]; None: all): lookups of each hash, the first of them; those of none.

        All int64. The first lookup of a hash that those rows do not have means nothing.
        """
        lookups = None if keep is None else self.by_lookup(keep)
        counts, first = counted(self.codes, lookups, len(self.hashes))
        return counts[:-1], first[:-1], int(counts[-1])

    def hashes_by_row(self) -> pl.Series:
        """The hash, or the list of hashes, of every row; null where missing."""
        known = pl.concat([pl.Series(self.hashes), pl.Series([None], dtype=pl.UInt64)])
        return self.by_row(known.gather(self.codes))


def without_hashes(frame: pl.DataFrame, coded: Iterable[str]) -> pl.DataFrame:
    """Typed rows without raw ids, and without the hashes of the ``coded`` features."""
    hashes = {f"hash:{name}" for name in coded}
    return frame.select(name for name in frame.columns if name not in hashes and not name.startswith("id:"))


def coded_ids(frame: pl.DataFrame, spec: DataSpec) -> dict[str, Coded]:
    """The ids of typed rows by feature, of those that are no numbers."""
    return {feature.name: Coded.of(frame, feature) for feature in spec.sparse if not feature.mapping.numbers}
