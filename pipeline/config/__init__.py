"""The configuration schema: one keyword-only dataclass per Hydra group.

Hydra composes the YAML of ``conf/`` over these dataclasses, so an unknown key or a wrong type is an
error before anything starts. ``checks.check`` then looks at values. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from pipeline.gateconfig import GateConfig
from pipeline.launchconfig import LaunchConfig, ScheduleConfig
from pipeline.trainconfig import TrainConfig

STAGES = ("ingest", "plan", "partition", "train", "evaluate", "publish")
# What ``nightjar run`` does where ``stages`` names none: publishing is asked for.
DEFAULT_STAGES = STAGES[:-1]
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
    """One numeric feature. ``transform``: log1p | standardise | log1p_standardise | percentile | max_norm | none.

    Max_norm is a layer of the model: value / largest so far + a trainable bias, 0 for a missing one.
    ``clip``: [lowest, highest], values beyond are taken as these before the transform. ``bins``: of percentile.
    ``min``, ``max``, ``required``: a row whose value is outside, or missing, goes to quarantine.
    """

    column: str | None = None
    transform: str | None = None
    clip: list[float] = field(default_factory=list)
    bins: int = 100
    min: float | None = None
    max: float | None = None
    required: bool = False


@dataclass(kw_only=True)
class SparseFeature:
    """One categorical feature and the table that embeds it (same name). None: take the default.

    ``cross``: columns whose values together are the id, in place of ``column``. ``bins``: the column is a number, whose
    percentile bin is the id. ``max_ids``: of several ids the first so many count. ``integer``, ``required``: a row
    whose ids are no whole numbers, or missing, goes to quarantine.
    """

    column: str | None = None
    mapping: str | None = None
    rows: int | None = None
    min_count: int | None = None
    when_full: str | None = None
    evict_after_days: int | None = None
    separator: str | None = None
    weight_separator: str | None = None
    cross: list[str] = field(default_factory=list)
    bins: int | None = None
    max_ids: int | None = None
    integer: bool = False
    required: bool = False


@dataclass(kw_only=True)
class SparseDefaults:
    """What a sparse feature uses where it says nothing itself.

    ``mapping``: vocab (ids ranked by frequency, unseen ids share row 1) | hash (xxhash64 modulo rows) | double_hash
    (two such rows, summed) | learned (rare ids share rows with ids that behave alike). ``rows``: the cap of the table,
    the reserved rows 0 (missing) and 1 (unseen or rare) included. ``min_count``: lookups before an id gets a row.
    ``when_full``: how new ids get rows of a vocab table that is full, replace (they take those of ids that are looked
    up less) | keep (they get none). ``evict_after_days``: an id that was not seen for so many days of logs loses its
    row (null: never); of vocab with ``data.day``.
    """

    mapping: str = "vocab"
    rows: int = 100_000
    min_count: int = 1
    when_full: str = "replace"
    evict_after_days: int | None = None
    separator: str | None = None
    weight_separator: str | None = None


@dataclass(kw_only=True)
class SplitConfig:
    """How rows fall into train and test. ``by``: hash (of the row's content, ``test_share`` of them), day or hours.

    By day the last ``test_days`` are test; by hours the last ``test_hours`` of ``data.day`` (of a range: of its last
    day), as ``data.timestamp`` tells: the model is trained on the hours before and evaluated on those that follow.
    """

    by: str = "hash"
    test_share: float = 0.2
    test_days: int = 1
    test_hours: int = 2


@dataclass(kw_only=True)
class SyntheticConfig:
    """Criteo-shaped logs with a planted logistic truth; used when ``data.format=synthetic``.

    Effects are standard deviations of the log odds they add: of all dense features, of all ids, of all ``pairs``
    together. ``ids_per_feature``: of the largest feature, the smallest has 10. ``drift``: radians a day by which
    the effects turn into other ones. ``blocks``: 0, or that many groups of features; then every pair within one
    interacts, none across two, and ``pairs`` is not used.

    With ``data.day`` the log is of that day alone, ``rows`` of them: ``first_day`` is the first there is; every day,
    a share ``new_ids`` of a feature's ids gives way to new ones and a share ``popularity_drift`` changes places in
    popularity. ``id_groups``: 0, or that many groups a feature has; ids of one have the same effects. ``hourly``: the
    effects turn from hour to hour, by as much a day. Rows lie evenly over a day, in the order of their times.
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
    blocks: int = 0
    first_day: str = "2026-01-01"
    new_ids: float = 0.0
    popularity_drift: float = 0.0
    id_groups: int = 0
    hourly: bool = False


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
class WatermarkConfig:
    """When the logs of ``data.day`` are complete: files are there, and ...

    ``success``: a file of that name (it may hold {day}) lies in each of their folders; null: none is waited for.
    ``partitions``: folders below ``data.path`` that each hold a file: [hour=00, hour=01], or ["hour={00..23}"] for 24.
    ``min_partitions``: so many folders hold files; null: any number. ``min_rows``: the files hold so many rows.
    ``max_age_hours``: so long after the day's end (UTC) nothing more will come, and neither ``success`` nor folders
    are waited for; null: they always are.
    """

    success: str | None = None
    partitions: list[str] = field(default_factory=list)
    min_partitions: int | None = None
    min_rows: int = 1
    max_age_hours: float | None = None


@dataclass(kw_only=True)
class DriftLimits:
    """How far the train rows may move from the day before's; null: as far as they like.

    ``label_rate``, ``distinct``: relative change; ``missing_share``: absolute; ``psi``: population stability index.
    """

    label_rate: float | None = None
    missing_share: float | None = None
    distinct: float | None = None
    psi: float | None = None


@dataclass(kw_only=True)
class ChecksConfig:
    """What of a dataset is reported (``warn``) and what stops the stage (``hold``).

    The label rate holds nothing by itself: the gate judges such a day against the model that serves.
    ``leak``: what becomes of a feature that alone predicts the label with an AUC above ``leak_auc``: hold | warn | off.
    """

    warn: DriftLimits = field(
        default_factory=lambda: DriftLimits(label_rate=0.2, missing_share=0.1, distinct=0.5, psi=0.25)
    )
    hold: DriftLimits = field(default_factory=lambda: DriftLimits(missing_share=0.5))
    leak: str = "hold"
    leak_auc: float = 0.99


@dataclass(kw_only=True)
class DataConfig:
    """Where the click logs are and what their columns mean.

    ``format``: criteo | csv | parquet | synthetic | tables. ``path``: file, directory or glob on any fsspec URL.
    ``columns`` names the columns of a file without a header row; ``quote`` may surround a CSV field (null: none
    does). ``day_column``/``timestamp`` are optional columns. Format tables has no logs and is for planning alone:
    ``tables`` with ``table_defaults``, and ``dense_features`` numeric features.

    ``day``: YYYY-MM-DD, the day to ingest (a range: A..B; null: all that is there): of files, where ``path`` holds
    {day} or {day:%Y/%m/%d}, else of rows, by their day. ``late``: what becomes of rows of another day in the files of
    this one, quarantine | own_day (kept for that day's dataset, within ``late_days``). ``mapping_from``: path in the
    store of the dataset, usually of the day before, whose id mappings and fitted transforms are carried on.
    ``max_quarantine_share``: of a day's rows, beyond which the stage fails.
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
    day_column: str | None = None
    day: str | None = None
    watermark: WatermarkConfig = field(default_factory=WatermarkConfig)
    late: str = "quarantine"
    late_days: int = 3
    mapping_from: str | None = None
    max_quarantine_share: float = 0.2
    checks: ChecksConfig = field(default_factory=ChecksConfig)
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
class RayConfig:
    """Ray Data, where ``ingest.engine=ray``. ``address``: of a Ray to join; null starts one on this machine."""

    address: str | None = None


@dataclass(kw_only=True)
class IngestConfig:
    """How ingestion works through the logs (not what comes out of it). ``engine``: local | ray."""

    engine: str = "local"
    ray: RayConfig = field(default_factory=RayConfig)
    block_mib: int = 16
    rows_per_group: int = 65_536
    groups_per_file: int = 16
    compression: str = "lz4"


@dataclass(kw_only=True)
class ModelConfig:
    """The ranking model. Each model has a class of its own with further settings, derived from this one.

    ``name``: of a registered model (``nightjar doctor`` lists them). ``embedding_dim``: width of every embedding; a
    multiple of 4.
    """

    name: str = MISSING
    embedding_dim: int = 16


@dataclass(kw_only=True)
class HardwareConfig:
    """The topology planned for and trained on. Capacities per rank in GiB, bandwidths per rank in GB/s.

    ``device``: cpu | cuda. The world size is ``hosts * ranks_per_host``. ``ssd_read_iops``: random reads of 4 KiB
    per second and rank at depth 32. ``*_latency_us``: a small collective within a host and between hosts.
    ``dense_gflop_per_s``: rate of the dense part's products, forward and backward; ``dense_gb_per_s``: of everything
    else it does, as float32 bytes of its activations. ``lookup_ns``, ``update_ns``: fixed cost of one id in lookup and
    update, beside its bytes; ``table_overhead_us``: of one table, both together; ``step_overhead_ms``: of a step.
    ``process_gib``: host memory of a rank's process before training. ``nightjar calibrate`` measures all of these.
    ``ssd_paths``: directories on local disks for the scratch files of tables on tier ssd, a disk each (none: directory
    ``scratch`` of a local store); they decide nothing of the plan.
    """

    name: str = MISSING
    device: str = "cpu"
    hosts: int = 1
    ranks_per_host: int = 1
    hbm_gib: float = 0.0
    ddr_gib: float = 8.0
    ssd_gib: float = 0.0
    process_gib: float = 0.34375
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
    ssd_paths: list[str] = field(default_factory=list)


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
    ``former``: path in the store of a plan to take over where nothing changed since (set by the nightly run).
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
    former: str | None = None


@dataclass(kw_only=True)
class PartitionConfig:
    """Towers of features (DMT, MLSys'24). ``name``: flat (none) | dmt.

    ``towers``: how many (0: one a host). ``strategy``: which features go together, strided | coherent | diverse;
    ``pins``: {feature: its tower}; ``groups``: features that stay together; ``imbalance``: how far over an even share
    of features, predicted ms and, where memory is short, bytes a tower may be. ``probe``: the flat model's checkpoint
    (as in ``checkpoint.init_from``) whose embeddings are compared; null: ``probe_steps`` are trained in one process,
    with tables of at most ``probe_rows``. ``module``: pass_through | dlrm | dcn with
    ``c`` vectors a feature and ``p`` a tower of width ``dim`` (0: ``model.embedding_dim``), ``cross_layers`` of dcn.
    ``exchange``: precision of embeddings between ranks (towers: between hosts), fp32 | fp16 | bf16 | int8.
    """

    name: str = "flat"
    towers: int = 0
    strategy: str = "coherent"
    probe: str | None = None
    probe_steps: int = 300
    probe_rows: int = 100_000
    imbalance: float = 0.1
    pins: dict[str, int] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)
    module: str = "pass_through"
    c: int = 1
    p: int = 0
    dim: int = 0
    cross_layers: int = 1
    exchange: str = "fp32"


@dataclass(kw_only=True)
class CheckpointConfig:
    """Checkpoints: when, how small, how many stay. One is always taken at the end.

    ``every_steps``/``every_minutes``: interval, whichever comes first (None: never). ``policy``: intermittent |
    one_shot | consecutive | full. ``quantise``: auto (bits by ``expected_restores``) | 2 | 3 | 4 | 8 | fp16 | fp32, by
    table in ``tables``; a run's last one is a baseline, all of it in ``final_quantise``. ``hot_share``: of a table's
    rows in a checkpoint, the hottest, that are kept in 8 bits where others have fewer. ``state``: fp32 | bf16 for the
    tables' optimizer state. ``max_chain``: differences on one baseline. ``when_busy``: wait | skip, where the last one
    is still being written. ``keep_every``: steps. ``compact_after``: differences on a baseline before the newest is
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
class PublishConfig:
    """What is published. ``model``: name under ``<store>/models`` (null: the data's name).

    ``quantise``: of the tables' rows, 8 | 4 | fp16 | fp32; ``cache_mib``: memory for rows of tables while the gate
    scores a version.
    """

    model: str | None = None
    quantise: str = "8"
    cache_mib: float = 1024.0


@dataclass(kw_only=True)
class NightlyConfig:
    """A night (docs/nightly.md). ``timezone``: of date=yesterday; null: ``schedule.time_zone``.

    ``wait_minutes``: for the day's logs to be complete, looked at every ``poll_seconds``. ``catch_up``: so many missed
    nights are made up for first. ``keep_going``: a night that failed does not stop the later ones. ``reuse_plan``: the
    incumbent's, where nothing changed. ``lease_seconds``: after which a dead launcher's lock is taken over.
    ``webhook``: URL to which the verdict is posted.
    """

    timezone: str | None = None
    wait_minutes: float = 120.0
    poll_seconds: float = 60.0
    catch_up: int = 0
    keep_going: bool = False
    reuse_plan: bool = True
    lease_seconds: float = 30.0
    webhook: str | None = None


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
    stages: list[str] = field(default_factory=lambda: list(DEFAULT_STAGES))
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
    gate: GateConfig = field(default_factory=GateConfig)
    publish: PublishConfig = field(default_factory=PublishConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    nightly: NightlyConfig = field(default_factory=NightlyConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def model_name(self) -> str:
        """Name of the published model."""
        return self.publish.model or self.data.name

    @property
    def world_size(self) -> int:
        """Ranks over all hosts."""
        return self.hardware.hosts * self.hardware.ranks_per_host
