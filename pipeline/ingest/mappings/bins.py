"""The mapping of features with ``bins``: numbers are cut into bins of the train rows, one row for each bin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError
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
        """Bounds of bins, as ``data.sparse.<name>.bins_by`` says; decided once."""
        from pipeline.ingest.binning import bin_bounds

        bounds = bin_bounds(counts.sketch, feature.bins_by, feature.rows - RESERVED_ROWS)
        return before or FittedMapping(rows=feature.rows, bounds=bounds)

    def require_compatible(
        self, feature: MappedFeature, then: Mapping[str, Any], path: str, config: Mapping[str, Any]
    ) -> None:
        """Besides the rows, the way of cutting must be the same."""
        from pipeline.config import PERCENTILE

        super().require_compatible(feature, then, path, config)
        if (before := then.get("bins_by", PERCENTILE)) != feature.bins_by:
            raise ConfigError(
                f"data.sparse.{feature.name}.bins_by is {feature.bins_by}, but {path}, whose mapping continues, has "
                f"{before}: every number would get another row",
                hint=f"data.sparse.{feature.name}.bins_by={before}, or data.mapping_from=null for new mappings",
            )

    def apply(self, fitted: FittedMapping, hashes: pl.Series) -> tuple[pl.Series, ...]:
        """The bin of the number behind each hash."""
        import numpy as np
        import polars as pl

        from pipeline.ingest.ids import of_bits
        from pipeline.ingest.sketch import bin_of

        assert fitted.bounds is not None
        return (pl.Series((bin_of(of_bits(hashes), fitted.bounds) + RESERVED_ROWS).astype(np.int32)),)


BINS = _Bins(name=NAME, doc="One row for each bin of a number.", numbers=True, shareable=False)
