"""The configuration schema: one keyword-only dataclass per Hydra group, and the checks across fields.

Hydra composes the YAML of ``conf/`` over these dataclasses, so an unknown key or a wrong type is an
error before anything starts. ``check`` then looks at values: each complaint names the field, what it
got, what it expected and the override that mends it. Nothing here imports torch.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from omegaconf import MISSING

from pipeline.errors import ConfigError

STAGES = ("ingest", "plan", "partition", "train", "evaluate")
# Where tables may live, the fastest first.
TIERS = ("hbm", "hbm_cached", "ddr", "ssd")


@dataclass(kw_only=True)
class LabelConfig:
    """Which column is the click, and which of its values counts as one."""

    column: str = "label"
    positive: str = "1"
    negative: str = "0"


@dataclass(kw_only=True)
class DenseFeature:
    """One numeric feature. ``transform``: log1p | standardise | log1p_standardise | none."""

    column: str | None = None
    transform: str | None = None


@dataclass(kw_only=True)
class SparseFeature:
    """One categorical feature and the table that embeds it (same name). None: take the default."""

    column: str | None = None
    mapping: str | None = None
    rows: int | None = None
    min_count: int | None = None
    separator: str | None = None
    weight_separator: str | None = None


@dataclass(kw_only=True)
class SparseDefaults:
    """What a sparse feature uses where it says nothing itself.

    ``mapping``: vocab (ids ranked by frequency, unseen ids share row 1) or hash (xxhash64 modulo rows).
    ``rows``: the cap of the table, the reserved rows 0 (missing) and 1 (unseen or rare) included.
    """

    mapping: str = "vocab"
    rows: int = 100_000
    min_count: int = 1
    separator: str | None = None
    weight_separator: str | None = None


@dataclass(kw_only=True)
class SplitConfig:
    """How rows fall into train and test. ``by``: hash (of the row's content) or day (the last ones test)."""

    by: str = "hash"
    test_share: float = 0.2
    test_days: int = 1


@dataclass(kw_only=True)
class SyntheticConfig:
    """Criteo-shaped logs with a planted logistic truth; used when ``data.format=synthetic``.

    Effects are standard deviations of the log odds they add: of all dense features, of all ids, of all ``pairs``
    together. ``ids_per_feature``: of the largest feature, the smallest has 10. ``drift``: radians a day by which
    the effects turn into other ones.
    """

    rows: int = 1_000_000
    days: int = 4
    ids_per_feature: int = 1_000
    zipf: float = 1.2
    base_rate: float = 0.25
    dense_effect: float = 0.9
    first_order_effect: float = 1.3
    pairwise_effect: float = 0.4
    pairs: int = 4
    latent_dim: int = 2
    drift: float = 0.0


@dataclass(kw_only=True)
class DeclaredTable:
    """A table of ``data.format=tables``: known by its figures alone, without logs. None: take the default.

    ``pooling``: mean ids per sample. ``zipf``: exponent of its rows' frequencies (0: all alike), or a measured hit
    curve in its place: ``hot_share[i]`` of the lookups go to the hottest ``hot_rows[i]`` rows.
    """

    rows: int = MISSING
    pooling: float | None = None
    zipf: float | None = None
    hot_rows: list[int] = field(default_factory=list)
    hot_share: list[float] = field(default_factory=list)
    weighted: bool = False


@dataclass(kw_only=True)
class TableDefaults:
    """What a declared table uses where it says nothing itself."""

    pooling: float = 1.0
    zipf: float = 1.05


@dataclass(kw_only=True)
class DataConfig:
    """Where the click logs are and what their columns mean.

    ``format``: criteo | csv | parquet | synthetic | tables. ``path``: file, directory or glob on any fsspec URL.
    ``columns`` names the columns of a file without a header row; ``quote`` may surround a CSV field (null: none
    does). ``day``/``timestamp`` are optional columns. Format tables has no logs and is for planning alone: ``tables``
    with ``table_defaults``, and ``dense_features`` numeric features.
    """

    name: str = MISSING
    format: str = MISSING
    path: str | None = None
    separator: str = ","
    quote: str | None = '"'
    header: bool = True
    columns: list[str] = field(default_factory=list)
    strip: bool = False
    missing: list[str] = field(default_factory=lambda: [""])
    label: LabelConfig = field(default_factory=LabelConfig)
    timestamp: str | None = None
    day: str | None = None
    dense_transform: str = "log1p_standardise"
    sparse_defaults: SparseDefaults = field(default_factory=SparseDefaults)
    dense: dict[str, DenseFeature] = field(default_factory=dict)
    sparse: dict[str, SparseFeature] = field(default_factory=dict)
    split: SplitConfig = field(default_factory=SplitConfig)
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)
    tables: dict[str, DeclaredTable] = field(default_factory=dict)
    table_defaults: TableDefaults = field(default_factory=TableDefaults)
    dense_features: int = 13


