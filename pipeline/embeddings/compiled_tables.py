"""Tables on a CPU that compiled kernels look up and train on all threads, in the memory of FBGEMM's kernel.

FBGEMM's kernel stays the owner of weights, state and learning rate, and hooks see the same calls. What the compiled
kernels do not accept (weighted ids, samples without a common batch size) goes through FBGEMM. Every row's gradient is
summed in the order of its lookups, so the result depends neither on the number of threads nor on the tier.

These kernels are ``steps``. Tables whose optimizer FBGEMM lacks on a CPU are trained by others, ``rowsteps``
(``table_training.RowOptimizer``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, cast

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.core.errors import GuardError
from pipeline.core.kernels import load_kernels
from pipeline.embeddings.table_optimizers import TableRules
from pipeline.embeddings.tables import Kernel, kernels, sharded_collections, states_of, storage_of
from pipeline.specs.optimizers import TableOptimizer

# The limit of rows in a table and of ids in a lookup: the kernels sort them as int32.
_MAX_IDS = 1 << 31


def compiled_on(optimizer: TableOptimizer, device: str) -> bool:
    """Return whether the compiled kernels train tables by ``optimizer`` on ``device``."""
    return device == "cpu" and bool(optimizer.compiled) and load_kernels("steps") is not None


def compile_tables(
    dmp: DistributedModelParallel, rules: TableRules, device: str, weighted: Collection[str] = ()
) -> None:
    """Make the compiled kernels look up and train the tables in fused kernels where they can; see ``compiled_on``.

    FBGEMM keeps the ``weighted`` tables, whose ids have weights.
    """
    for kernel in kernels(dmp):
        optimizer = rules.of(kernel.tables[0].name)
        if kernel.data_parallel or kernel.tables[0].name in weighted or not compiled_on(optimizer, device):
            continue
        if max(map(len, storage_of(kernel.module))) < _MAX_IDS:
            kernel.module.forward = CompiledTables(kernel, optimizer, load_kernels("steps"))


def narrow_exchanged(dmp: DistributedModelParallel, dtype: torch.dtype) -> None:
    """Make compiled kernels round the embeddings that ranks exchange to ``dtype``, and take gradients in it.

    Only in training, and only for tables whose embeddings are not summed on the way. Results are the same to the bit
    if whatever reads the embeddings rounds them first.
    """
    for collection in sharded_collections(dmp).values():
        for sharding, lookup in zip(collection._sharding_types, collection._lookups, strict=True):
            if sharding not in ("table_wise", "column_wise"):
                continue
            for embedding in lookup._emb_modules:
                if isinstance(embedding.emb_module.forward, CompiledTables):
                    embedding.emb_module.forward.trained_dtype = dtype


class CompiledTables:
    """The forward pass of ``kernel``: (ids [n], offsets [features * b + 1]) -> pooled embeddings [b, sum of widths].

    Its backward pass trains the rows by ``optimizer``. ``trained_dtype`` is the dtype of embeddings and gradients in
    training: float32 or bf16.
    """

    def __init__(self, kernel: Kernel, optimizer: TableOptimizer, steps: Any) -> None:
        self._module = kernel.module
        self._fbgemm: Callable[..., Tensor] = kernel.module.forward
        self._eps = optimizer.fused()[1]["eps"]
        self._weights = storage_of(kernel.module)
        self._names: list[str] = []
        self._table_of_feature: list[int] = []
        for number, table in enumerate(kernel.tables):
            self._names.append(table.name)
            self._table_of_feature += [number] * len(table.feature_names)
        states = [state[0] for state in states_of(kernel.module)]
        mean = kernel.module.pooling_mode == PoolingMode.MEAN
        self._tables = steps.tables(self._weights, states, self._table_of_feature, mean=mean)
        self._train: Callable[..., None] = getattr(self._tables, optimizer.compiled)
        self.anchor = torch.zeros(0, requires_grad=True)
        self.trained_dtype = torch.float32

    def __call__(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Return the pooled embeddings; GuardError if a row number is outside of its table."""
        supported = (
            per_sample_weights is None
            and not kwargs
            and indices.dtype == offsets.dtype == torch.int64
            and indices.is_contiguous()
            and offsets.is_contiguous()
            and indices.numel() < _MAX_IDS
        )
        if not supported:
            return self._fbgemm(indices, offsets, per_sample_weights, **kwargs)
        dtype = self.trained_dtype if torch.is_grad_enabled() else torch.float32
        return cast(Tensor, _LookUp.apply(self.anchor, self, indices, offsets, dtype))

    def look_up(self, indices: Tensor, offsets: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the pooled embeddings as ``dtype``, without a backward pass."""
        pooled: Tensor | None = self._tables.look_up(indices, offsets, dtype)
        if pooled is not None:
            return pooled
        # The kernels only report that some row is outside of its table, so find out which one.
        batch = (offsets.numel() - 1) // len(self._table_of_feature)
        for feature, table in enumerate(self._table_of_feature):
            ids = indices[offsets[feature * batch] : offsets[(feature + 1) * batch]]
            rows = len(self._weights[table])
            wrong = ids[(ids < 0) | (ids >= rows)]
            if len(wrong):
                raise GuardError(
                    f"table {self._names[table]!r}: row {int(wrong[0])} is looked up, expected 0 to {rows - 1}",
                    hint="ingest the data again: stages=[ingest] force=true",
                )
        raise GuardError("a row outside of its table is looked up", hint="ingest the data again")

    def learn(self, indices: Tensor, offsets: Tensor, gradient: Tensor) -> None:
        """Train the rows by the ``gradient`` of the pooled embeddings."""
        self._train(indices, offsets, gradient.contiguous(), self._module.get_learning_rate(), self._eps)


class _LookUp(torch.autograd.Function):
    # ``anchor`` requires a gradient: without such an input autograd would not call the backward pass, which trains.

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, tables: CompiledTables, indices: Tensor, offsets: Tensor, dtype: torch.dtype
    ) -> Tensor:
        ctx.tables, ctx.lookup = tables, (indices, offsets)
        return tables.look_up(indices, offsets, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None, None]:
        ctx.tables.learn(*ctx.lookup, grads[0])
        return None, None, None, None, None
