"""The configuration schema: one keyword-only dataclass per Hydra group; small groups share a module.

Hydra composes the YAML of ``conf/`` over these dataclasses, so an unknown key or a wrong type is an error before
anything starts. ``checks.check`` then checks the values. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.checkpoint import CheckpointConfig
from pipeline.config.data import DataConfig
from pipeline.config.features import (
    DenseFeature,
    LabelConfig,
    SparseDefaults,
    SparseFeature,
    TableDefaults,
    TableFigures,
)
from pipeline.config.fields import setting
from pipeline.config.gate import EvaluateConfig, GateConfig, gate_settings
from pipeline.config.hardware import HardwareConfig
from pipeline.config.ingest import (
    ChecksConfig,
    DedupeConfig,
    DriftLimits,
    IngestConfig,
    RayConfig,
    SamplingConfig,
    SplitConfig,
    WatermarkConfig,
)
from pipeline.config.launch import LaunchConfig, PodConfig
from pipeline.config.model import ModelConfig
from pipeline.config.nightly import (
    MlflowConfig,
    NightlyConfig,
    OpenTelemetryConfig,
    PrometheusConfig,
    ScheduleConfig,
    TrackConfig,
)
from pipeline.config.plan import PartitionConfig, PlanConfig, TablePin
from pipeline.config.publish import PublishConfig
from pipeline.config.synthetic import SyntheticConfig
from pipeline.config.tasks import TaskLimits, TaskOptions, TaskTraining
from pipeline.config.train import ClipConfig, DebugConfig, GuardConfig, TrainConfig
from pipeline.config.tuning import SearchConfig, TuneConfig
from pipeline.core.registry import STAGES, default_stages

__all__ = [
    "CheckpointConfig",
    "ChecksConfig",
    "ClipConfig",
    "Config",
    "DataConfig",
    "DebugConfig",
    "DedupeConfig",
    "DenseFeature",
    "DriftLimits",
    "EvaluateConfig",
    "GateConfig",
    "GuardConfig",
    "HardwareConfig",
    "IngestConfig",
    "LabelConfig",
    "LaunchConfig",
    "MlflowConfig",
    "ModelConfig",
    "NightlyConfig",
    "OpenTelemetryConfig",
    "PartitionConfig",
    "PlanConfig",
    "PodConfig",
    "PrometheusConfig",
    "PublishConfig",
    "RayConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "SearchConfig",
    "SparseDefaults",
    "SparseFeature",
    "SplitConfig",
    "SyntheticConfig",
    "TableDefaults",
    "TableFigures",
    "TablePin",
    "TaskLimits",
    "TaskOptions",
    "TaskTraining",
    "TrackConfig",
    "TrainConfig",
    "TuneConfig",
    "WatermarkConfig",
]


@dataclass(kw_only=True)
class Config:
    """The whole configuration, as ``runs/<run>/config.yaml`` holds it."""

    run: str | None = setting(
        None, doc="Name of the run under `<store>/runs`; null: the name of the data and a hash of the configuration."
    )
    store: str = setting("./store", doc="Folder or fsspec URL that holds datasets, plans, runs and models.")
    stages: list[str] = setting(
        factory=default_stages,
        choices=STAGES.names,
        doc="Stages to run. A stage whose artifact is in the store already is skipped.",
    )
    force: bool = setting(False, doc="Run the stages in `stages` again although the store has their artifacts.")
    seed: int = setting(2026, low=0, high=2**63 - 1, doc="Seed of all random numbers.")
    data: DataConfig = setting(factory=DataConfig, doc="The click logs and the meaning of their columns.")
    ingest: IngestConfig = setting(factory=IngestConfig, doc="How ingestion reads the logs and lays out its files.")
    model: ModelConfig = setting(factory=ModelConfig, doc="The ranking model.")
    hardware: HardwareConfig = setting(factory=HardwareConfig, doc="The machines to plan for and to train on.")
    plan: PlanConfig = setting(factory=PlanConfig, doc="Limits and preferences for the sharding plan.")
    partition: PartitionConfig = setting(factory=PartitionConfig, doc="Towers of features.")
    train: TrainConfig = setting(factory=TrainConfig, doc="The training loop.")
    checkpoint: CheckpointConfig = setting(
        factory=CheckpointConfig, doc="When to write checkpoints, how small, and how many to keep."
    )
    evaluate: EvaluateConfig = setting(factory=EvaluateConfig, doc="Evaluation on the held-out rows.")
    gate: GateConfig = setting(factory=gate_settings, doc="What a model must satisfy to be published.")
    publish: PublishConfig = setting(factory=PublishConfig, doc="What to publish, and under which name.")
    launch: LaunchConfig = setting(factory=LaunchConfig, doc="How and where stages run.")
    schedule: ScheduleConfig = setting(factory=ScheduleConfig, doc="The CronJob that starts a launcher every night.")
    nightly: NightlyConfig = setting(factory=NightlyConfig, doc="What a night waits for, catches up on and reports.")
    track: TrackConfig = setting(factory=TrackConfig, doc="Other programs that are told of runs and nights.")
    search: SearchConfig = setting(factory=SearchConfig, doc="The search for an architecture (`nightjar search`).")
    tune: TuneConfig = setting(factory=TuneConfig, doc="A study of settings: `nightjar tune`.")
    debug: DebugConfig = setting(factory=DebugConfig, doc="Help with debugging.")

    @property
    def model_name(self) -> str:
        """Name of the published model."""
        return self.publish.model or self.data.name

    @property
    def world_size(self) -> int:
        """The number of ranks on all hosts."""
        return self.hardware.world_size

    @property
    def machine_ranks(self) -> int:
        """Ranks on a machine that runs stages itself: those of all hosts, or of one host with ``launch=hosts``."""
        return self.hardware.ranks_per_host if self.launch.name == "hosts" else self.world_size
