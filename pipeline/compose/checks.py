"""Checks of a composed configuration's values, of one field and across fields.

Each complaint names the field, what it got, what it expected and the override that mends it. No torch here.
"""

from __future__ import annotations

import math
import re
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pipeline.compose.podchecks import check_kubernetes
from pipeline.config import AUTO, DEFAULT_STAGES, STAGES, Config, DataConfig, TrainConfig
from pipeline.errors import ConfigError
from pipeline.specs import MODELS

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"
_SHORTEST_REASON = 5  # characters
TRANSFORMS = ("log1p", "standardise", "log1p_standardise", "percentile", "max_norm", "none")
WHEN_FULL = ("replace", "keep")
MAPPINGS = ("vocab", "hash", "double_hash", "learned")
_CHOICES: dict[str, tuple[str, ...]] = {
    "data.format": ("criteo", "csv", "parquet", "synthetic", "tables"),
    "data.dense_transform": TRANSFORMS,
    "data.sparse_defaults.mapping": MAPPINGS,
    "data.sparse_defaults.when_full": WHEN_FULL,
    "data.checks.leak": ("hold", "warn", "off"),
    "data.late": ("quarantine", "own_day"),
    "data.split.by": ("hash", "day", "hours"),
    "hardware.device": ("cpu", "cuda"),
    "partition.name": ("flat", "dmt"),
    "partition.strategy": ("strided", "coherent", "diverse"),
    "partition.module": ("pass_through", "dlrm", "dcn"),
    "partition.exchange": ("fp32", "fp16", "bf16", "int8"),
    "train.dense_optimizer": ("adam", "adagrad"),
    "train.sparse_optimizer": ("rowwise_adagrad", "sgd"),
    "train.schedule": ("constant", "linear", "cosine"),
    "train.precision": ("auto", "bf16", "fp32"),
    "train.pipeline": ("sparse_dist", "base"),
    "checkpoint.policy": ("intermittent", "one_shot", "consecutive", "full"),
    "checkpoint.quantise": ("auto", "2", "3", "4", "8", "fp16", "fp32"),
    "checkpoint.final_quantise": ("auto", "2", "3", "4", "8", "fp16", "fp32"),
    "checkpoint.state": ("fp32", "bf16"),
    "checkpoint.when_busy": ("wait", "skip"),
    "publish.quantise": ("8", "4", "fp16", "fp32"),
    "ingest.engine": ("local", "ray"),
    "ingest.compression": ("zstd", "lz4", "snappy"),
    "launch.name": ("local", "kubernetes"),
    "launch.job": ("volcano", "indexed"),
    "launch.hold_memory": ("auto", "always", "never"),
}
# Figures of hardware that may be 0; where a device needs more than that, planning says so.
_COSTS = (
    "hbm_gb_per_s", "ddr_gb_per_s", "ssd_gb_per_s", "hbm_to_ddr_gb_per_s", "intra_host_gb_per_s", "inter_host_gb_per_s",
    "ssd_read_iops", "intra_host_latency_us", "inter_host_latency_us", "dense_gflop_per_s", "dense_gb_per_s",
    "lookup_ns", "update_ns", "table_overhead_us", "step_overhead_ms",
)  # fmt: skip
_GATE_LIMITS = (
    "ne", "calibration_error", "ne_increase", "psi", "ne_drift", "label_shift", "coverage_drop",
    "serving_gap",
)  # fmt: skip
# (field, lowest, highest): closed ranges; None is an open end.
_RANGES: tuple[tuple[str, float | None, float | None], ...] = (
    ("seed", 0, 2**63 - 1),
    ("data.split.test_share", 0.0, 0.9),
    ("data.split.test_days", 1, None),
    ("data.split.test_hours", 1, 23),
    ("data.sparse_defaults.rows", 3, 2**31 - 1),
    ("data.sparse_defaults.min_count", 1, None),
    ("data.synthetic.rows", 1, None),
    ("data.synthetic.days", 1, None),
    ("data.synthetic.ids_per_feature", 2, None),
    ("data.synthetic.base_rate", 0.001, 0.999),
    ("data.synthetic.zipf", 0.0, None),
    ("data.synthetic.dense_effect", 0.0, None),
    ("data.synthetic.first_order_effect", 0.0, None),
    ("data.synthetic.pairwise_effect", 0.0, None),
    ("data.synthetic.pairs", 0, 325),
    ("data.synthetic.latent_dim", 1, 1024),
    ("data.synthetic.drift", 0.0, None),
    ("data.synthetic.blocks", 0, 13),
    ("data.synthetic.new_ids", 0.0, 1.0),
    ("data.synthetic.id_groups", 0, None),
    ("data.synthetic.popularity_drift", 0.0, 1.0),
    ("data.watermark.min_rows", 1, None),
    ("data.watermark.min_partitions", 1, None),
    ("data.watermark.max_age_hours", 0.0, None),
    ("data.late_days", 1, 366),
    ("data.max_quarantine_share", 0.0, 1.0),
    ("data.checks.leak_auc", 0.5, 1.0),
    *(
        (f"data.checks.{kind}.{name}", 0.0, None)
        for kind in ("warn", "hold")
        for name in ("label_rate", "missing_share", "distinct", "psi")
    ),
    ("data.sparse_defaults.evict_after_days", 1, None),
    ("data.table_defaults.pooling", 0.0, None),
    ("data.table_defaults.zipf", 0.0, 10.0),
    ("data.dense_features", 0, None),
    ("ingest.block_mib", 1, 4096),
    ("ingest.rows_per_group", 1, None),
    ("ingest.groups_per_file", 1, None),
    ("model.embedding_dim", 4, 4096),
    ("hardware.hosts", 1, None),
    ("hardware.ranks_per_host", 1, None),
    ("hardware.hbm_gib", 0.0, None),
    ("hardware.ddr_gib", 0.0, None),
    ("hardware.ssd_gib", 0.0, None),
    ("hardware.process_gib", 0.0, None),
    *((f"hardware.{name}", 0.0, None) for name in _COSTS),
    ("plan.hbm_reserve", 0.0, 0.95),
    ("plan.ddr_reserve", 0.0, 0.95),
    ("plan.ssd_reserve", 0.0, 0.95),
    ("checkpoint.hot_share", 0.0, 1.0),
    ("partition.towers", 0, None),
    ("partition.imbalance", 0.0, 10.0),
    ("partition.probe_steps", 1, None),
    ("partition.probe_rows", 3, None),
    ("partition.c", 0, 64),
    ("partition.p", 0, 64),
    ("partition.dim", 0, 4096),
    ("partition.cross_layers", 1, 16),
    ("train.global_batch", 1, None),
    ("train.epochs", 1, None),
    ("train.lr", 0.0, None),
    ("train.sparse_lr", 0.0, None),
    ("train.weight_decay", 0.0, None),
    ("train.clip.dense_norm", 1e-12, None),
    ("train.clip.table_value", 1e-12, None),
    ("train.warmup_steps", 0, None),
    ("train.decay_share", 0.01, 1.0),
    ("train.min_lr_share", 0.0, 1.0),
    ("train.max_steps", 1, None),
    ("train.threads_per_rank", 1, None),
    ("train.guard.window_steps", 1, None),
    ("train.guard.collapse_after_steps", 0, None),
    ("train.guard.min_logit_std", 0.0, None),
    ("train.guard.max_window_ne", 0.0, None),
    ("debug.profile_steps", 0, None),
    ("train.shuffle_window_groups", 1, None),
    ("train.prefetch_batches", 1, None),
    ("train.log_every_steps", 1, None),
    ("checkpoint.every_steps", 1, None),
    ("checkpoint.every_minutes", 0.001, None),
    ("checkpoint.expected_restores", 0, None),
    ("checkpoint.max_chain", 1, None),
    ("checkpoint.chunk_mib", 0.001, 1024),
    ("checkpoint.keep_last", 1, None),
    ("checkpoint.keep_every", 1, None),
    ("checkpoint.grace_seconds", 1, None),
    ("checkpoint.compact_after", 1, None),
    ("evaluate.global_batch", 1, None),
    *((f"gate.max_{name}", 0.0, None) for name in _GATE_LIMITS),
    ("gate.slice_max_ne_increase", 0.0, None),
    ("gate.slice_max_calibration_error", 0.0, None),
    ("gate.min_auc", 0.0, 1.0),
    ("gate.min_coverage", 0.0, 1.0),
    ("gate.min_baseline_gain", 0.0, None),
    ("gate.slice_values", 1, 1000),
    ("gate.slice_min_clicks", 1, None),
    ("gate.confidence", 0.5, 0.9999),
    ("gate.power", 0.5, 0.9999),
    ("gate.best_of_last", 1, 1000),
    ("gate.replicates", 20, 10_000),
    ("gate.blocks", 10, 100_000),
    ("gate.min_rows", 1, None),
    ("gate.max_rows", 1, None),
    ("publish.cache_mib", 0.0, None),
    ("launch.attempts", 1, 100),
    ("launch.deadline_minutes", 0.01, None),
    ("launch.min_hosts", 1, None),
    ("launch.shrink_after_minutes", 0.01, None),
    ("launch.pending_minutes", 0.01, None),
    ("launch.rendezvous_minutes", 0.01, None),
    ("launch.first_step_minutes", 0.01, None),
    ("launch.port", 1024, 65_535),
    ("launch.lease_seconds", 3, 3600),
    ("launch.keep_hours", 0, None),
    ("launch.pods.user", 1, 2**31 - 1),
    ("schedule.start_within_minutes", 1, None),
    ("schedule.retries", 0, 20),
    ("schedule.deadline_hours", 0.01, None),
    ("schedule.keep", 0, None),
    ("nightly.wait_minutes", 0.0, None),
    ("nightly.poll_seconds", 0.01, None),
    ("nightly.catch_up", 0, 366),
    ("nightly.lease_seconds", 0.1, 3600.0),
)
# Numbers of _RANGES that may be left to the rows there are.
_AUTOMATIC = ("train.global_batch", "train.warmup_steps")

