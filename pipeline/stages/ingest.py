"""Stage ingest: raw click logs become a dataset with its schema and profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline import units
from pipeline.config import Config
from pipeline.records.dataset import SequenceProfile, dataset_path
from pipeline.records.result import IngestPart, Result
from pipeline.records.runs import Step
from pipeline.specs.id_mapping import ID_MAPPINGS
from pipeline.specs.stage import Stage, StageIO, use
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

MOST_WARNINGS = 5  # in the table at the end of a run


def _logs(config: Config) -> bool:
    return config.data.format != "tables"


def _tables(config: Config) -> bool:
    return config.data.format == "tables"


def _synthetic(config: Config) -> bool:
    return config.data.format == "synthetic"


def _sampled(config: Config) -> bool:
    return _logs(config) and config.data.sampling.active


def _deduped(config: Config) -> bool:
    return _logs(config) and config.data.dedupe.key is not None


def _seeded(config: Config) -> bool:
    """Whether the dataset depends on the seed: synthetic logs, or a mapping whose fit is random."""
    data = config.data
    chosen = {feature.mapping or data.sparse_defaults.mapping for feature in data.sparse.values()}
    return _synthetic(config) or (_logs(config) and any(ID_MAPPINGS.get(name).seeded for name in chosen))


class Ingest(Stage):
    """Its key covers what decides whether a dataset is made (checks, watermark, quarantine) like what is in it.

    A dataset that was let through once is not let through by the defaults.
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
        use("data.dedupe", "key days", when=_deduped),
        use("data.tasks", "*.column *.kind *.positive *.negative *.given"),
        use("data", "weight time_zone time_format messages decimal", when=_logs),
        use("data.sampling", "negatives column rate correct", when=_sampled),
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
        """The fingerprint of the raw logs; DataError where there are none."""
        from pipeline.ingest.delivered import told_apart
        from pipeline.ingest.sources import answering
        from pipeline.ingest.stage import raw_fingerprint

        mark = raw_fingerprint(config.data, store)
        with answering(config.data.path, store):
            return {"raw": told_apart(config.data, store, mark)}

    def require_meant(self, step: Step, config: Config, store: Store) -> None:
        """LaunchError where the dataset was made of a log that only looks like the one that is meant."""
        from pipeline.ingest.delivered import require_same_log
        from pipeline.ingest.sources import answering

        if raw := step.config.get("raw"):
            with answering(config.data.path, store):
                require_same_log(config.data, store, str(raw))

    def path(self, config: Config, key: str) -> str:
        """``datasets/<data>/[<day>/]<key>``."""
        return dataset_path(config.data.name, key, config.data.day)

    def run(self, step: Step, config: Config, store: Store, inputs: dict[str, Artifact], io: StageIO) -> Artifact:
        """The dataset: Parquet files, schema, profile, id mappings, transforms."""
        from pipeline.ingest.sources import answering
        from pipeline.ingest.stage import ingest

        with answering(config.data.path, store), self.draft(store, step) as draft:
            return draft.commit(ingest(config.data, config.ingest, config.seed, draft))

    def parts(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Rows, bytes and warnings."""
        return {"ingest": IngestPart.from_json(summary)}

    def lines(self, result: Result) -> dict[str, list[str]]:
        """Rows, the rate, and what is worth a warning."""
        from pipeline.report.summary import short_path

        part = result.ingest
        if part is None:
            return {}
        kinds = dict(part.reasons or {})  # the most frequent ones
        if (others := (part.rows_quarantined or 0) - sum(kinds.values())) > 0 and kinds:
            kinds["others"] = others
        reasons = ", ".join(f"{kind} ({units.count(count)})" for kind, count in kinds.items())
        warnings = part.warnings or ()
        days = {**(part.rows_relabelled or {}), **(part.rows_corrected or {})}
        corrected = ", ".join(f"{units.count(count)} of {day}" for day, count in days.items())
        lines = [
            f"{units.count(part.rows)} rows, {units.count(part.rows_quarantined)} of them in quarantine",
            f"{units.size(part.bytes_in)} read, {units.count(part.rows_per_s)} rows/s",
            f"of {part.snapshot}" if part.snapshot else "",
            _by_time(part),
            f"quarantined: {reasons}" if reasons else "",
            f"{units.count(part.rows_left_out)} rows without a click left out of training"
            if part.rows_left_out
            else "",
            f"{units.count(part.rows_repeated)} repeated rows dropped" if part.rows_repeated else "",
            *(_sequence(name, each) for name, each in (part.sequences or {}).items()),
            f"labels corrected by later clicks: {corrected}" if corrected else "",
            f"labels are final with the clicks of {part.labels_final}" if part.labels_young else "",
            f"replaces {short_path(part.replaces, 16)}" if part.replaces else "",
            *(f"warning: {line}" for line in warnings[:MOST_WARNINGS]),
            f"and {len(warnings) - MOST_WARNINGS} more warnings" if len(warnings) > MOST_WARNINGS else "",
        ]
        return {"ingest": [line for line in lines if line]}

    def facts(self, result: Result) -> list[tuple[str, str]]:
        """Bytes read, and the rate."""
        part = result.ingest or IngestPart()
        return [("Raw bytes read", units.size(part.bytes_in)), ("Ingestion, rows/s", units.count(part.rows_per_s))]


def _by_time(part: IngestPart) -> str:
    """Where a split by time cuts the log."""
    if part.split_time is None:
        return ""
    until, since = part.split_time["train_until"], part.split_time["test_from"]
    between = f"{units.count(part.rows_gap)} rows in between"
    gap = "" if until == since else f", trained on rows before {until} UTC ({between})"
    return f"tested on rows from {since} UTC on{gap}"


def _sequence(name: str, profile: SequenceProfile) -> str:
    left = f", {units.count(profile.left_out)} left out that are not before their row" if profile.left_out else ""
    lengths = f"mean {profile.mean:.1f}, 99th percentile {profile.p99}, longest {profile.longest}"
    return f"events of {name}: {lengths}; {profile.empty_share:.1%} of the train rows have none{left}"


SPEC = Ingest()
