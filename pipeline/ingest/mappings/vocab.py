"""Mapping ``vocab``: every frequent id has a row of its own, which it keeps from day to day."""

from __future__ import annotations

from typing import TYPE_CHECKING

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


VOCAB = VocabMapping(
    name="vocab",
    doc="ids ranked by frequency get a row each, ids that were not seen share row 1.",
    settings=("min_count", "when_full", "evict_after_days"),
    vocabulary=True,
    ranked=True,
)
