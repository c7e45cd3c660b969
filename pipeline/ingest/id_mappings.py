"""The id mappings: ``SPECS``, for ``data.sparse_defaults.mapping`` and ``data.sparse.<feature>.mapping``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import ConfigError
from pipeline.records.dataset import RESERVED_ROWS, UNSEEN_ROW
from pipeline.specs.id_mapping import BINS as NAME
from pipeline.specs.id_mapping import Counts, FittedMapping, FittingDay, IdMapping, MappedFeature

if TYPE_CHECKING:
    import polars as pl

    from pipeline.ingest.counts import BinCounts, VocabCounts


class VocabMapping(IdMapping):
    """``vocab``: every frequent id has a row of its own, which it keeps from day to day.

    Rows by a vocabulary that the dataset lists.
    """

    def counts(self, feature: MappedFeature, vocabularies: int) -> VocabCounts:
        """Return exact counts by id: a share of eight million ids in memory, the rest on disk."""
        from pipeline.ingest.counts import VocabCounts

        return VocabCounts.sharing(feature.rows, vocabularies)

    def fit(
        self, feature: MappedFeature, counts: VocabCounts, before: FittedMapping | None, day: FittingDay
    ) -> FittedMapping:
        """Give new ids rows by falling count; idle ids lose theirs."""
        from pipeline.ingest.vocabulary import empty, updated

        fitted = before or empty()
        assert fitted.ids is not None
        counts.settle(fitted.ids["hash"])
        return updated(fitted, counts.table(), feature, day.day, day.first_day)

    def apply(self, fitted: FittedMapping, hashes: pl.Series) -> tuple[pl.Series, ...]:
        return (fitted.known_rows(hashes),)

    def rows(self, fitted: FittedMapping, hashes: pl.Series) -> tuple[pl.Series, ...]:
        """Map as every mapping does; hashes without nulls, as blocks have them, in three steps of NumPy."""
        import numpy as np
        import polars as pl

        if hashes.null_count():
            return super().rows(fitted, hashes)
        # Unseen ids share one row, or are spread over several by their hash.
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


class HashMapping(IdMapping):
    """``hash``: an id's row is its hash modulo the rows that are not reserved, behind those; nothing is fitted.

    Rows computed from the id's hash alone: one for each of ``ways``.
    """

    @property
    def ways(self) -> tuple[Callable[[pl.Series, int], pl.Series], ...]:
        """Functions of hashes and the table's rows to row numbers."""
        from pipeline.ingest.ids import hash_rows_of

        return (hash_rows_of,)

    def counts(self, feature: MappedFeature, vocabularies: int) -> Counts:
        """Return counts of lookups by row, with an estimate of distinct ids: O(rows) memory."""
        from pipeline.ingest.counts import HashedCounts

        return HashedCounts(feature.rows, self.name, self.ways)

    def fit(self, feature: MappedFeature, counts: Any, before: FittedMapping | None, day: FittingDay) -> FittedMapping:
        """Fit nothing: the number of rows is all there is to know."""
        return before or FittedMapping(rows=feature.rows)

    def apply(self, fitted: FittedMapping, hashes: pl.Series) -> tuple[pl.Series, ...]:
        return tuple(rows_of(hashes, fitted.rows) for rows_of in self.ways)


HASH = HashMapping(name="hash", doc="xxhash64 modulo the rows.")


class _DoubleHash(HashMapping):
    """``double_hash``: an id looks up two rows of two hashes, summed; ids that share one rarely share the other."""

    @property
    def ways(self) -> tuple[Callable[[pl.Series, int], pl.Series], ...]:
        # Two hashes that are as good as independent.
        from pipeline.ingest.ids import hash_rows_of, second_rows_of

        return hash_rows_of, second_rows_of


DOUBLE_HASH = _DoubleHash(name="double_hash", doc="the sum of two such rows.", rows_per_id=2)


class _Learned(VocabMapping):
    """``learned``: rare ids share rows with ids that behave alike (Learning to Collide, arXiv 2203.15837)."""

    def fit(
        self, feature: MappedFeature, counts: VocabCounts, before: FittedMapping | None, day: FittingDay
    ) -> FittedMapping:
        # Decided once: later days keep which ids share a row.
        from pipeline.ingest.vocabulary import probe, shared_rows

        return before or shared_rows(feature, counts.table(), day.once(probe)[feature.name])

    def require_compatible(
        self, feature: MappedFeature, then: Mapping[str, Any], path: str, config: Mapping[str, Any]
    ) -> None:
        # The checks of every mapping apply. The setting `rows` must be the same, too, because the sharing is decided
        # once.
        super().require_compatible(feature, then, path, config)
        former = config["data"]["sparse"].get(feature.name)
        rows = feature.rows if former is None else former["rows"] or config["data"]["sparse_defaults"]["rows"]
        if rows != feature.rows:
            raise ConfigError(
                f"data.sparse.{feature.name}.rows is {feature.rows:,}, but {path}, whose mapping learned continues, "
                f"was made with {rows:,}: which ids share a row is decided once",
                hint=f"data.sparse.{feature.name}.rows={rows}, or data.mapping_from=null for new mappings",
            )


LEARNED = _Learned(
    name="learned",
    doc="rare ids share rows with ids that behave alike.",
    vocabulary=True,
    seeded=True,
    shareable=False,
)


class _Bins(IdMapping):
    """Features with ``bins``: numbers are cut into bins of the train rows, one row for each bin."""

    def counts(self, feature: MappedFeature, vocabularies: int) -> BinCounts:
        # A quantile sketch: at most 65,536 buckets.
        from pipeline.ingest.counts import BinCounts

        return BinCounts()

    def fit(
        self, feature: MappedFeature, counts: BinCounts, before: FittedMapping | None, day: FittingDay
    ) -> FittedMapping:
        # Choose bounds of bins as `data.sparse.<name>.bins_by` says, and only once.
        from pipeline.ingest.sketch import bin_bounds

        # Each bin has a row, beside the reserved ones. Few distinct values may make fewer bins, but the table keeps the
        # configured number of rows.
        bounds = bin_bounds(counts.sketch, feature.bins_by, feature.rows - RESERVED_ROWS)
        return before or FittedMapping(rows=feature.rows, bounds=bounds)

    def require_compatible(
        self, feature: MappedFeature, then: Mapping[str, Any], path: str, config: Mapping[str, Any]
    ) -> None:
        from pipeline.config.features import PERCENTILE

        super().require_compatible(feature, then, path, config)
        if (before := then.get("bins_by", PERCENTILE)) != feature.bins_by:
            raise ConfigError(
                f"data.sparse.{feature.name}.bins_by is {feature.bins_by}, but {path}, whose mapping continues, has "
                f"{before}: every number would get another row",
                hint=f"data.sparse.{feature.name}.bins_by={before}, or data.mapping_from=null for new mappings",
            )

    def apply(self, fitted: FittedMapping, hashes: pl.Series) -> tuple[pl.Series, ...]:
        import numpy as np
        import polars as pl

        from pipeline.ingest.ids import of_bits
        from pipeline.ingest.sketch import bin_of

        # The hash of a number is its bits (`ids.as_bits`), from which the number itself is restored.
        assert fitted.bounds is not None
        return (pl.Series((bin_of(of_bits(hashes), fitted.bounds) + RESERVED_ROWS).astype(np.int32)),)


BINS = _Bins(name=NAME, doc="One row for each bin of a number.", numbers=True, shareable=False)


SPECS = (VOCAB, HASH, DOUBLE_HASH, LEARNED, BINS)
