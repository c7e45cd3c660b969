"""The settings that training reads. ``training/config_settings.py`` selects them from a whole configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.config.checkpoint import CheckpointConfig
from pipeline.config.data import DataConfig
from pipeline.config.hardware import HardwareConfig
from pipeline.config.model import ModelConfig
from pipeline.config.plan import PartitionConfig
from pipeline.config.train import DebugConfig, TrainConfig


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The settings that build a model over all ranks. ``one_machine``: the ranks of all hosts run on this machine."""

    seed: int
    model: ModelConfig
    data: DataConfig
    hardware: HardwareConfig
    partition: PartitionConfig
    train: TrainConfig
    one_machine: bool = True


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(ModelSettings):
    """The settings that a training reads besides its model's. ``record`` has all settings, which its checkpoints keep.

    ``limit_memory`` is ``launch.limit_memory``.
    """

    checkpoint: CheckpointConfig
    debug: DebugConfig
    limit_memory: str
    record: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PredictionSettings(ModelSettings):
    """The settings that a prediction reads: its model's, and ``global_batch``, the rows of a batch over all ranks."""

    global_batch: int
