"""The settings of a training out of a whole configuration, of which training itself knows these parts alone."""

from __future__ import annotations

from typing import Any

from pipeline.config import Config
from pipeline.config.secrets import recorded
from pipeline.training.settings import ModelSettings, PredictionSettings, TrainingSettings


def select_model_settings(config: Config) -> ModelSettings:
    """Return what builds a model."""
    return ModelSettings(**_select_model(config))


def select_training_settings(config: Config) -> TrainingSettings:
    """Return what a training reads. Its checkpoints record all of ``config``, without secrets."""
    return TrainingSettings(
        **_select_model(config),
        checkpoint=config.checkpoint,
        debug=config.debug,
        limit_memory=config.launch.limit_memory,
        # A later training compares its own configuration with all of this (``check_changes``).
        record=recorded(config),
    )


def select_prediction_settings(config: Config) -> PredictionSettings:
    """Return what a prediction reads."""
    return PredictionSettings(**_select_model(config), global_batch=config.evaluate.global_batch)


def _select_model(config: Config) -> dict[str, Any]:
    return {
        "seed": config.seed,
        "model": config.model,
        "data": config.data,
        "hardware": config.hardware,
        "partition": config.partition,
        "train": config.train,
        "one_machine": config.launch.name == "local",
    }