# A table is a submodule of its collection by the feature's name: names that modules have already cannot be tables.
TAKEN_NAMES = frozenset(
    (
        "T_destination", "add_module", "apply", "bfloat16", "buffers", "call_super_init", "children", "clear",
        "compile", "cpu", "cuda", "double", "dump_patches", "eval", "extra_repr", "float", "forward", "get_buffer",
        "get_extra_state", "get_parameter", "get_submodule", "half", "ipu", "items", "keys", "load_state_dict",
        "modules", "mtia", "named_buffers", "named_children", "named_modules", "named_parameters", "parameters", "pop",
        "register_backward_hook", "register_buffer", "register_forward_hook", "register_forward_pre_hook",
        "register_full_backward_hook", "register_full_backward_pre_hook", "register_load_state_dict_post_hook",
        "register_load_state_dict_pre_hook", "register_module", "register_parameter", "register_state_dict_post_hook",
        "register_state_dict_pre_hook", "requires_grad_", "set_extra_state", "set_submodule", "share_memory",
        "state_dict", "to", "to_empty", "train", "training", "type", "update", "values", "xpu", "zero_grad"
    )
)  # fmt: skip


def lookup(config: Config, path: str) -> object:
    """The value at a dotted ``path`` such as ``train.lr``."""
    node: object = config
    for part in path.split("."):
        node = node[part] if isinstance(node, dict) else getattr(node, part)
    return node


