"""Walks over the tables of a sharded model: its kernels, and where the state of their optimizer lies.

TorchRec keeps kernels in plain lists, which ``modules()`` does not see.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.specs.optimizers import StateColumn


@dataclass(frozen=True)
class TableSpec:
    """A table: ``rows`` rows of ``dim`` float32 values.

    ``bound``: initial values are uniform in plus or minus this; None: 1 / sqrt(rows).
    """

    name: str
    rows: int
    dim: int
    bound: float | None = None

    @property
    def initial_bound(self) -> float:
        """``bound``, where there is none its default."""
        return 1.0 / math.sqrt(self.rows) if self.bound is None else self.bound


@dataclass(frozen=True)
class Kernel:
    """One table-batched kernel of this rank. ``tables``: its ShardedEmbeddingTables, one per local shard, in order.

    ``fused``: the kernel itself applies the optimizer in the backward pass; else ``ReplicaOptimizer`` does.
    ``optimizer``: TorchRec's view of the fused one.
    """

    module: Any
    tables: list[Any]
    fused: bool
    optimizer: Any = None


def sharded_collections(dmp: DistributedModelParallel) -> dict[str, ShardedEmbeddingBagCollection]:
    """Every sharded collection of the model by its path."""
    named = dmp.module.named_modules()
    return {name: module for name, module in named if isinstance(module, ShardedEmbeddingBagCollection)}


def kernels(dmp: DistributedModelParallel) -> Iterator[Kernel]:
    """Every kernel of this rank, in a fixed order."""
    for collection in sharded_collections(dmp).values():
        for lookup in collection._lookups:
            inner = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
            for embedding in inner._emb_modules:
                fused = hasattr(embedding, "fused_optimizer")
                optimizer = embedding.fused_optimizer if fused else None
                yield Kernel(embedding.emb_module, list(embedding._config.embedding_tables), fused, optimizer)


def table_group(dmp: DistributedModelParallel) -> dist.ProcessGroup | None:
    """The process group that shares this rank's tables."""
    return dmp._env.process_group


def dense_parameters(dmp: DistributedModelParallel) -> dict[str, nn.Parameter]:
    """The parameters outside the tables, by a name that does not depend on world size, DDP or torch.compile."""
    prefixes = tuple(f"{path}." for path in sharded_collections(dmp))
    named = ((name.replace("_orig_mod.", ""), p) for name, p in dmp.module.named_parameters())
    return {name: p for name, p in named if not name.startswith(prefixes)}


def dense_table_parameters(dmp: DistributedModelParallel) -> dict[str, Tensor]:
    """The flat storage of the data-parallel tables (what ``ReplicaOptimizer`` trains), by the tables' names joined."""
    return {
        "/".join(table.name for table in kernel.tables): kernel.module.weights
        for kernel in kernels(dmp)
        if not kernel.fused
    }


TableState = dict[str, Tensor]


def keep_state(module: Any, states: list[TableState]) -> None:
    """Make ``states``, by table and column, those of the kernel ``module``."""
    module.table_state = states


def kept_state(module: Any) -> list[TableState] | None:
    """What ``keep_state`` gave ``module``; None where FBGEMM's kernel has the state."""
    states: list[TableState] | None = getattr(module, "table_state", None)
    return states


def kernel_states(kernel: Kernel, columns: Sequence[StateColumn]) -> list[TableState]:
    """The optimizer's state in ``kernel``, by table and column: views [rows] or [rows, dim].

    It lies in FBGEMM's kernel, or where that has no such optimizer in tensors of ours beside it (``keep_state``).
    ``columns``: of its tables, where FBGEMM has the state.
    """
    kept = kept_state(kernel.module)
    if kept is not None:
        return kept
    if not columns:
        return [{} for _ in kernel.tables]
    names = [column.name for column in columns]
    return [dict(zip(names, each, strict=True)) for each in kernel.module.split_optimizer_states()]
