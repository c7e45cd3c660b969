"""Which setting belongs to which key: one line for every field of the configuration.

A key covers the settings that can change what comes out under it, or whether it comes out at all. A field that is in
no line, or in a line that does not fit, fails ``tests/launch/test_keys.py``: whoever adds a setting decides here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from pipeline.config import Config
from pipeline.config.renamed import with_first_names
from pipeline.specs import ID_MAPPINGS

INGEST, PLAN, PARTITION, TRAIN = "ingest", "plan", "partition", "train"
EVALUATE, PUBLISH = "evaluate", "publish"
# What a training goes on by: its checkpoints. The finished training's key covers these settings too, and those that
# say where it ends and how its last checkpoint is written.
CHECKPOINTS = "checkpoints"
KEYS = (INGEST, PLAN, PARTITION, CHECKPOINTS, TRAIN, EVALUATE, PUBLISH)
# Bits of a last checkpoint whose hottest rows are kept in 8 bits (``checkpoint.hot_share``).
FEW_BITS = ("auto", "2", "3", "4")


def _always(config: Config) -> bool:
    return True


def _logs(config: Config) -> bool:
    return config.data.format != "tables"


def _tables(config: Config) -> bool:
    return config.data.format == "tables"


def _synthetic(config: Config) -> bool:
    return config.data.format == "synthetic"


def _seeded(config: Config) -> bool:
    """Whether the dataset depends on the seed: synthetic logs, or a mapping whose fit is random."""
    data = config.data
    chosen = {feature.mapping or data.sparse_defaults.mapping for feature in data.sparse.values()}
    return _synthetic(config) or (_logs(config) and any(ID_MAPPINGS.get(name).seeded for name in chosen))


def _towers(config: Config) -> bool:
    return config.partition.name != "flat"


def _compared(config: Config) -> bool:
    """Whether towers are made by what their features are like."""
    return _towers(config) and config.partition.strategy != "strided"


def _probed(config: Config) -> bool:
    """Whether a model is trained to compare features."""
    return _compared(config) and config.partition.probe is None


def _scheduled(config: Config) -> bool:
    return config.train.schedule != "constant"


def _warm(config: Config) -> bool:
    return config.checkpoint.init_from is not None


def _few_bits(config: Config) -> bool:
    return config.checkpoint.final_quantise in FEW_BITS


def _auto_bits(config: Config) -> bool:
    return config.checkpoint.final_quantise == "auto"


@dataclass(frozen=True)
class Use:
    """Settings ``names`` of ``group`` belong to ``keys`` where ``when`` holds; to none where ``keys`` is empty.

    ``names``: dotted paths below the group, ``*`` for every entry of a dictionary or setting of a model. ``named``: not
    the value counts but what it names (a file, a checkpoint, a default), which ``steps.py`` puts into the key.
    """

    group: str
    names: tuple[str, ...]
    keys: tuple[str, ...] = ()
    when: Callable[[Config], bool] = _always
    named: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        """The settings' dotted paths."""
        return tuple(f"{self.group}.{name}" if self.group else name for name in self.names)

    def holds(self, path: str) -> bool:
        """Whether the setting at ``path`` is one of these."""
        return any(fnmatchcase(path, pattern) for pattern in self.paths)


def _use(group: str, names: str, *keys: str, when: Callable[[Config], bool] = _always, named: bool = False) -> Use:
    return Use(group, tuple(names.split()), keys, when, named)