def check(config: Config) -> None:
    """Check values and combinations; raises ConfigError naming the field and the override that mends it."""
    for path, choices in _CHOICES.items():
        got = lookup(config, path)
        if got not in choices:
            raise ConfigError(f"{path} is {got!r}, expected one of: {', '.join(choices)}", hint=f"{path}={choices[0]}")
    for path, low, high in _RANGES:
        value = lookup(config, path)
        if path in _AUTOMATIC and isinstance(value, str):
            _check_automatic(path, value)
        elif value is not None:
            _check_range(path, float(value), low, high)  # type: ignore[arg-type]
    _check_stages(config)
    _check_data(config.data)
    _check_model(config)
    _check_schedule(config.train)
    _check_checkpoint(config)
    _check_publish(config)
    _check_nightly(config)
    if config.launch.name == "kubernetes":
        check_kubernetes(config)


def _check_automatic(path: str, value: str) -> None:
    if value != AUTO:
        raise ConfigError(f"{path} is {value!r}, expected {AUTO} or a whole number", hint=f"{path}={AUTO}")


def _check_range(path: str, value: float, low: float | None, high: float | None) -> None:
    if not math.isfinite(value):
        raise ConfigError(f"{path} is {value}, expected a finite number", hint=f"{path}={low or 0:g}")
    if (low is not None and value < low) or (high is not None and value > high):
        span = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
        bound = low if low is not None and value < low else high
        raise ConfigError(f"{path} is {value:g}, expected {span}", hint=f"{path}={bound:g}")


