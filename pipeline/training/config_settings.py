"""Selects the settings of a training from a whole configuration. Training itself knows only these parts."""

from __future__ import annotations

from typing import Any

from pipeline.config import Config
from pipeline.config.secrets import recorded
from pipeline.training.settings import ModelSettings, PredictionSettings, TrainingSettings


def select_model_settings(config: Config) -> ModelSettings:
    """Return the settings that build a model."""
    return ModelSettings(**_select_model(config))


def select_training_settings(config: Config) -> TrainingSettings:
    """Return the settings that a training reads. Its checkpoints record all of ``config``, without secrets."""
    return TrainingSettings(
        **_select_model(config),
        checkpoint=config.checkpoint,
        debug=config.debug,
        limit_memory=config.launch.limit_memory,
        # A later training compares its own configuration with this whole record (``check_changes``).
        record=recorded(config),
    )


def select_prediction_settings(config: Config) -> PredictionSettings:
    """Return the settings that a prediction reads."""
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
