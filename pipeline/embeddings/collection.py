"""Building the embedding tables of a dataset, and what is done with the embeddings that a collection returns."""

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
from pipeline.records.dataset import DatasetSchema, EmbeddedTable

_POOLINGS = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}


def build_collection(
    schema: DatasetSchema, model: ModelConfig, device: torch.device, *, weighted: bool | None = None
) -> EmbeddingBagCollection:
    """The float32 tables of the sparse features, of the widths and poolings that ``model`` says.

    ``device`` may be meta: sharding allocates the real storage and ``RowAccess.initialise`` fills it. ``weighted``:
    lookups carry weights (None: where any feature has them). Tables of sequences are those of ``event_collection``.
    """
    tables = [_bag(table, table.features, model) for table in schema.tables if not table.events]
    any_weighted = any(column.weighted for column in schema.sparse)
    return EmbeddingBagCollection(
        tables=tables, device=device, is_weighted=any_weighted if weighted is None else weighted
    )


def event_collection(
    schema: DatasetSchema, model: ModelConfig, device: torch.device, *, weighted: bool | None = None
) -> EmbeddingBagCollection:
    """The tables of sequences, looked up as ``event_lookups`` says: a key a table, which has the table's name.

    ``weighted``: as in ``build_collection``.
    """
    tables = [table for table in schema.tables if table.events]
    return EmbeddingBagCollection(
        tables=[_bag(table, (table.name,), model) for table in tables],
        device=device,
        is_weighted=any(table.weighted for table in tables) if weighted is None else weighted,
    )


def _bag(table: EmbeddedTable, keys: Sequence[str], model: ModelConfig) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=table.name,
        embedding_dim=model.dim_of(table.name),
        num_embeddings=table.rows,
        feature_names=[*keys],
        pooling=_POOLINGS[model.table(table.name).pooling],
        weight_init_max=model.table(table.name).init_bound,
    )


class _Reorder(torch.autograd.Function):
    """index_select along dim 1 whose backward pass selects by the inverse order; PyTorch's own backward scatters."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return values.index_select(1, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(1, ctx.saved_tensors[0]), None, None


@lru_cache(maxsize=16)
def _order(given: tuple[str, ...], wanted: tuple[str, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    place = {name: i for i, name in enumerate(given)}
    order = torch.tensor([place[name] for name in wanted], device=device)
    return order, torch.argsort(order)


def pooled_stack(pooled: KeyedTensor, features: Sequence[str]) -> Tensor:
    """The embeddings of ``features`` in that order: [B, F, D].

    A sharded collection returns its features in the order of its shards, so ``values()`` alone is
    wrong. All widths must be equal and ``features`` must be all keys, as ``build_collection`` makes them.
    """
    values = pooled.values()
    stacked = values.view(values.shape[0], len(features), -1)
    return reordered(stacked, pooled.keys(), features)


def concat_features(pooled: KeyedTensor, features: Sequence[str]) -> Tensor:
    """The embeddings of ``features``, of any widths, one beside the other in that order: [B, sum of widths]."""
    if pooled.keys() == [*features]:
        return pooled.values()
    parts = dict(zip(pooled.keys(), pooled.values().split(pooled.length_per_key(), dim=1), strict=True))
    return torch.cat([parts[name] for name in features], dim=1)


def feature_vectors(
    pooled: KeyedTensor | None, apart: Mapping[str, Tensor] | None, features: Sequence[str], *, even: bool
) -> Tensor:
    """The embeddings of ``features`` in that order: [B, F, D], or side by side where widths differ (not ``even``).

    ``apart``: those that ``pooled`` lacks, [B, w] each.
    """
    if apart:
        every = {**({} if pooled is None else pooled.to_dict()), **apart}
        vectors = [every[name] for name in features]
        return torch.stack(vectors, dim=1) if even else torch.cat(vectors, dim=1)
    assert pooled is not None
    return pooled_stack(pooled, features) if even else concat_features(pooled, features)


def reordered(stacked: Tensor, given: Sequence[str], wanted: Sequence[str]) -> Tensor:
    """``stacked`` [B, F, D], whose vectors are in the order of the names ``given``, in the order ``wanted``."""
    given, wanted = tuple(given), tuple(wanted)
    if given == wanted:
        return stacked
    return cast(Tensor, _Reorder.apply(stacked, *_order(given, wanted, stacked.device)))


class _Penalised(torch.autograd.Function):
    """L2 through the gradient, alike for every tier, sharding and optimizer."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(embeddings, factors)
        return embeddings.view_as(embeddings)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        embeddings, factors = ctx.saved_tensors
        return torch.addcmul(grads[0], embeddings, factors.view(-1, *[1] * (embeddings.dim() - 1))), None


def penalised(embeddings: Tensor, factors: Tensor) -> Tensor:
    """``embeddings`` as they are; backward, each gets the gradient of factor [B] / 2 times its squared norm.

    They are [B, F, D], or side by side [B, sum of widths].
    The penalty reaches the rows that a batch looks up, whatever holds and trains them, and is not part of the loss
    that is reported. Of an embedding that is a sum of several rows, the sum is penalised.
    """
    return cast(Tensor, _Penalised.apply(embeddings, factors))