@dataclass(kw_only=True)
class IngestConfig:
    """How ingestion works through the logs (not what comes out of it)."""

    block_mib: int = 32
    rows_per_group: int = 65_536
    groups_per_file: int = 16
    compression: str = "zstd"


@dataclass(kw_only=True)
class ModelConfig:
    """The ranking model. ``name``: dlrm.

    ``bottom_mlp`` and ``top_mlp`` are hidden widths: ``embedding_dim`` follows the first, 1 the second.
    """

    name: str = "dlrm"
    embedding_dim: int = 16
    bottom_mlp: list[int] = field(default_factory=lambda: [512, 256])
    top_mlp: list[int] = field(default_factory=lambda: [512, 256])


@dataclass(kw_only=True)
class HardwareConfig:
    """The topology planned for and trained on. Capacities per rank in GiB, bandwidths per rank in GB/s.

    ``device``: cpu | cuda. The world size is ``hosts * ranks_per_host``. ``ssd_read_iops``: random reads of 4 KiB
    per second and rank at depth 32. ``*_latency_us``: a small collective within a host and between hosts.
    ``dense_gflop_per_s``: rate of the dense part's products, forward and backward; ``dense_gb_per_s``: of everything
    else it does, as float32 bytes of its activations. ``lookup_ns``, ``update_ns``: fixed cost of one id in lookup and
    update, beside its bytes; ``table_overhead_us``: of one table, both together; ``step_overhead_ms``: of a step.
    ``nightjar calibrate`` measures them.
    """

    name: str = MISSING
    device: str = "cpu"
    hosts: int = 1
    ranks_per_host: int = 1
    hbm_gib: float = 0.0
    ddr_gib: float = 8.0
    ssd_gib: float = 0.0
    hbm_gb_per_s: float = 0.0
    ddr_gb_per_s: float = 20.0
    ssd_gb_per_s: float = 1.0
    hbm_to_ddr_gb_per_s: float = 0.0
    intra_host_gb_per_s: float = 2.0
    inter_host_gb_per_s: float = 1.0
    ssd_read_iops: float = 50_000.0
    intra_host_latency_us: float = 200.0
    inter_host_latency_us: float = 300.0
    dense_gflop_per_s: float = 300.0
    dense_gb_per_s: float = 3.0
    lookup_ns: float = 5.0
    update_ns: float = 18.0
    table_overhead_us: float = 20.0
    step_overhead_ms: float = 4.0


@dataclass(kw_only=True)
class TablePin:
    """What one table must and must not get. Empty and null: the planner chooses.

    ``tier``: hbm | hbm_cached | ddr | ssd. ``sharding``: a type of ``PlanConfig``. ``cache_rows``: rows over all ranks
    that the faster memory keeps of a table in hbm_cached or ssd. ``avoid``: tiers and sharding types it must not get.
    """

    tier: str = ""
    sharding: str = ""
    cache_rows: int | None = None
    avoid: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class PlanConfig:
    """Limits and wishes for the sharding plan.

    ``sharding_types``: the types the planner may choose from, of data_parallel | table_wise | column_wise | row_wise |
    table_row_wise | table_column_wise. ``*_reserve``: shares of each rank's memory and disk kept free on top of what
    is estimated for dense part, activations, inputs, communication and staging. ``tables``: wishes by table.
    """

    sharding_types: list[str] = field(
        default_factory=lambda: [
            "data_parallel",
            "table_wise",
            "row_wise",
            "column_wise",
            "table_row_wise",
            "table_column_wise",
        ]
    )
    hbm_reserve: float = 0.1
    ddr_reserve: float = 0.1
    ssd_reserve: float = 0.05
    tables: dict[str, TablePin] = field(default_factory=dict)


@dataclass(kw_only=True)
class PartitionConfig:
    """Tower partitioning. ``name``: flat (no towers)."""

    name: str = "flat"


@dataclass(kw_only=True)
class GuardConfig:
    """When training stops itself (exit code 5)."""

    window_steps: int = 50
    collapse_after_steps: int = 200
    min_logit_std: float = 1e-4
    max_window_ne: float = 1.0
    collapse: bool = True


