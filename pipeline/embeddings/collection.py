"""Building the embedding tables of a dataset, and what is done with the embeddings that a collection returns.

A table is an ``nn.EmbeddingBag``: a sample may have several ids of a feature, and a lookup *pools* their rows to one
embedding, the sum or the mean. TorchRec's collection looks up all tables at once and returns a ``KeyedTensor``: the
pooled embeddings of all features side by side, [B, sum of widths], with their names and widths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedTensor

from pipeline.config.model import ModelConfig
from pipeline.records.dataset import DatasetSchema, TableSchema

_POOLINGS = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}


def build_collection(
    schema: DatasetSchema, model: ModelConfig, device: torch.device, *, weighted: bool | None = None
) -> EmbeddingBagCollection:
    """Build the float32 tables of the sparse features; those of sequences are in ``event_collection``.

    Args:
        schema: The dataset's features and tables.
        model: The widths and poolings of the tables.
        device: May be meta: sharding allocates the real storage and ``RowAccess.initialise`` fills it.
        weighted: Whether lookups carry weights; None: if any feature has them.
    """
    if weighted is None:
        weighted = any(column.weighted for column in schema.sparse)
    tables = [_bag_config(table, table.features, model) for table in schema.tables if not table.events]
    return EmbeddingBagCollection(tables=tables, device=device, is_weighted=weighted)


def event_collection(
    schema: DatasetSchema, model: ModelConfig, device: torch.device, *, weighted: bool | None = None
) -> EmbeddingBagCollection:
    """Build the tables of sequences, looked up by ``event_lookups``: one key per table, which is the table's name.

    The arguments are those of ``build_collection``.
    """
    tables = [table for table in schema.tables if table.events]
    if weighted is None:
        weighted = any(table.weighted for table in tables)
    configs = [_bag_config(table, (table.name,), model) for table in tables]
    return EmbeddingBagCollection(tables=configs, device=device, is_weighted=weighted)


def _bag_config(table: TableSchema, keys: Sequence[str], model: ModelConfig) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=table.name,
        embedding_dim=model.dim_of(table.name),
        num_embeddings=table.rows,
        # TorchRec calls the keys of a lookup features; a table of sequences has one key, its own name.
        feature_names=[*keys],
        pooling=_POOLINGS[model.table(table.name).pooling],
        weight_init_max=model.table(table.name).init_bound,
    )


def feature_vectors(
    pooled: KeyedTensor | None, separate: Mapping[str, Tensor] | None, features: Sequence[str], *, even: bool
) -> Tensor:
    """Return the embeddings of ``features`` in that order.

    Args:
        pooled: The output of a collection.
        separate: The embeddings that ``pooled`` lacks, by feature: [B, width] each.
        features: The features wanted.
        even: Whether all embeddings have one width: then they are returned as [B, F, D], else [B, sum of widths].
    """
    if separate:
        by_name = dict(separate)
        if pooled is not None:
            by_name = {**pooled.to_dict(), **by_name}
    else:
        assert pooled is not None
        if even:
            return pooled_stack(pooled, features)
        if pooled.keys() == [*features]:
            return pooled.values()
        by_name = dict(zip(pooled.keys(), pooled.values().split(pooled.length_per_key(), dim=1), strict=True))
    vectors = [by_name[name] for name in features]
    if even:
        return torch.stack(vectors, dim=1)
    return torch.cat(vectors, dim=1)


def pooled_stack(pooled: KeyedTensor, features: Sequence[str]) -> Tensor:
    """Return the embeddings of ``features`` in that order: [B, F, D].

    Args:
        pooled: The output of a collection, with embeddings of one width.
        features: All keys of ``pooled``, as ``build_collection`` makes them.
    """
    # A sharded collection returns its features in the order of its shards, so ``values()`` alone would be wrong.
    values = pooled.values()
    stacked = values.view(values.shape[0], len(features), -1)
    return reordered(stacked, pooled.keys(), features)


def reordered(stacked: Tensor, given: Sequence[str], wanted: Sequence[str]) -> Tensor:
    """Return ``stacked`` [B, F, D], whose vectors are in the order of the names ``given``, in the order ``wanted``."""
    given, wanted = tuple(given), tuple(wanted)
    if given == wanted:
        return stacked
    return cast(Tensor, _Reorder.apply(stacked, *_permutation(given, wanted, stacked.device)))


@lru_cache(maxsize=16)
def _permutation(given: tuple[str, ...], wanted: tuple[str, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    # The result is cached on the device, or else the host would wait for a copy in every step.
    order = torch.tensor(list(map(given.index, wanted)), device=device)
    return order, torch.argsort(order)


class _Reorder(torch.autograd.Function):
    """index_select along dim 1 whose backward pass selects by the inverse order; PyTorch's own backward scatters."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return values.index_select(1, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(1, ctx.saved_tensors[0]), None, None


def penalised(embeddings: Tensor, factors: Tensor) -> Tensor:
    """Return ``embeddings`` unchanged; their backward pass adds the gradient of an L2 penalty.

    The penalty reaches the rows that a batch looks up, and is not part of the reported loss. If an embedding is a sum
    of several rows, the sum is penalised.

    Args:
        embeddings: [B, F, D] or [B, sum of widths].
        factors: [B]. A sample's penalty is half of its factor times the squared norm of its embeddings.
    """
    return cast(Tensor, _Penalised.apply(embeddings, factors))


class _Penalised(torch.autograd.Function):
    # Acting on the gradient makes the penalty the same for every tier, sharding and optimizer.

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(embeddings, factors)
        return embeddings.view_as(embeddings)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        embeddings, factors = ctx.saved_tensors
        return torch.addcmul(grads[0], embeddings, factors.view(-1, *[1] * (embeddings.dim() - 1))), None
