"""``result.json``: the outcome of a run, put together from the summaries of its stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from pipeline.records.dataset import SequenceProfile
from pipeline.records.ensemble import EnsemblePart
from pipeline.records.record import Record, absent, rest


@dataclass(frozen=True, kw_only=True)
class ErrorPart(Record):
    """What stopped the run, or an attempt of a stage."""

    message: str
    exit_code: int
    hint: str | None = absent()


@dataclass(frozen=True, kw_only=True)
class StageAttempt(Record):
    """A job of a stage: seconds since 1970, wall seconds, and what ended it (None: it made the artifact)."""

    started: float
    seconds: float
    error: ErrorPart | None = None


@dataclass(frozen=True, kw_only=True)
class StageOutcome(Record):
    """How a stage went: done | skipped | failed, wall seconds, and the artifact's path (None where it failed).

    ``started``: seconds since 1970. ``attempts``: where there were several.
    """

    status: str
    seconds: float = 0.0
    artifact: str | None = None
    started: float | None = absent()
    attempts: tuple[StageAttempt, ...] | None = absent()


@dataclass(frozen=True, kw_only=True)
class IngestPart(Record):
    """The dataset: rows by split, bytes read, reasons of the quarantine.

    ``rows_*`` of dicts are by day (late) or by feature (freed, replaced); ``replaces``: the path of the dataset of the
    same day whose place this one takes; ``snapshot``: of the table that was read. What is of days is absent where
    ``data.day`` is not set. ``rows_left_out``:
    without a click, by ``data.sampling``; ``rows_repeated``: of events that came before. By day, ``rows_relabelled``:
    rows of these logs whose click came later, and ``rows_corrected``: earlier days' rows, trained on once more.
    ``labels_until``: the last day whose clicks are in; ``labels_final``: the day after which none is waited for.
    ``sequences``: the lengths of the train rows' sequences. ``split_time``: where a split by time cuts; ``rows_gap``:
    those between its train and its test rows.
    """

    rows: int | None = absent()
    rows_train: int | None = absent()
    rows_test: int | None = absent()
    rows_validation: int | None = absent()
    rows_gap: int | None = absent()
    split_time: dict[str, str] | None = absent()
    rows_quarantined: int | None = absent()
    rows_left_out: int | None = absent()
    rows_repeated: int | None = absent()
    rows_relabelled: dict[str, int] | None = absent()
    rows_corrected: dict[str, int] | None = absent()
    labels_until: str | None = absent()
    labels_final: str | None = absent()
    bytes_in: int | None = absent()
    rows_per_s: float | None = absent()
    reasons: dict[str, int] | None = absent()
    warnings: tuple[str, ...] | None = absent()
    day: str | None = absent()
    rows_late: dict[str, int] | None = absent()
    rows_other_days: int | None = absent()
    rows_freed: dict[str, int] | None = absent()
    replaces: str | None = absent(unless="day")
    rows_replaced: dict[str, int] | None = absent()
    split_by_place: tuple[str, ...] | None = absent()
    snapshot: str | None = absent()
    sequences: dict[str, SequenceProfile] | None = absent()

    @property
    def labels_young(self) -> bool:
        """Whether clicks of its rows may still arrive."""
        return self.labels_final is not None and (self.labels_until or "") < self.labels_final


@dataclass(frozen=True, kw_only=True)
class TablePlace(Record):
    """Where a table lies."""

    tier: str
    sharding: str
    ranks: list[int] | int = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class PlanPart(Record):
    """Predicted bytes by tier over all ranks, ms of a step, and each table's place."""

    tiers: dict[str, int] | None = absent()
    predicted_step_ms: float | None = absent()
    tables: dict[str, TablePlace] | None = absent()


@dataclass(frozen=True, kw_only=True)
class Milliseconds(Record):
    """What the plan predicted, where it did, and what training measured."""

    predicted_ms: float | None = absent()
    measured_ms: float


@dataclass(frozen=True, kw_only=True)
class Bytes(Record):
    """As ``Milliseconds``, of memory."""

    predicted_bytes: float | None = absent()
    measured_bytes: float


@dataclass(frozen=True, kw_only=True)
class Seconds(Record):
    """As ``Milliseconds``, of a stage."""

    predicted_s: float
    measured_s: float