@dataclass(kw_only=True)
class TrainConfig:
    """The training loop. ``global_batch`` counts samples over all ranks; learning rates are for it.

    ``dense_optimizer``: adam | adagrad. ``precision``: auto (bf16 where the CPU or GPU computes in it,
    else fp32) | bf16 | fp32. ``shuffle_window_groups``: row groups that are mixed at a time.
    """

    global_batch: int = 4096
    epochs: int = 1
    lr: float = 0.002
    sparse_lr: float = 0.05
    dense_optimizer: str = "adam"
    weight_decay: float = 0.0
    warmup_steps: int = 100
    precision: str = "auto"
    compile: bool = False
    pipeline: str = "sparse_dist"
    shuffle: bool = True
    shuffle_window_groups: int = 8
    prefetch_batches: int = 4
    max_steps: int | None = None
    threads_per_rank: int | None = None
    log_every_steps: int = 20
    guard: GuardConfig = field(default_factory=GuardConfig)


@dataclass(kw_only=True)
class CheckpointConfig:
    """Checkpoints: when, how small, how many stay. One is always taken at the end.

    ``every_steps``/``every_minutes``: interval, whichever comes first (None: never). ``policy``: intermittent |
    one_shot | consecutive | full. ``quantise``: auto (bits by ``expected_restores``) | 2 | 3 | 4 | 8 | fp16 | fp32, by
    table in ``tables``; a run's last one is a baseline in ``final_quantise``. ``hot_share``: of a table's rows in a
    checkpoint, the hottest, that are kept in 8 bits where others have fewer. ``state``: fp32 | bf16 for the tables'
    optimizer state. ``max_chain``: differences on one baseline. ``when_busy``: wait | skip, where the last one is
    still being written. ``keep_every``: steps. ``compact_after``: differences on a baseline before the newest is
    compacted into a new one (None: never).

    ``init_from``: a checkpoint that a new training starts from (a run's name, <run>/step-00000100 or a path in the
    store); ``init_tables_only``: its tables only; ``rename``: {its table: table here}; ``allow``: settings that may
    differ from those it was trained with, though that changes what training does.
    """

    every_steps: int | None = None
    every_minutes: float | None = None
    policy: str = "intermittent"
    quantise: str = "auto"
    final_quantise: str = "fp32"
    hot_share: float = 0.1
    expected_restores: int = 20
    state: str = "fp32"
    tables: dict[str, str] = field(default_factory=dict)
    max_chain: int = 20
    when_busy: str = "wait"
    chunk_mib: float = 16.0
    keep_last: int = 2
    keep_every: int | None = None
    grace_seconds: float = 30.0
    compact_after: int | None = None
    init_from: str | None = None
    init_tables_only: bool = False
    rename: dict[str, str] = field(default_factory=dict)
    allow: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class EvaluateConfig:
    """Evaluation on the held-out rows; ``global_batch`` counts samples over all ranks."""

    global_batch: int = 16_384


@dataclass(kw_only=True)
class LaunchConfig:
    """How stages are started. ``name``: local (TorchX ``local_cwd``).

    ``inline``: stages that run in the launcher's own process. ``deadline_minutes``: the longest one
    stage may take before the launcher cancels it.
    """

    name: str = "local"
    inline: list[str] = field(default_factory=lambda: ["ingest", "plan", "partition"])
    attempts: int = 1
    deadline_minutes: float = 24 * 60.0


@dataclass(kw_only=True)
class DebugConfig:
    """Help for finding faults. ``anomaly``: torch.autograd's anomaly mode; ``profile_steps``: trace that many steps."""

    anomaly: bool = False
    profile_steps: int = 0


