"""Sharded embedding tables: built from a dataset's schema, placed by a plan, read and written by row."""

from __future__ import annotations

from pipeline.embeddings.clipping import clip_table_gradients
from pipeline.embeddings.collection import apply_fused_optimizer, build_collection, pooled_stack, reordered
from pipeline.embeddings.optimizer import DenseTableAdagrad, dense_table_optimizer, set_sparse_lr
from pipeline.embeddings.reset import reset_rows
from pipeline.embeddings.rows import LocalShard, RowAccess, RowValues, initial_rows
from pipeline.embeddings.sharding import TableRanks, shard_model, to_sharding_plan
from pipeline.embeddings.ssd import SsdStore
from pipeline.embeddings.tables import ADAGRAD_SUM, TableSpec, dense_parameters, dense_table_parameters
from pipeline.embeddings.touched import TouchedRows, shard_key

__all__ = [
    "ADAGRAD_SUM",
    "DenseTableAdagrad",
    "LocalShard",
    "RowAccess",
    "RowValues",
    "SsdStore",
    "TableRanks",
    "TableSpec",
    "TouchedRows",
    "apply_fused_optimizer",
    "build_collection",
    "clip_table_gradients",
    "dense_parameters",
    "dense_table_optimizer",
    "dense_table_parameters",
    "initial_rows",
    "pooled_stack",
    "reordered",
    "reset_rows",
    "set_sparse_lr",
    "shard_key",
    "shard_model",
    "to_sharding_plan",
]