@dataclass(frozen=True, kw_only=True)
class PredictionPart(Record):
    """How far off the prediction was that was sealed before the run, in the file ``sealed`` of the store.

    ``seconds``: of the stages that were predicted and ran from their beginning to their end. ``error``: predicted
    seconds of these over measured ones, less 1; ``problem``: why there is none. ``step``: of training, what goes on
    beside the steps included; ``memory``: of the process that took most.
    """

    sealed: str
    sha256: str
    created: float | None = absent()
    seconds: dict[str, Seconds] = field(default_factory=dict)
    error: float | None = absent()
    step: Milliseconds | None = absent()
    memory: Bytes | None = absent()
    problem: str | None = absent()


@dataclass(frozen=True, kw_only=True)
class Resumed(Record):
    """Where a session of training went on from.

    ``planned``: steps planned when the first ones were taken, where a training of today's length would have taken these
    with other learning rates.
    """

    step: int
    samples: int
    planned: int | None = absent()


@dataclass(frozen=True, kw_only=True)
class LinkShare(Record):
    """Bytes that a sample sends within hosts and between hosts; ``dense_*``: of the dense part's gradients."""

    intra_host: float | None = absent()
    inter_host: float | None = absent()
    dense_intra_host: float | None = absent()
    dense_inter_host: float | None = absent()


@dataclass(frozen=True, kw_only=True)
class SsdPart(Record):
    """Tables on tier ssd: shares of lookups served from memory, faults and bytes of a step, bytes a byte that left."""

    ssd_hit_rate: float | None = None
    ssd_prefetch_coverage: float | None = None
    ssd_device_share: float | None = None
    ssd_host_share: float | None = None
    ssd_faults: float | None = None
    ssd_read_bytes: float | None = None
    ssd_written_bytes: float | None = None
    ssd_write_amplification: float | None = None


@dataclass(frozen=True, kw_only=True)
class Budget(Record):
    """The limit of memory of a host, and the most that one took at an interval's end."""

    limit_bytes: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class ValidationPart(Record):
    """Looks at ``rows`` validation rows, and the figures of the best one, whose weights are the training's result.

    ``stopped``: they ended the training; ``lr_drops``: how often they lowered the learning rates; ``seconds``: of this
    session; ``start_*``: of the model that a warm start began with. ``parts``: what each block of rows, one behind the
    other, adds to ``logloss``, by which two trainings on the same rows are told apart.
    """

    rows: int
    looks: int
    monitor: str
    stopped: bool
    lr_drops: int
    seconds: float
    best_step: int | None = absent()
    best_epoch: float | None = absent()
    ne: float | None = absent()
    auc: float | None = absent()
    logloss: float | None = absent()
    start_ne: float | None = absent()
    start_auc: float | None = absent()
    parts: tuple[float, ...] | None = absent()


@dataclass(frozen=True, kw_only=True)
class TrainPart(Record):
    """Samples and steps of the whole training; rates and seconds of this session; memory of the rank that took most."""

    samples: int | None = absent()
    steps: int | None = absent()
    global_batch: int | None = absent()
    seconds: float | None = absent()
    samples_per_s: float | None = absent()
    data_wait_share: float | None = absent()
    peak_rss_bytes: int | None = absent()
    world_size: int | None = absent()
    resumed: Resumed | None = absent()
    phases: dict[str, Milliseconds] | None = absent()
    step: Milliseconds | None = absent()
    memory: Bytes | None = absent()
    bytes_per_sample: LinkShare | None = absent()
    peak_pss_bytes: int | None = absent()
    ssd: SsdPart | None = absent()
    budget: Budget | None = absent()
    validation: ValidationPart | None = absent()
    ensemble: EnsemblePart | None = absent()
    teacher: str | None = absent()


@dataclass(frozen=True, kw_only=True)
class CheckpointPart(Record):
    """The checkpoints of a session; ``stall_share``: of its time."""

    count: int | None = absent()
    bytes_written: int | None = absent()
    bytes_full_equivalent: int | None = absent()
    stall_share: float | None = absent()
    skipped: int | None = absent()
    failed: int | None = absent()


