"""The configuration schema: a module and a keyword-only dataclass for each Hydra group.

Hydra composes the YAML of ``conf/`` over these dataclasses, so an unknown key or a wrong type is an
error before anything starts. ``pipeline.compose`` then checks the values. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.config.checkpoint import CheckpointConfig
from pipeline.config.data import (
    ChecksConfig,
    DataConfig,
    DeclaredTable,
    DenseFeature,
    DriftLimits,
    LabelConfig,
    SparseDefaults,
    SparseFeature,
    SplitConfig,
    SyntheticConfig,
    TableDefaults,
    WatermarkConfig,
)
from pipeline.config.debug import DebugConfig
from pipeline.config.evaluate import EvaluateConfig
from pipeline.config.gate import GateConfig
from pipeline.config.hardware import HardwareConfig
from pipeline.config.ingest import IngestConfig, RayConfig
from pipeline.config.launch import (
    DEFAULT_STAGES,
    STAGES,
    LaunchConfig,
    PodConfig,
    PodResources,
    PodVolume,
    Toleration,
)
from pipeline.config.model import ModelConfig
from pipeline.config.nightly import NightlyConfig
from pipeline.config.partition import PartitionConfig
from pipeline.config.plan import TIERS, PlanConfig, TablePin
from pipeline.config.publish import PublishConfig
from pipeline.config.schedule import ScheduleConfig
from pipeline.config.train import AUTO, ClipConfig, GuardConfig, TrainConfig

__all__ = [
    "AUTO",
    "DEFAULT_STAGES",
    "STAGES",
    "TIERS",
    "CheckpointConfig",
    "ChecksConfig",
    "ClipConfig",
    "Config",
    "DataConfig",
    "DebugConfig",
    "DeclaredTable",
    "DenseFeature",
    "DriftLimits",
    "EvaluateConfig",
    "GateConfig",
    "GuardConfig",
    "HardwareConfig",
    "IngestConfig",
    "LabelConfig",
    "LaunchConfig",
    "ModelConfig",
    "NightlyConfig",
    "PartitionConfig",
    "PlanConfig",
    "PodConfig",
    "PodResources",
    "PodVolume",
    "PublishConfig",
    "RayConfig",
    "ScheduleConfig",
    "SparseDefaults",
    "SparseFeature",
    "SplitConfig",
    "SyntheticConfig",
    "TableDefaults",
    "TablePin",
    "Toleration",
    "TrainConfig",
    "WatermarkConfig",
]


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