def _check_stages(config: Config) -> None:
    if not config.stages:
        raise ConfigError("stages is empty: nothing would run", hint=f"stages=[{','.join(DEFAULT_STAGES)}]")
    if not config.store.strip():
        raise ConfigError("store is empty, expected a folder or an fsspec URL", hint="store=./store")
    split = config.data.split
    if "evaluate" in config.stages and split.by == "hash" and split.test_share == 0:
        raise ConfigError(
            "data.split.test_share is 0, but stages names evaluate, which needs held-out rows",
            hint="data.split.test_share=0.2, or stages=[ingest,plan,partition,train]",
        )
    for path, names in (("stages", config.stages), ("launch.inline", config.launch.inline)):
        for name in names:
            if name not in STAGES:
                raise ConfigError(
                    f"{path} names {name!r}, expected some of: {', '.join(STAGES)}",
                    hint=f"{path}=[{','.join(STAGES[:2])}]",
                )
    if config.world_size > 1:
        for name in ("train", "evaluate"):
            if name in config.launch.inline:
                raise ConfigError(
                    f"launch.inline names {name!r}, but {config.world_size} ranks need processes of their own",
                    hint="launch.inline=[ingest,plan,partition]",
                )


def _check_publish(config: Config) -> None:
    name = config.publish.model
    if name is not None and not re.fullmatch(_NAME, name):
        raise ConfigError(
            f"publish.model is {name!r}, expected at most 100 letters, digits, '_', '.' and '-'",
            hint=f"publish.model={re.sub(r'[^A-Za-z0-9_-]+', '-', name).strip('-')[:100] or 'clicks'}",
        )
    for name in config.gate.slices:
        if name not in config.data.sparse and name != "day":
            raise ConfigError(
                f"gate.slices names {name!r}, expected sparse features or day",
                hint=f"gate.slices=[{next(iter(config.data.sparse), 'day')}]",
            )
    if config.gate.force is not None and len(config.gate.force.strip()) < _SHORTEST_REASON:
        raise ConfigError(
            f"gate.force is {config.gate.force!r}, expected the reason for publishing in spite of the gate, in words",
            hint="gate.force='the traffic of the new app is known to be different'",
        )