SETTINGS: tuple[Use, ...] = (
    # Where a run lies and how much of it is done.
    _use("", "run store stages force"),
    _use("", "seed", INGEST, when=_seeded),
    _use("", "seed", PARTITION, when=_compared),
    _use("", "seed", CHECKPOINTS),
    # The dataset. What decides whether it is made (checks, watermark, quarantine) counts like what is in it: a dataset
    # that was let through once is not let through by the defaults.
    _use("data", "path", INGEST, when=_logs, named=True),
    _use("data", "name format", INGEST),
    _use("data", "tables.*.rows tables.*.pooling tables.*.zipf tables.*.hot_rows", INGEST, when=_tables),
    _use("data", "tables.*.hot_share tables.*.weighted dense_features", INGEST, when=_tables),
    _use("data.table_defaults", "pooling zipf", INGEST, when=_tables),
    _use("data", "separator quote header columns strip missing timestamp day_column", INGEST, when=_logs),
    _use("data", "day late late_days mapping_from max_quarantine_share dense_transform", INGEST, when=_logs),
    _use("data.label", "column positive negative", INGEST, when=_logs),
    _use("data.watermark", "success min_rows max_age_hours partitions min_partitions", INGEST, when=_logs),
    _use("data.checks", "leak leak_auc", INGEST, when=_logs),
    _use("data.checks.warn", "label_rate missing_share distinct psi", INGEST, when=_logs),
    _use("data.checks.hold", "label_rate missing_share distinct psi", INGEST, when=_logs),
    _use("data.dense", "*.column *.transform *.clip *.bins *.min *.max *.required", INGEST, when=_logs),
    _use("data.sparse", "*.column *.rows *.min_count *.evict_after_days *.separator", INGEST, when=_logs),
    _use("data.sparse", "*.weight_separator *.cross *.bins *.max_ids *.integer *.required", INGEST, when=_logs),
    _use("data.sparse", "*.mapping *.when_full", INGEST, when=_logs),
    _use("data.sparse_defaults", "mapping rows min_count when_full evict_after_days", INGEST, when=_logs),
    _use("data.sparse_defaults", "separator weight_separator", INGEST, when=_logs),
    _use("data.split", "by test_share test_days test_hours", INGEST, when=_logs),
    _use("data.synthetic", "rows days ids_per_feature zipf base_rate dense_effect", INGEST, when=_synthetic),
    _use("data.synthetic", "first_order_effect pairwise_effect pairs latent_dim drift", INGEST, when=_synthetic),
    _use("data.synthetic", "blocks first_day new_ids popularity_drift id_groups hourly", INGEST, when=_synthetic),
    # How much is read at a time, and by whom, changes no byte.
    _use("ingest", "engine block_mib ray.address"),
    _use("ingest", "rows_per_group groups_per_file compression", INGEST, when=_logs),
    # The plan: what tables, dense part, inputs and staging take and cost.
    _use("ingest", "rows_per_group", PLAN),
    _use("plan", "sharding_types hbm_reserve ddr_reserve ssd_reserve former", PLAN),
    _use("plan", "tables.*.tier tables.*.sharding tables.*.cache_rows tables.*.avoid", PLAN),
    _use("hardware", "name device hosts ranks_per_host hbm_gib ddr_gib ssd_gib", PLAN),
    _use("hardware", "hbm_gb_per_s ddr_gb_per_s ssd_gb_per_s hbm_to_ddr_gb_per_s", PLAN),
    _use("hardware", "intra_host_gb_per_s inter_host_gb_per_s intra_host_latency_us", PLAN),
    _use("hardware", "inter_host_latency_us ssd_read_iops dense_gflop_per_s dense_gb_per_s", PLAN),
    _use("hardware", "lookup_ns update_ns table_overhead_us step_overhead_ms process_gib", PLAN),
    _use("hardware", "ssd_paths"),  # where scratch files lie
    _use("model", "*", PLAN),
    _use("train", "global_batch sparse_optimizer prefetch_batches shuffle_window_groups", PLAN),
    # The towers: what compares features, and how they are divided.
    _use("partition", "name", PARTITION, CHECKPOINTS),
    _use("partition", "towers", PARTITION, CHECKPOINTS, when=_towers, named=True),
    _use("partition", "strategy pins groups module c p dim cross_layers", PARTITION, CHECKPOINTS, when=_towers),
    _use("partition", "probe", PARTITION, when=_compared, named=True),
    _use("partition", "probe", CHECKPOINTS, when=_compared),
    _use("partition", "probe_rows imbalance", PARTITION, CHECKPOINTS, when=_compared),
    _use("partition", "probe_steps", PARTITION, CHECKPOINTS, when=_probed),
    _use("partition", "exchange", CHECKPOINTS),
    _use("model", "name embedding_dim", PARTITION, when=_compared),
    _use("model", "*", PARTITION, when=_probed),
    _use("train", "global_batch", PARTITION, when=_compared),
    _use("train", "lr sparse_lr dense_optimizer sparse_optimizer weight_decay", PARTITION, when=_probed),
    _use("train", "warmup_steps precision clip.dense_norm clip.table_value", PARTITION, when=_probed),
    # The training: what its numbers depend on, whatever the ranks, the threads and the kernels.
    _use("model", "*", CHECKPOINTS),
    _use("train", "global_batch lr sparse_lr dense_optimizer sparse_optimizer weight_decay", CHECKPOINTS),
    _use("train", "warmup_steps schedule precision shuffle shuffle_window_groups", CHECKPOINTS),
    _use("train.clip", "dense_norm table_value", CHECKPOINTS),
    _use("train", "decay_ratio min_lr_factor", CHECKPOINTS, when=_scheduled),
    _use("checkpoint", "init_from", CHECKPOINTS, when=_warm, named=True),
    _use("checkpoint", "init_tables_only rename", CHECKPOINTS, when=_warm),
    # Where it ends, and how its last checkpoint is written: a training goes on through a change of these.
    _use("train", "epochs max_steps", TRAIN),
    _use("checkpoint", "final_quantise state", TRAIN),
    _use("checkpoint", "hot_share", TRAIN, when=_few_bits),
    _use("checkpoint", "expected_restores", TRAIN, when=_auto_bits),
    # How training runs, when it stops itself, what it keeps on the way.
    _use("train", "compile pipeline threads_per_rank log_every_steps"),
    _use("train.guard", "window_steps collapse_after_steps min_logit_std max_window_ne collapse"),
    _use("checkpoint", "every_steps every_minutes policy quantise tables max_chain when_busy chunk_mib keep_last"),
    _use("checkpoint", "keep_every grace_seconds compact_after allow"),
    _use("debug", "anomaly profile_steps"),
    # Figures and versions.
    _use("evaluate", "global_batch", EVALUATE),
    _use("gate", "force max_ne min_auc max_calibration_error max_ne_increase max_psi max_ne_drift", PUBLISH),
    _use("gate", "max_label_shift min_coverage max_coverage_drop max_serving_gap slices slice_values", PUBLISH),
    _use("gate", "slice_min_clicks slice_max_ne_increase slice_max_calibration_error confidence", PUBLISH),
    _use("gate", "replicates blocks min_rows max_rows power best_of_last min_baseline_gain", PUBLISH),
    _use("publish", "model", PUBLISH, named=True),
    _use("publish", "quantise", PUBLISH),
    _use("publish", "cache_mib"),
    # How and when stages are started.
    _use("launch", "name inline attempts deadline_minutes limit_memory job context namespace queue priority_class"),
    _use("launch", "min_hosts shrink_after_minutes pending_minutes rendezvous_minutes first_step_minutes port"),
    _use("launch", "lease_seconds keep_hours"),
    _use("launch.pods", "image pull_secrets service_account launcher_account user env secret_env env_from"),
    _use("launch.pods", "node_selector tolerations"),
    _use("launch.pods.volumes", "*.claim *.path *.sub_path *.read_only"),
    _use("launch.pods.resources", "*.cpu *.memory_gib *.shm_gib *.disk_gib *.gpus"),
    _use("schedule", "name cron time_zone start_within_minutes retries deadline_hours keep suspended"),
    _use("nightly", "time_zone wait_minutes poll_seconds catch_up keep_going reuse_plan lease_seconds webhook"),
)  # fmt: skip


