"""Ids of a block as codes into its distinct hashes: counted and mapped once for each id, not for each row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import polars as pl

from pipeline.ingest.spec import DataSpec


@dataclass(frozen=True)
class Coded:
    """``hashes``: the distinct ones, uint64; ``codes``: each row's place in them, their number where it has none."""

    hashes: np.ndarray
    codes: np.ndarray

    @staticmethod
    def of(hashes: pl.Series) -> Coded:
        """The rows of ``hashes`` (UInt64), null where missing."""
        encoded = hashes.to_arrow().dictionary_encode()
        distinct = encoded.dictionary.to_numpy()
        codes = encoded.indices.fill_null(len(distinct)) if encoded.null_count else encoded.indices
        return Coded(distinct, codes.to_numpy())

    def counts(self, keep: np.ndarray | None) -> tuple[np.ndarray, int]:
        """Rows with each hash, int64, and rows without one; ``keep``: of these rows alone."""
        codes = self.codes if keep is None else self.codes[keep]
        counts = np.bincount(codes, minlength=len(self.hashes) + 1)
        return counts[:-1], int(counts[-1])

    def first_rows(self) -> np.ndarray:
        """A row that has it, for each hash: the first one."""
        first = np.empty(len(self.hashes) + 1, np.int64)
        first[self.codes[::-1]] = np.arange(len(self.codes) - 1, -1, -1)
        return first[:-1]

    def series(self) -> pl.Series:
        """The hash of every row, null where missing."""
        return pl.concat([pl.Series(self.hashes), pl.Series([None], dtype=pl.UInt64)]).gather(self.codes)


def without_hashes(frame: pl.DataFrame, coded: Iterable[str]) -> pl.DataFrame:
    """Typed rows without raw ids, and without the hashes of the ``coded`` features."""
    gone = {f"hash:{name}" for name in coded}
    return frame.select(name for name in frame.columns if name not in gone and not name.startswith("id:"))


def coded_ids(frame: pl.DataFrame, spec: DataSpec) -> dict[str, Coded]:
    """The ids of typed rows by feature, of those that have at most one in a row."""
    names = [feature.name for feature in spec.sparse if not feature.multi and not feature.mapping.numbers]
    return {name: Coded.of(frame[f"hash:{name}"]) for name in names}
