"""Lookups of a single rank with all tables: no exchange between ranks, and kernels in parallel on threads.

Ids go straight to the kernels, and pooled embeddings straight back. FBGEMM's CPU kernels use one thread each, so the
tables are divided among several kernels, and a kernel's forward and backward pass run in a thread of a pool. Tables do
not share rows, so the results are bitwise the same as one after the other.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from pipeline.embeddings.compiled_tables import CompiledTables
from pipeline.embeddings.tables import sharded_collections

# Sharding types whose exchange changes nothing on one rank; the others split rows or columns.
_WHOLE_TABLE_SHARDINGS = {"table_wise", "data_parallel"}
# Tables with different values of this key get separate kernels; TorchRec drops the key before it builds them.
_BATCH_KEY = "_batch_key"


def separate_kernel(parameters: Sequence[nn.Parameter], kind: str) -> None:
    """Have TorchRec build a separate kernel of the tables with these ``parameters``, which are of one ``kind``.

    Call it after the optimizer is fused and before the tables are sharded.
    """
    for parameter in parameters:
        settings = []
        for kwargs in parameter._optimizer_kwargs:  # type: ignore[attr-defined]
            settings.append({**kwargs, _BATCH_KEY: kwargs.get(_BATCH_KEY, "") + kind})
        parameter._optimizer_kwargs = settings  # type: ignore[attr-defined]


def divide_tables(parameters: Sequence[nn.Parameter], parts: int) -> None:
    """Have TorchRec build up to ``parts`` kernels of tables. Call it between fusing the optimizer and sharding.

    Args:
        parameters: The parameters of the tables; neighbours stay together.
    """
    # Parts differ by at most one table: their kernels run at the same time, and a step waits for the slowest.
    parts = min(parts, len(parameters))
    for number, parameter in enumerate(parameters):
        separate_kernel([parameter], f"part {number * parts // len(parameters)}")


def bypass_exchange(dmp: DistributedModelParallel) -> bool:
    """Make ``dmp`` on one rank call its kernels without TorchRec's exchange of ids and embeddings.

    TorchRec sends them through collectives even to the same rank. Returns False, and changes nothing, if the model has
    tables whose exchange does more.
    """
    collections = list(sharded_collections(dmp).values())
    if not all(_WHOLE_TABLE_SHARDINGS.issuperset(collection._sharding_types) for collection in collections):
        return False
    for collection in collections:
        collection.forward = _LocalForward(collection)
    return True


def looked_up(dmp: DistributedModelParallel) -> list[nn.Module]:
    """Return the modules that look up tables one after the other: kernels, and ``ThreadedLookup``s of several."""
    modules: list[nn.Module] = []
    for collection in sharded_collections(dmp).values():
        for lookup in getattr(collection.forward, "lookups", collection._lookups):
            inner = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
            if isinstance(inner, ThreadedLookup):
                modules.append(inner)
                continue
            for embedding in inner._emb_modules:
                modules.append(embedding.emb_module)
    return modules


class _LocalForward:
    """The forward pass of ``collection`` without an exchange."""

    def __init__(self, collection: ShardedEmbeddingBagCollection) -> None:
        self._collection, self._torchrec_forward = collection, collection.forward
        self.lookups = []
        for lookup in collection._lookups:
            embeddings = [] if isinstance(lookup, DistributedDataParallel) else list(lookup._emb_modules)
            single_threaded = 0
            for embedding in embeddings:
                # Compiled tables use all threads themselves.
                compiled = isinstance(embedding.emb_module.forward, CompiledTables)
                single_threaded += hasattr(embedding, "fused_optimizer") and not compiled
            if single_threaded == len(embeddings) > 1 and torch.get_num_threads() > 1:
                lookup = ThreadedLookup(embeddings, lookup._feature_splits)
            self.lookups.append(lookup)

    def __call__(self, features: KeyedJaggedTensor) -> Any:
        collection = self._collection
        if collection._has_uninitialized_input_dist:
            # On the first batch, TorchRec checks the features and finds their order.
            return self._torchrec_forward(features)
        with torch.no_grad():
            if collection._has_features_permute:
                features = features.permute(collection._features_order, collection._features_order_tensor)
            parts = [features]
            if len(self.lookups) > 1:
                parts = features.split(collection._feature_splits)
        pooled = [lookup(part) for lookup, part in zip(self.lookups, parts, strict=True)]
        # The embeddings of a single lookup need no copy.
        values = pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)
        return KeyedTensor(
            keys=collection._embedding_names, length_per_key=collection._embedding_dims, values=values, key_dim=1
        )


class ThreadedLookup(nn.Module):
    """forward(features) -> pooled embeddings [B, sum of widths] of ``kernels``, which run at once, a thread each.

    ``splits`` has the number of features of each kernel.
    """

    def __init__(self, kernels: Sequence[nn.Module], splits: Sequence[int]) -> None:
        super().__init__()
        # Use a plain list, since the kernels' owner has them as modules.
        self._kernels, self._splitter = list(kernels), _FeatureSplitter(splits)
        self._pool = ThreadPoolExecutor(len(kernels), thread_name_prefix="nightjar-lookup")
        self._anchor = torch.zeros(0, requires_grad=True)
        _start_threads(self._pool, len(kernels))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Look up ``features``, which are those of all kernels in their order."""
        training = torch.is_grad_enabled()

        def look_up(kernel: nn.Module, features: KeyedJaggedTensor) -> Tensor:
            with torch.set_grad_enabled(training):
                return cast(Tensor, kernel(features))

        with torch.profiler.record_function("nightjar::lookups"):
            outputs = list(self._pool.map(look_up, self._kernels, self._splitter(features)))
        return cast(Tensor, _Joined.apply(self._anchor, self._pool, outputs))


