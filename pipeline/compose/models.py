"""Group ``model``: its options are the registered models, each with a dataclass for its settings."""

from __future__ import annotations

from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from pipeline.config import Config
from pipeline.config.gate import gate_settings
from pipeline.config.model import ModelConfig
from pipeline.errors import ConfigError
from pipeline.specs.model import MODELS

GROUP = "model"


_stored: dict[str, type] = {}


def store_models() -> None:
    """Register the settings of every model with Hydra, as an option of group ``model``.

    Once a process: Hydra makes a tree of them, which takes a while.
    """
    for spec in MODELS:
        if _stored.get(spec.name) is not spec.config:
            ConfigStore.instance().store(group=GROUP, name=spec.name, node=spec.config, provider="nightjar")
            _stored[spec.name] = spec.config


def settings_class(name: str) -> type[ModelConfig]:
    """The dataclass of the settings of the model called ``name``; ConfigError where there is no such model."""
    settings: type[ModelConfig] = MODELS.get(name).config
    return settings


def schema_for(recorded: dict[Any, Any]) -> DictConfig:
    """The schema of a configuration, with the settings of the model that ``recorded`` names."""
    gate_settings()  # says what is wrong with a package's check; OmegaConf would add lines of its own
    schema: DictConfig = OmegaConf.structured(Config)
    model = recorded.get(GROUP)
    if isinstance(model, dict) and "name" in model:
        schema.model = settings_class(str(model["name"]))
    return schema


def check_settings(tree: DictConfig) -> None:
    """Raise ConfigError where the settings in the composed ``tree`` are not those of the model ``model.name``.

    A user's file that names a model without its settings gets their defaults.
    """
    name = OmegaConf.select(tree, f"{GROUP}.name", throw_on_missing=True)
    wanted, kind = settings_class(name), OmegaConf.get_type(tree, GROUP) or dict
    if kind is ModelConfig:
        tree.model = OmegaConf.merge(OmegaConf.structured(wanted), OmegaConf.to_container(tree.model))
    elif kind is not wanted:
        others = [spec.name for spec in MODELS if spec.config is kind]
        raise ConfigError(
            f"model.name is {name!r}, but the settings are those of model {others[0] if others else kind.__name__!r}",
            hint=f"{GROUP}={name}",
        )