@dataclass(frozen=True, kw_only=True)
class TaskFigures(Record):
    """Figures of a further task on the rows with its label; those that its ``kind`` has.

    ``unexplained``: the mean square error over the variance of the labels.
    """

    kind: str
    samples: int = 0
    ne: float | None = absent()
    auc: float | None = absent()
    logloss: float | None = absent()
    rmse: float | None = absent()
    unexplained: float | None = absent()
    calibration: float | None = absent()


@dataclass(frozen=True, kw_only=True)
class Evaluation(Record):
    """``metrics.json``, and ``eval`` of a result: figures on the held-out rows.

    ``bayes_ne``: NE of a model that knows the probabilities the labels were drawn from. ``tasks``: figures of the tasks
    besides the main one. ``clicks``: rows with a positive label. ``ne_interval``, ``auc_interval``: the ends of 95 %
    intervals; absent where the rows are too few for one. ``gauc``: AUC within each group of the feature ``group_by``
    that has rows of both classes, averaged with the groups' rows as weights; of ``gauc_groups`` with ``gauc_rows``.
    """

    FILE: ClassVar[str] = "metrics.json"

    samples: int | None = absent()
    clicks: int | None = absent()
    ne: float | None = absent()
    auc: float | None = absent()
    logloss: float | None = absent()
    calibration: float | None = absent()
    bayes_ne: float | None = absent()
    ne_interval: tuple[float, float] | None = absent()
    auc_interval: tuple[float, float] | None = absent()
    group_by: str | None = absent()
    gauc: float | None = absent()
    gauc_interval: tuple[float, float] | None = absent()
    gauc_groups: int | None = absent()
    gauc_rows: int | None = absent()
    tasks: dict[str, TaskFigures] | None = absent()


@dataclass(frozen=True, kw_only=True)
class GatePart(Record):
    """The verdict on ``version``, judged beside ``incumbent`` (None: nothing served).

    ``max_ne_increase``: the smallest value of that setting that the rows can test, where they are too few for its own.
    """

    verdict: str
    reasons: tuple[str, ...] = ()
    forced: str | None = absent()
    version: str = ""
    incumbent: str | None = None
    warnings: tuple[str, ...] | None = absent()
    max_ne_increase: float | None = absent()


@dataclass(frozen=True, kw_only=True)
class ModelPart(Record):
    """The version that was published."""

    name: str = ""
    version: str
    uri: str


@dataclass(frozen=True, kw_only=True)
class TowersPart(Record):
    """How many towers on how many hosts, the number of features of each, what they do and how they were found."""

    towers: int
    hosts: int
    features: list[int]
    module: str
    strategy: str


@dataclass(frozen=True, kw_only=True)
class Shrunk(Record):
    """A stage went on with ``hosts`` in place of ``from_hosts``; ``why``: what the cluster said."""

    stage: str
    from_hosts: int
    hosts: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Grown(Record):
    """A stage took hosts back and went on with ``hosts`` in place of ``from_hosts``."""

    stage: str
    from_hosts: int
    hosts: int


@dataclass(frozen=True, kw_only=True)
class Result(Record):
    """The outcome of ``run``: done | failed. A part whose stage has no artifact is absent.

    ``others``: the parts of stages from outside, by name.
    """

    FILE: ClassVar[str] = "result.json"
    KIND: ClassVar[str] = "run's result"

    run: str
    status: str
    stages: dict[str, StageOutcome] = field(default_factory=dict)
    ingest: IngestPart | None = absent()
    plan: PlanPart | None = absent()
    train: TrainPart | None = absent()
    checkpoint: CheckpointPart | None = absent()
    eval: Evaluation | None = absent()
    gate: GatePart | None = absent()
    model: ModelPart | None = absent()
    towers: TowersPart | None = absent()
    others: dict[str, Any] = rest()
    shrunk: tuple[Shrunk, ...] | None = absent()
    grown: tuple[Grown, ...] | None = absent()
    error: ErrorPart | None = absent()
    prediction: PredictionPart | None = absent()

    @property
    def seconds(self) -> float:
        """Wall seconds of all stages."""
        return sum(stage.seconds for stage in self.stages.values())

    def artifact(self, stage: str) -> str | None:
        """Return the path of the artifact of ``stage``; None if it has none."""
        outcome = self.stages.get(stage)
        return outcome.artifact if outcome is not None else None
