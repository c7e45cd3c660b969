"""Mapping ``hash``: an id's row is its hash modulo the table's rows; nothing is fitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pipeline.specs.id_mapping import Counts, FittedMapping, FittingDay, IdMapping, MappedFeature

if TYPE_CHECKING:
    import polars as pl


class HashMapping(IdMapping):
    """Rows computed from the id's hash alone: one for each of ``ways``."""

    @property
    def ways(self) -> tuple[Callable[[pl.Series, int], pl.Series], ...]:
        """Functions of hashes and the table's rows to row numbers."""
        from pipeline.ingest.hashing import hash_rows_of

        return (hash_rows_of,)

    def counts(self, feature: MappedFeature, vocabularies: int) -> Counts:
        """Lookups by row, and an estimate of distinct ids: O(rows) memory."""
        from pipeline.ingest.counts import HashedCounts

        return HashedCounts(feature.rows, self.name, self.ways)

    def fit(self, feature: MappedFeature, counts: Any, before: FittedMapping | None, day: FittingDay) -> FittedMapping:
        """The number of rows is all there is to know."""
        return before or FittedMapping(rows=feature.rows)

    def apply(self, fitted: FittedMapping, hashes: pl.Series) -> tuple[pl.Series, ...]:
        """A row by each of ``ways``."""
        return tuple(rows_of(hashes, fitted.rows) for rows_of in self.ways)


HASH = HashMapping(name="hash", doc="xxhash64 modulo the rows.")