def covered(key: str, config: Config) -> dict[str, Any]:
    """The settings that ``key`` covers, nested, by their first names; of those that are ``named`` nothing."""
    found: dict[str, Any] = {}
    for use in uses(key, config):
        if use.named:
            continue
        for path in use.paths:
            for place, value in _values(config, path.split(".")):
                _put(found, place, value)
    return with_first_names(found)


def uses(key: str, config: Config) -> Iterator[Use]:
    """The lines of ``SETTINGS`` that hold for ``key``; a finished training's holds what its checkpoints' does."""
    wanted = {key, CHECKPOINTS} if key == TRAIN else {key}
    return (use for use in SETTINGS if wanted & set(use.keys) and use.when(config))


def keys_of(path: str) -> tuple[str, ...]:
    """The keys that setting ``path`` can belong to (``*`` for every entry of a dictionary), none for many."""
    named = {key for use in SETTINGS if use.holds(path) for key in use.keys}
    return tuple(key for key in KEYS if key in named)


def _values(node: Any, parts: list[str]) -> Iterator[tuple[list[str], Any]]:
    """The place and value of every setting that ``parts`` mean below ``node``."""
    if not parts:
        yield [], node
        return
    head, *rest = parts
    every = node.items() if isinstance(node, dict) else vars(node).items()
    for name, below in every if head == "*" else [(head, getattr(node, head))]:
        for place, value in _values(below, rest):
            yield [name, *place], value


def _put(tree: dict[str, Any], place: list[str], value: Any) -> None:
    for name in place[:-1]:
        tree = tree.setdefault(name, {})
    tree[place[-1]] = value
