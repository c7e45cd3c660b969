"""Stage ingest: raw click logs become a dataset with its schema and profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.config import Config
from pipeline.core import units
from pipeline.records.dataset import dataset_path
from pipeline.records.result import IngestPart, Result
from pipeline.records.runs import Step
from pipeline.specs.id_mapping import ID_MAPPINGS
from pipeline.specs.stage import Stage, StageIO, use
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact


def _logs(config: Config) -> bool:
    return config.data.format != "tables"


def _tables(config: Config) -> bool:
    return config.data.format == "tables"


def _synthetic(config: Config) -> bool:
    return config.data.format == "synthetic"


def _seeded(config: Config) -> bool:
    # Whether the dataset depends on the seed: synthetic logs, or a mapping whose fit is random.
    data = config.data
    if _synthetic(config):
        return True
    if not _logs(config):
        return False
    for feature in data.sparse.values():
        if ID_MAPPINGS.get(feature.mapping or data.sparse_defaults.mapping).seeded:
            return True
    return False


class Ingest(Stage):
    """The stage. Its key covers what decides whether a dataset is made (checks, watermark, quarantine) and its content.

    A dataset that was accepted once under other settings is not accepted under the defaults.
    """

    name = "ingest"
    help = "turn raw logs into a dataset"
    inline = True
    shared = True
    settings = (
        use("", "seed", when=_seeded),
        use("data", "path options snapshot", when=_logs, named=True),
        use("data", "name format"),
        use("data", "tables.*.rows tables.*.pooling tables.*.zipf tables.*.hot_rows", when=_tables),
        use("data", "tables.*.hot_share tables.*.weighted dense_features", when=_tables),
        use("data.table_defaults", "pooling zipf", when=_tables),
        use("data", "separator quote header columns strip missing timestamp day_column hour_column", when=_logs),
        use("data", "day late late_days mapping_from max_quarantine_share dense_transform", when=_logs),
        use("data.label", "column positive negative window_days", when=_logs),
        use("data.label", "late_path", named=True),
        use("data.dedupe", "key days", when=lambda config: _logs(config) and config.data.dedupe.key is not None),
        use("data.tasks", "*.column *.kind *.positive *.negative *.given"),
        use("data", "weight time_zone time_format messages decimal", when=_logs),
        use(
            "data.sampling",
            "negatives column rate correct",
            when=lambda config: _logs(config) and config.data.sampling.active,
        ),
        use("data.watermark", "success min_rows max_age_hours partitions min_partitions later_rows", when=_logs),
        use("data.checks", "leak leak_auc", when=_logs),
        use("data.checks.warn", "label_rate missing_share distinct psi", when=_logs),
        use("data.checks.hold", "label_rate missing_share distinct psi", when=_logs),
        use("data.dense", "*.column *.transform *.clip *.bins *.min *.max *.required", when=_logs),
        use("data.dense", "*.width *.separator", when=_logs),
        use("data.sparse", "*.holds *.weights", when=_logs),
        use("data.sparse", "*.column *.rows *.min_count *.evict_after_days *.separator", when=_logs),
        use("data.sparse", "*.weight_separator *.cross *.bins *.max_ids *.integer *.required", when=_logs),
        use("data.sparse", "*.cross_bins *.bins_by", when=_logs),
        use("data.sparse", "*.mapping *.when_full *.table", when=_logs),
        use("data", "leave_out", when=_logs),
        use("data.sequences", "*.max_length *.time *.age_bins *.leaks *.separator", when=_logs),
        use("data.sequences", "*.features.*.column *.features.*.table *.features.*.rows", when=_logs),
        use("data.sequences", "*.features.*.min_count", when=_logs),
        use("data.sequences", "*.history.by *.history.days *.history.where *.history.lag_minutes", when=_logs),
        use("data.sparse_defaults", "mapping rows min_count when_full evict_after_days", when=_logs),
        use("data.sparse_defaults", "separator weight_separator", when=_logs),
        use("data.split", "by test_share test_days test_hours validation_share validation_hours gap_hours", when=_logs),
        use("data.synthetic", "rows days ids_per_feature zipf base_rate dense_effect", when=_synthetic),
        use("data.synthetic", "first_order_effect pairwise_effect pairs latent_dim drift", when=_synthetic),
        use("data.synthetic", "blocks first_day new_ids popularity_drift id_groups hourly", when=_synthetic),
        use("data.synthetic", "quads quad_effect conversion_rate conversion_missing", when=_synthetic),
        use("data.synthetic", "conversion_effect conversion_overlap", when=_synthetic),
        use("data.synthetic", "users categories interests history_effect", when=_synthetic),
        use("ingest", "rows_per_group groups_per_file compression", when=_logs),
    )

    def named_settings(self, config: Config, store: Store, made: Mapping[str, Step]) -> dict[str, Any]:
        from pipeline.ingest.delivered import told_apart
        from pipeline.ingest.sources import answering
        from pipeline.ingest.stage import raw_fingerprint

        mark = raw_fingerprint(config.data, store)
        with answering(config.data.path, store):
            return {"raw": told_apart(config.data, store, mark)}

    def require_meant(self, step: Step, config: Config, store: Store) -> None:
        """Check that the dataset was made from the intended log.

        Raises:
            LaunchError: It was made from another one that only looks like it.
        """
        from pipeline.ingest.delivered import require_same_log, warn_of_unknown_log
        from pipeline.ingest.sources import answering

        if raw := step.config.get("raw"):
            with answering(config.data.path, store):
                require_same_log(config.data, store, str(raw))
                warn_of_unknown_log(config.data, store, step.path)

    def path(self, config: Config, key: str) -> str:
        # The name keeps a dataset that is set aside out of the days that nights start from and compare with.
        name = f"{config.data.name}.aside" if config.data.aside else config.data.name
        return dataset_path(name, key, config.data.day)

    def run(self, step: Step, config: Config, store: Store, inputs: dict[str, Artifact], io: StageIO) -> Artifact:
        from pipeline.ingest.sources import answering
        from pipeline.ingest.stage import ingest

        with answering(config.data.path, store), self.draft(store, step) as draft:
            return draft.commit(ingest(config.data, config.ingest, config.seed, draft))

    def parts(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        return {"ingest": IngestPart.from_json(summary)}

    def lines(self, result: Result) -> dict[str, list[str]]:
        if result.ingest is None:
            return {}
        from pipeline.report.stage_figures import ingest_lines

        return {"ingest": ingest_lines(result.ingest)}

    def facts(self, result: Result) -> list[tuple[str, str]]:
        part = result.ingest or IngestPart()
        return [("Raw bytes read", units.size(part.bytes_in)), ("Ingestion, rows/s", units.count(part.rows_per_s))]


SPEC = Ingest()
