"""The ``data`` group: where the click logs are and what their columns mean."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING


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