def _check_nightly(config: Config) -> None:
    nightly = config.nightly
    if nightly.webhook is not None and not re.match(r"https?://[^/\s]", nightly.webhook):
        raise ConfigError(
            "nightly.webhook is no http or https URL: nothing could be delivered",
            hint="nightly.webhook=https://<host>/<path>",
        )
    for path, zone in (("nightly.timezone", nightly.timezone), ("schedule.time_zone", config.schedule.time_zone)):
        try:
            if zone not in (None, "Etc/UTC"):  # the default works where no zones are installed, for what needs none
                ZoneInfo(zone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ConfigError(
                f"{path} is {zone!r}, expected the name of a time zone", hint=f"{path}=Europe/Berlin"
            ) from None


def _check_checkpoint(config: Config) -> None:
    for name in ("init_tables_only", "allow", "rename"):
        if config.checkpoint.init_from is None and getattr(config.checkpoint, name):
            message = f"checkpoint.{name} is set, but nothing to start from: checkpoint.init_from is null"
            raise ConfigError(message, hint="checkpoint.init_from=<run>")
    choices = _CHOICES["checkpoint.quantise"]
    for table, coding in config.checkpoint.tables.items():
        if table not in config.data.sparse:
            near = ", ".join(list(config.data.sparse)[:5])
            raise ConfigError(
                f"checkpoint.tables names {table!r}, expected a table of data.sparse: {near}, ...",
                hint=f"~checkpoint.tables.{table}",
            )
        if coding not in choices:
            raise ConfigError(
                f"checkpoint.tables.{table} is {coding!r}, expected one of: {', '.join(choices)}",
                hint=f"checkpoint.tables.{table}={choices[0]}",
            )
    for path in config.checkpoint.allow:
        try:
            if path != "dataset":
                lookup(config, path)
        except (AttributeError, KeyError, TypeError):
            raise ConfigError(
                f"checkpoint.allow names {path!r}, expected settings such as train.lr, or dataset",
                hint="checkpoint.allow=[train.lr]",
            ) from None


def _check_data(data: DataConfig) -> None:
    if not re.fullmatch(_NAME, data.name):
        raise ConfigError(
            f"data.name is {data.name!r}, expected at most 100 letters, digits, '_', '.' and '-'",
            hint=f"data.name={re.sub(r'[^A-Za-z0-9_-]+', '-', data.name).strip('-')[:100] or 'clicks'}",
        )
    if data.format == "tables":
        return
    if data.format != "synthetic" and not data.path:
        raise ConfigError("data.path is not set: no click logs to read", hint="data.path=<file, directory or glob>")
    if not data.sparse:
        raise ConfigError(
            "data.sparse is empty: at least one categorical feature is needed", hint="'+data.sparse.<column>={}'"
        )
    shared = set(data.dense) & set(data.sparse)
    if shared:
        raise ConfigError(
            f"feature {sorted(shared)[0]!r} is in data.dense and in data.sparse, expected one of them",
            hint=f"~data.dense.{sorted(shared)[0]}",
        )
    _check_dense(data)
    _check_sparse(data)
    _check_days(data)


def _check_dense(data: DataConfig) -> None:
    for name, dense in data.dense.items():
        if dense.transform not in (*TRANSFORMS, None):
            raise ConfigError(
                f"data.dense.{name}.transform is {dense.transform!r}, expected one of: {', '.join(TRANSFORMS)}",
                hint=f"data.dense.{name}.transform=log1p",
            )
        _check_range(f"data.dense.{name}.bins", dense.bins, 2, 10_000)
        if dense.clip and (len(dense.clip) != 2 or not dense.clip[0] < dense.clip[1]):
            raise ConfigError(
                f"data.dense.{name}.clip is {dense.clip}, expected two numbers that rise",
                hint=f"data.dense.{name}.clip=[0,1000]",
            )


def _check_sparse(data: DataConfig) -> None:
    for name, sparse in data.sparse.items():
        if name in TAKEN_NAMES or "." in name:
            other = name.replace(".", "_") + ("_id" if name in TAKEN_NAMES else "")
            raise ConfigError(
                f"a feature of data.sparse is called {name!r}, which PyTorch keeps for itself, expected another name",
                hint=f"~data.sparse.{name} +data.sparse.{other}={{column: {sparse.column or name}}}",
            )
        if sparse.mapping not in (*MAPPINGS, None):
            raise ConfigError(
                f"data.sparse.{name}.mapping is {sparse.mapping!r}, expected one of: {', '.join(MAPPINGS)}",
                hint=f"data.sparse.{name}.mapping=vocab",
            )
        if sparse.min_count is not None:
            _check_range(f"data.sparse.{name}.min_count", sparse.min_count, 1, None)
        if sparse.when_full not in (None, *WHEN_FULL):
            raise ConfigError(
                f"data.sparse.{name}.when_full is {sparse.when_full!r}, expected one of: {', '.join(WHEN_FULL)}",
                hint=f"data.sparse.{name}.when_full=replace",
            )
        if sparse.evict_after_days is not None:
            _check_range(f"data.sparse.{name}.evict_after_days", sparse.evict_after_days, 1, None)
        for key, low in (("bins", 2), ("max_ids", 1)):
            if (value := getattr(sparse, key)) is not None:
                _check_range(f"data.sparse.{name}.{key}", value, low, 10_000_000)
        if sum((bool(sparse.cross), sparse.bins is not None, sparse.separator is not None)) > 1:
            raise ConfigError(
                f"data.sparse.{name} has more than one of cross, bins and separator, expected one of them",
                hint=f"data.sparse.{name}.cross=[] or data.sparse.{name}.bins=null",
            )
        if sparse.rows is not None:
            _check_range(f"data.sparse.{name}.rows", sparse.rows, 3, 2**31 - 1)


def _check_days(data: DataConfig) -> None:
    for name in data.watermark.partitions:
        if not name.strip("/") or ".." in name.split("/") or set(name) & set("*?["):
            raise ConfigError(
                f"data.watermark.partitions has {name!r}, expected names of folders below data.path, without wildcards",
                hint='data.watermark.partitions=[hour=00,hour=01], or ["hour={00..23}"] for all 24',
            )
    if data.day is not None and not re.fullmatch(r"\d{4}-\d\d-\d\d(\.\.\d{4}-\d\d-\d\d)?", data.day):
        raise ConfigError(
            f"data.day is {data.day!r}, expected YYYY-MM-DD, or two such days for a range",
            hint="data.day=2026-01-31 or data.day=2026-01-01..2026-01-31",
        )
    if data.split.by == "day" and data.day is not None and ".." not in data.day:
        raise ConfigError(
            f"data.split.by is 'day', but data.day={data.day} is one day, which cannot be train and test",
            hint="data.split.by=hash, or a range: data.day=2026-01-01..2026-01-08",
        )
    patterned = re.search(r"\{day(:[^{}]*)?\}", data.path or "") is not None
    if patterned and data.day is None:
        raise ConfigError(
            f"data.path={data.path} has a file for each day, but data.day names none", hint="data.day=2026-01-31"
        )
    known = patterned or data.day_column or data.timestamp or data.format == "synthetic"
    if data.day is not None and not known:
        raise ConfigError(
            f"data.day is {data.day}, but neither data.path holds {{day}} nor does data.day_column or data.timestamp "
            "name a column that tells a row's day",
            hint="'data.path=\"logs/{day}/*.tsv\"', or data.day_column=<column>",
        )
    if data.split.by == "day" and not known:
        raise ConfigError(
            "data.split.by is 'day', but neither data.day_column nor data.timestamp names a column",
            hint="data.day_column=<column> or data.split.by=hash",
        )
    if data.split.by == "hours" and data.day is None:
        raise ConfigError(
            "data.split.by is 'hours', the last ones of data.day, but data.day is null",
            hint="data.day=2026-01-31, or data.split.by=day for the last days of a log",
        )
    if data.split.by == "hours" and data.format != "synthetic" and data.timestamp is None:
        raise ConfigError(
            "data.split.by is 'hours', but data.timestamp names no column that tells a row's hour",
            hint="data.timestamp=<column> or data.split.by=hash",
        )


def _check_model(config: Config) -> None:
    MODELS.get(config.model.name).check(config.model)
    if config.model.embedding_dim % 4:
        raise ConfigError(
            f"model.embedding_dim is {config.model.embedding_dim}, expected a multiple of 4 (FBGEMM's kernels)",
            hint=f"model.embedding_dim={4 * (config.model.embedding_dim // 4 + 1)}",
        )
    batch = config.train.global_batch
    if isinstance(batch, int) and batch < config.world_size:
        raise ConfigError(
            f"train.global_batch is {batch}, expected at least one sample for each of the {config.world_size} ranks",
            hint=f"train.global_batch={1024 * config.world_size}",
        )


def _check_schedule(train: TrainConfig) -> None:
    if train.schedule == "constant" and train.min_lr_share:
        raise ConfigError(
            f"train.min_lr_share is {train.min_lr_share:g}, but train.schedule=constant never falls to it",
            hint="train.schedule=cosine",
        )
    # 0.5 is the default, 1.0 was: neither shows that somebody wants rates to fall.
    if train.schedule == "constant" and train.decay_share not in (0.5, 1.0):
        raise ConfigError(
            f"train.decay_share is {train.decay_share:g}, but train.schedule=constant never falls",
            hint="train.schedule=linear",
        )
    rising = train.warmup_steps
    if isinstance(rising, str) or train.schedule == "constant" or train.max_steps is None:
        return
    if train.max_steps <= rising:
        raise ConfigError(
            f"train.schedule is {train.schedule}, but training ends after train.max_steps={train.max_steps} steps, "
            f"within its train.warmup_steps={rising}: the learning rates would never fall",
            hint=f"train.warmup_steps={AUTO}, or train.schedule=constant",
        )
