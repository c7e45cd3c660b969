"""Mapping ``learned``: rare ids share rows with ids that behave alike (Learning to Collide, arXiv 2203.15837)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError
from pipeline.ingest.mappings.vocab import VocabMapping
from pipeline.specs.id_mapping import FittedMapping, FittingDay, MappedFeature

if TYPE_CHECKING:
    from pipeline.ingest.vocab_counts import VocabCounts


class _Learned(VocabMapping):
    def fit(
        self, feature: MappedFeature, counts: VocabCounts, before: FittedMapping | None, day: FittingDay
    ) -> FittedMapping:
        """Decided once: later days keep who shares a row with whom."""
        from pipeline.ingest.sharing import probe, shared_rows

        return before or shared_rows(feature, counts.table(), day.once(probe))

    def require_compatible(
        self, feature: MappedFeature, then: Mapping[str, Any], path: str, config: Mapping[str, Any]
    ) -> None:
        """As of every mapping; also the setting ``rows`` must be the same, for the sharing is never made anew."""
        super().require_compatible(feature, then, path, config)
        former = config["data"]["sparse"].get(feature.name)
        rows = feature.rows if former is None else former["rows"] or config["data"]["sparse_defaults"]["rows"]
        if rows != feature.rows:
            raise ConfigError(
                f"data.sparse.{feature.name}.rows is {feature.rows:,}, but {path}, whose mapping learned is to be "
                f"carried on, was made with {rows:,}: who shares a row stays as it is",
                hint=f"data.sparse.{feature.name}.rows={rows}, or data.mapping_from=null for new mappings",
            )


LEARNED = _Learned(
    name="learned",
    doc="rare ids share rows with ids that behave alike.",
    vocabulary=True,
    seeded=True,
)