class _FeatureSplitter:
    """Splits features by kernel. Batches with one id per sample share their lengths, which are split only once."""

    def __init__(self, splits: Sequence[int]) -> None:
        self._splits = list(splits)
        self._lengths: Tensor | None = None
        self._parts: list[KeyedJaggedTensor] = []
        self._ends: list[int] = []
        self._offsets: list[Tensor] = []

    def __call__(self, features: KeyedJaggedTensor) -> list[KeyedJaggedTensor]:
        if features.weights_or_none() is not None:
            return features.split(self._splits)
        if features.lengths() is not self._lengths:
            self._parts = features.split(self._splits)
            self._ends = list(itertools.accumulate(part.values().numel() for part in self._parts))
            # The kernels require int64.
            self._offsets = [part.offsets().long() for part in self._parts]
            self._lengths = features.lengths()
            return self._parts
        values = features.values().tensor_split(self._ends[:-1])
        parts = []
        for part, offsets, ids in zip(self._parts, self._offsets, values, strict=True):
            parts.append(
                KeyedJaggedTensor(part.keys(), ids, lengths=part.lengths(), offsets=offsets, stride=part.stride())
            )
        return parts


class _Joined(torch.autograd.Function):
    # Concatenates the outputs; the backward pass runs their own backward passes in the pool.

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, pool: ThreadPoolExecutor, outputs: list[Tensor]) -> Tensor:
        ctx.pool, ctx.outputs = pool, outputs
        return torch.cat([output.detach() for output in outputs], dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        parts = grads[0].split([output.shape[1] for output in ctx.outputs], dim=1)
        list(ctx.pool.map(torch.autograd.backward, ctx.outputs, parts))
        return None, None, None


def _start_threads(pool: ThreadPoolExecutor, count: int) -> None:
    threads, barrier = torch.get_num_threads(), threading.Barrier(count)

    def start() -> None:
        # Operations in these threads use no further threads. The barrier makes the pool start all of them.
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        barrier.wait()

    # Submit all before waiting for the first, since no thread passes the barrier alone.
    started = [pool.submit(start) for _ in range(count)]
    for future in started:
        future.result()
    # ``set_num_threads`` in one thread also applies to threads that begin later, so restore the number.
    torch.set_num_threads(threads)
