"""What training reads of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from pipeline.config import Config
from pipeline.config.checkpoint import CheckpointConfig
from pipeline.config.data import DataConfig
from pipeline.config.hardware import HardwareConfig
from pipeline.config.model import ModelConfig
from pipeline.config.plan import PartitionConfig
from pipeline.config.secrets import recorded
from pipeline.config.train import DebugConfig, TrainConfig


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What builds a model over all ranks. ``one_machine``: the ranks of all hosts run on this machine."""

    seed: int
    model: ModelConfig
    data: DataConfig
    hardware: HardwareConfig
    partition: PartitionConfig
    train: TrainConfig
    one_machine: bool = True

    @classmethod
    def of(cls, config: Config) -> Self:
        """The part of ``config``."""
        return cls(**_model_part(config))


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(ModelSettings):
    """What a training reads beside its model. ``record``: all settings, which its checkpoints keep.

    ``limit_memory``: ``launch.limit_memory``.
    """

    checkpoint: CheckpointConfig
    debug: DebugConfig
    limit_memory: str
    record: dict[str, Any]

    @classmethod
    def of(cls, config: Config) -> Self:
        """The part of ``config``."""
        return cls(
            **_model_part(config),
            checkpoint=config.checkpoint,
            debug=config.debug,
            limit_memory=config.launch.limit_memory,
            record=recorded(config),
        )


@dataclass(frozen=True, kw_only=True)
class PredictionSettings(ModelSettings):
    """What a prediction reads: its model, and ``global_batch``, the rows of a batch over all ranks."""

    global_batch: int

    @classmethod
    def of(cls, config: Config) -> Self:
        """The part of ``config``."""
        return cls(**_model_part(config), global_batch=config.evaluate.global_batch)


def _model_part(config: Config) -> dict[str, Any]:
    names = ("seed", "model", "data", "hardware", "partition", "train")
    return {name: getattr(config, name) for name in names} | {"one_machine": config.launch.name == "local"}
