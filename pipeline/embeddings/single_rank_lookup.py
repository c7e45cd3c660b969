"""Lookups of one rank that has all tables: ids go straight to the kernels, and pooled embeddings straight back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from pipeline.embeddings.compiled_tables import CompiledTables
from pipeline.embeddings.tables import sharded_collections
from pipeline.embeddings.threaded_lookup import ThreadedLookup

# Those whose exchange between ranks changes nothing on one rank; the others split rows or columns.
_WHOLE = {"table_wise", "data_parallel"}


def without_exchange(dmp: DistributedModelParallel) -> bool:
    """Have ``dmp`` on one rank call its kernels without TorchRec's exchange of ids and embeddings.

    TorchRec sends them through collectives even to the same rank. Returns False, and changes nothing, where the model
    has tables whose exchange does more.
    """
    collections = list(sharded_collections(dmp).values())
    if not all(_WHOLE.issuperset(collection._sharding_types) for collection in collections):
        return False
    for collection in collections:
        collection.forward = _OneRank(collection)
    return True


def looked_up(dmp: DistributedModelParallel) -> list[nn.Module]:
    """The modules that look up tables, one after the other: kernels, and ``ThreadedLookup``s of several."""
    modules: list[nn.Module] = []
    for collection in sharded_collections(dmp).values():
        for lookup in getattr(collection.forward, "lookups", collection._lookups):
            inner = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
            modules += (
                [inner] if isinstance(inner, ThreadedLookup) else [each.emb_module for each in inner._emb_modules]
            )
    return modules


def _on_threads(lookup: Any) -> Any:
    """``lookup``, its kernels side by side where it has several fused ones and the process has threads for them.

    Compiled tables use all threads themselves.
    """
    several = not isinstance(lookup, DistributedDataParallel) and len(lookup._emb_modules) > 1
    if (
        several
        and torch.get_num_threads() > 1
        and all(hasattr(each, "fused_optimizer") for each in lookup._emb_modules)
        and not any(isinstance(each.emb_module.forward, CompiledTables) for each in lookup._emb_modules)
    ):
        return ThreadedLookup(lookup._emb_modules, lookup._feature_splits)
    return lookup


class _OneRank:
    """The forward pass of ``collection``. The first one goes through TorchRec's, which settles the order of features.

    It also checks the first batch.
    """

    def __init__(self, collection: ShardedEmbeddingBagCollection) -> None:
        self._collection, self._exchanging = collection, collection.forward
        self.lookups = [_on_threads(lookup) for lookup in collection._lookups]

    def __call__(self, features: KeyedJaggedTensor) -> Any:
        of = self._collection
        if of._has_uninitialized_input_dist:
            return self._exchanging(features)
        with torch.no_grad():
            if of._has_features_permute:
                features = features.permute(of._features_order, of._features_order_tensor)
            parts = features.split(of._feature_splits) if len(self.lookups) > 1 else [features]
        pooled = [lookup(part) for lookup, part in zip(self.lookups, parts, strict=True)]
        values = pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)
        return KeyedTensor(keys=of._embedding_names, length_per_key=of._embedding_dims, values=values, key_dim=1)
