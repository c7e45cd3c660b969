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
        from pipeline.ingest.learned_collision import probe, shared_rows

        return before or shared_rows(feature, counts.table(), day.once(probe)[feature.name])

    def require_compatible(
        self, feature: MappedFeature, then: Mapping[str, Any], path: str, config: Mapping[str, Any]
    ) -> None:
        """As for every mapping; the setting ``rows`` must be the same too, because the sharing is decided once."""
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
