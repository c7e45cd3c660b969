"""What can be chosen by name, and the registries that know every choice. No torch here, and no room above."""

from __future__ import annotations

from typing import Any

from pipeline.specs.model import Model, ModelCosts, ModelInputs
from pipeline.specs.registry import Registry

__all__ = ["MODELS", "REGISTRIES", "Model", "ModelCosts", "ModelInputs", "Registry"]

MODELS: Registry[Model[Any]] = Registry("model", setting="model.name", home="pipeline.models", group="nightjar.models")

# Every registry, for ``nightjar doctor``.
REGISTRIES: tuple[Registry[Any], ...] = (MODELS,)
