"""Mapping ``vocab``: every frequent id has a row of its own, which it keeps from day to day."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.records import UNSEEN_ROW
from pipeline.specs.id_mapping import FittedMapping, FittingDay, IdMapping, MappedFeature

if TYPE_CHECKING:
    import polars as pl

    from pipeline.ingest.vocab_counts import VocabCounts


class VocabMapping(IdMapping):
    """Rows by a vocabulary that the dataset lists."""

    def counts(self, feature: MappedFeature, vocabularies: int) -> VocabCounts:
        """Exact counts by id: a share of eight million ids in memory, the rest on disk."""
        from pipeline.ingest.vocab_counts import VocabCounts

        return VocabCounts.sharing(feature.rows, vocabularies)

    def fit(
        self, feature: MappedFeature, counts: VocabCounts, before: FittedMapping | None, day: FittingDay
    ) -> FittedMapping:
        """New ids get rows by falling count, idle ones lose theirs."""
        from pipeline.ingest.vocabulary import empty, updated

        fitted = before or empty()
        assert fitted.ids is not None
        counts.settle(fitted.ids["hash"])
        return updated(fitted, counts.table(), feature, day.day, day.first_day)

    def apply(self, fitted: FittedMapping, hashes: pl.Series) -> tuple[pl.Series, ...]:
        """By the vocabulary."""
        return (fitted.known_rows(hashes),)

    def rows(self, fitted: FittedMapping, hashes: pl.Series) -> tuple[pl.Series, ...]:
        """As every mapping; of hashes without nulls, as blocks have them, in three steps of NumPy."""
        import numpy as np
        import polars as pl

        if hashes.null_count():
            return super().rows(fitted, hashes)
        values = hashes.to_numpy()
        found, (first, count) = fitted.found_rows(values), fitted.spread or (UNSEEN_ROW, 1)
        unknown = np.int32(first) if count == 1 else (values % np.uint64(count)).astype(np.int32) + np.int32(first)
        return (pl.Series("row", np.where(found < 0, unknown, found)),)


VOCAB = VocabMapping(
    name="vocab",
    doc="ids ranked by frequency get a row each, ids that were not seen share row 1.",
    settings=("min_count", "when_full", "evict_after_days"),
    vocabulary=True,
    ranked=True,
)