@dataclass(kw_only=True)
class Config:
    """The whole configuration, as ``runs/<run>/config.yaml`` holds it.

    ``run``: name under ``<store>/runs``; None: the data's name and a hash of the configuration.
    """

    run: str | None = None
    store: str = "./store"
    stages: list[str] = field(default_factory=lambda: list(STAGES))
    force: bool = False
    seed: int = 2026
    data: DataConfig = field(default_factory=DataConfig)
    ingest: IngestConfig = field(default_factory=IngestConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def world_size(self) -> int:
        """Ranks over all hosts."""
        return self.hardware.hosts * self.hardware.ranks_per_host


TRANSFORMS = ("log1p", "standardise", "log1p_standardise", "none")
_CHOICES: dict[str, tuple[str, ...]] = {
    "data.format": ("criteo", "csv", "parquet", "synthetic", "tables"),
    "data.dense_transform": TRANSFORMS,
    "data.sparse_defaults.mapping": ("vocab", "hash"),
    "data.split.by": ("hash", "day"),
    "model.name": ("dlrm",),
    "hardware.device": ("cpu", "cuda"),
    "partition.name": ("flat",),
    "train.dense_optimizer": ("adam", "adagrad"),
    "train.precision": ("auto", "bf16", "fp32"),
    "train.pipeline": ("sparse_dist", "base"),
    "checkpoint.policy": ("intermittent", "one_shot", "consecutive", "full"),
    "checkpoint.quantise": ("auto", "2", "3", "4", "8", "fp16", "fp32"),
    "checkpoint.final_quantise": ("auto", "2", "3", "4", "8", "fp16", "fp32"),
    "checkpoint.state": ("fp32", "bf16"),
    "checkpoint.when_busy": ("wait", "skip"),
    "ingest.compression": ("zstd", "lz4", "snappy"),
    "launch.name": ("local",),
}
# (field, lowest, highest): closed ranges; None is an open end.
_RANGES: tuple[tuple[str, float | None, float | None], ...] = (
    ("seed", 0, 2**63 - 1),
    ("data.split.test_share", 0.0, 0.9),
    ("data.split.test_days", 1, None),
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
    ("plan.hbm_reserve", 0.0, 0.95),
    ("plan.ddr_reserve", 0.0, 0.95),
    ("plan.ssd_reserve", 0.0, 0.95),
    ("checkpoint.hot_share", 0.0, 1.0),
    ("train.global_batch", 1, None),
    ("train.epochs", 1, None),
    ("train.lr", 0.0, None),
    ("train.sparse_lr", 0.0, None),
    ("train.weight_decay", 0.0, None),
    ("train.warmup_steps", 0, None),
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
    ("launch.attempts", 1, 100),
    ("launch.deadline_minutes", 0.01, None),
)


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
        if value is not None:
            _check_range(path, float(value), low, high)  # type: ignore[arg-type]
    _check_stages(config)
    _check_data(config.data)
    _check_model(config)
    _check_checkpoint(config)


def _check_range(path: str, value: float, low: float | None, high: float | None) -> None:
    if not math.isfinite(value):
        raise ConfigError(f"{path} is {value}, expected a finite number", hint=f"{path}={low or 0:g}")
    if (low is not None and value < low) or (high is not None and value > high):
        span = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
        bound = low if low is not None and value < low else high
        raise ConfigError(f"{path} is {value:g}, expected {span}", hint=f"{path}={bound:g}")


def _check_stages(config: Config) -> None:
    if not config.stages:
        raise ConfigError("stages is empty: nothing would run", hint=f"stages=[{','.join(STAGES)}]")
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
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", data.name):
        raise ConfigError(
            f"data.name is {data.name!r}, expected at most 100 letters, digits, '_', '.' and '-'",
            hint=f"data.name={re.sub(r'[^A-Za-z0-9_-]+', '-', data.name).strip('-')[:100] or 'clicks'}",
        )
    if data.format == "tables":
        return
    if data.format != "synthetic" and not data.path:
        raise ConfigError("data.path is not set: no click logs to read", hint="data.path=<file, directory or glob>")
    if not data.sparse:
        raise ConfigError("data.sparse is empty: at least one categorical feature is needed", hint="+data.sparse.C1={}")
    shared = set(data.dense) & set(data.sparse)
    if shared:
        raise ConfigError(
            f"feature {sorted(shared)[0]!r} is in data.dense and in data.sparse, expected one of them",
            hint=f"~data.dense.{sorted(shared)[0]}",
        )
    for name, dense in data.dense.items():
        if dense.transform not in (*TRANSFORMS, None):
            raise ConfigError(
                f"data.dense.{name}.transform is {dense.transform!r}, expected one of: {', '.join(TRANSFORMS)}",
                hint=f"data.dense.{name}.transform=log1p",
            )
    for name, sparse in data.sparse.items():
        if sparse.mapping not in ("vocab", "hash", None):
            raise ConfigError(
                f"data.sparse.{name}.mapping is {sparse.mapping!r}, expected vocab or hash",
                hint=f"data.sparse.{name}.mapping=vocab",
            )
        if sparse.min_count is not None:
            _check_range(f"data.sparse.{name}.min_count", sparse.min_count, 1, None)
        if sparse.rows is not None:
            _check_range(f"data.sparse.{name}.rows", sparse.rows, 3, 2**31 - 1)
    if data.split.by == "day" and not (data.day or data.timestamp or data.format == "synthetic"):
        raise ConfigError(
            "data.split.by is 'day', but neither data.day nor data.timestamp names a column",
            hint="data.day=<column> or data.split.by=hash",
        )


def _check_model(config: Config) -> None:
    if config.model.embedding_dim % 4:
        raise ConfigError(
            f"model.embedding_dim is {config.model.embedding_dim}, expected a multiple of 4 (FBGEMM's kernels)",
            hint=f"model.embedding_dim={4 * (config.model.embedding_dim // 4 + 1)}",
        )
    if config.train.global_batch < config.world_size:
        raise ConfigError(
            f"train.global_batch is {config.train.global_batch}, expected at least one sample for each of the "
            f"{config.world_size} ranks",
            hint=f"train.global_batch={1024 * config.world_size}",
        )
