"""The mapping of features with ``bins``: numbers are cut at quantiles of the train rows, one row for each bin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.records import RESERVED_ROWS
from pipeline.specs.id_mapping import BINS as NAME
from pipeline.specs.id_mapping import FittedMapping, FittingDay, IdMapping, MappedFeature

if TYPE_CHECKING:
    import polars as pl

    from pipeline.ingest.counts import BinCounts


class _Bins(IdMapping):
    def counts(self, feature: MappedFeature, vocabularies: int) -> BinCounts:
        """A quantile sketch: at most 65,536 buckets."""
        from pipeline.ingest.counts import BinCounts

        return BinCounts()

    def fit(
        self, feature: MappedFeature, counts: BinCounts, before: FittedMapping | None, day: FittingDay
    ) -> FittedMapping:
        """Bounds of bins that hold equally many train rows; decided once."""
        return before or FittedMapping(rows=feature.rows, bounds=counts.sketch.bounds(feature.rows - RESERVED_ROWS))

    def apply(self, fitted: FittedMapping, hashes: pl.Series) -> tuple[pl.Series, ...]:
        """The bin of the number behind each hash."""
        import numpy as np
        import polars as pl

        from pipeline.ingest.ids import of_bits
        from pipeline.ingest.sketch import bin_of

        assert fitted.bounds is not None
        return (pl.Series((bin_of(of_bits(hashes), fitted.bounds) + RESERVED_ROWS).astype(np.int32)),)


BINS = _Bins(name=NAME, doc="One row for each bin of a number.", numbers=True, shareable=False)
