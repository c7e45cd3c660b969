"""What can be chosen by name, and the registries that know every choice. No torch here, and no room above."""

from __future__ import annotations

from pipeline.specs.dense_optimizer import DenseOptimizer
from pipeline.specs.registry import Registry
from pipeline.specs.table_optimizer import TableOptimizer

TABLE_OPTIMIZERS: Registry[TableOptimizer] = Registry(
    "table optimizer", setting="train.sparse_optimizer", home="pipeline.embeddings.optimizers"
)
DENSE_OPTIMIZERS: Registry[DenseOptimizer] = Registry(
    "dense optimizer", setting="train.dense_optimizer", home="pipeline.training.optimizers"
)
