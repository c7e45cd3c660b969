"""What can be chosen by name, and the registries that know every choice. No torch here, and no room above."""

from __future__ import annotations

from typing import Any

from pipeline.specs.dense_optimizer import DenseOptimizer
from pipeline.specs.model import Model, ModelCosts, ModelInputs
from pipeline.specs.registry import Registry
from pipeline.specs.table_optimizer import TableOptimizer

__all__ = [
    "DENSE_OPTIMIZERS",
    "MODELS",
    "REGISTRIES",
    "TABLE_OPTIMIZERS",
    "DenseOptimizer",
    "Model",
    "ModelCosts",
    "ModelInputs",
    "Registry",
    "TableOptimizer",
]

MODELS: Registry[Model[Any]] = Registry("model", setting="model.name", home="pipeline.models", group="nightjar.models")
TABLE_OPTIMIZERS: Registry[TableOptimizer] = Registry(
    "table optimizer", setting="train.sparse_optimizer", home="pipeline.embeddings.optimizers"
)
DENSE_OPTIMIZERS: Registry[DenseOptimizer] = Registry(
    "dense optimizer", setting="train.dense_optimizer", home="pipeline.training.optimizers"
)
# Every registry, for ``nightjar doctor``.
REGISTRIES: tuple[Registry[Any], ...] = (MODELS, TABLE_OPTIMIZERS, DENSE_OPTIMIZERS)
