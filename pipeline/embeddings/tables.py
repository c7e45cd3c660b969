"""Walks over the tables of a sharded model: its kernels, and the storage of their optimizer state.

TorchRec keeps kernels in plain lists, which ``modules()`` does not see.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.specs.optimizers import StateColumn

TableState = dict[str, Tensor]


@dataclass(frozen=True)
class TableSpec:
    """A table: ``rows`` rows of ``dim`` float32 values.

    Initial values are uniform in plus or minus ``bound``; None: 1 / sqrt(rows).
    """

    name: str
    rows: int
    dim: int
    bound: float | None = None

    @property
    def initial_bound(self) -> float:
        """``bound`` or its default."""
        if self.bound is None:
            return 1.0 / math.sqrt(self.rows)
        return self.bound


@dataclass(frozen=True)
class Kernel:
    """One table-batched kernel of this rank: a module of FBGEMM that looks up several tables at once.

    ``tables`` has its ShardedEmbeddingTables, one per local shard, in order. Tables train in the backward pass, by
    FBGEMM's optimizer or by one of ours instead, and ``optimizer`` is TorchRec's view of it. ``data_parallel`` kernels
    have none: ``ReplicaOptimizer`` trains them.
    """

    module: Any
    tables: list[Any]
    data_parallel: bool = False
    optimizer: Any = None


def sharded_collections(dmp: DistributedModelParallel) -> dict[str, ShardedEmbeddingBagCollection]:
    """Return every sharded collection of the model by its path."""
    collections = {}
    for name, module in dmp.module.named_modules():
        if isinstance(module, ShardedEmbeddingBagCollection):
            collections[name] = module
    return collections


def kernels(dmp: DistributedModelParallel) -> Iterator[Kernel]:
    """Yield every kernel of this rank, in a fixed order."""
    for collection in sharded_collections(dmp).values():
        for lookup in collection._lookups:
            # TorchRec wraps the lookup of data-parallel tables in DDP, and their kernel has no optimizer.
            inner = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
            for embedding in inner._emb_modules:
                data_parallel = not hasattr(embedding, "fused_optimizer")
                optimizer = None if data_parallel else embedding.fused_optimizer
                yield Kernel(embedding.emb_module, list(embedding._config.embedding_tables), data_parallel, optimizer)


def table_group(dmp: DistributedModelParallel) -> dist.ProcessGroup | None:
    """Return the process group that shares this rank's tables."""
    return dmp._env.process_group


def dense_parameters(dmp: DistributedModelParallel) -> dict[str, nn.Parameter]:
    """Return the parameters outside the tables, by a name that does not depend on world size, DDP or torch.compile."""
    # Without the dot, a path would also match a module whose name begins like it.
    prefixes = tuple(f"{path}." for path in sharded_collections(dmp))
    parameters = {}
    for name, parameter in dmp.module.named_parameters():
        name = name.replace("_orig_mod.", "")
        if not name.startswith(prefixes):
            parameters[name] = parameter
    return parameters


def dense_table_parameters(dmp: DistributedModelParallel) -> dict[str, Tensor]:
    """Return the flat storage that ``ReplicaOptimizer`` trains, by the names of its data-parallel tables joined."""
    storage = {}
    for kernel in kernels(dmp):
        if kernel.data_parallel:
            storage["/".join(table.name for table in kernel.tables)] = kernel.module.weights
    return storage


def keep_state(module: Any, states: list[TableState]) -> None:
    """Make ``states``, by table and column, those of the kernel ``module``, for which FBGEMM has no optimizer."""
    module.table_state = states


def kept_state(module: Any) -> list[TableState] | None:
    """Return what ``keep_state`` gave ``module``; None if FBGEMM's kernel has the state."""
    states: list[TableState] | None = getattr(module, "table_state", None)
    return states


def kernel_states(kernel: Kernel, columns: Sequence[StateColumn]) -> list[TableState]:
    """Return the optimizer's state in ``kernel``, by table and column: views [rows] or [rows, dim].

    ``columns`` are those of the kernel's tables, used if FBGEMM has the state.
    """
    own_state = kept_state(kernel.module)
    if own_state is not None:
        return own_state
    if not columns:
        return [{} for _ in kernel.tables]
    names = [column.name for column in columns]
    return [dict(zip(names, state, strict=True)) for state in kernel.module.split_optimizer_states()]


def storage_of(kernel: Any) -> list[Tensor]:
    """Return by table the rows that FBGEMM's ``kernel`` computes with: [rows or slots, dim]."""
    # Call FBGEMM's own method, which returns no stand-ins.
    weights: list[Tensor] = SplitTableBatchedEmbeddingBagsCodegen.split_embedding_weights(kernel)
    return weights


def states_of(kernel: Any) -> list[list[Tensor]]:
    """Return by table of ``kernel`` the states that it computes with: [rows or slots] or [rows or slots, dim]."""
    states: list[list[Tensor]] = SplitTableBatchedEmbeddingBagsCodegen.split_optimizer_states(kernel)
    return states or [[] for _ in storage_of(kernel)]
