"""The optimizers of tables: ``train.sparse_optimizer``. A new one is a file here and a line in ``SPECS``."""

from __future__ import annotations

from pipeline.embeddings.optimizers import adagrad, ftrl, lazy_adam, partial_rowwise_adam, rowwise_adagrad, sgd
from pipeline.specs.table_optimizer import TableOptimizer

SPECS: tuple[TableOptimizer, ...] = (
    rowwise_adagrad.SPEC,
    sgd.SPEC,
    adagrad.SPEC,
    lazy_adam.SPEC,
    partial_rowwise_adam.SPEC,
    ftrl.SPEC,
)
