"""Building the embedding tables of a dataset, and reading what a sharded collection returns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.optim import SGD
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedTensor

from pipeline.records import DatasetSchema

ADAGRAD_EPS = 1e-8


def build_collection(
    schema: DatasetSchema, dim: int, device: torch.device, *, weighted: bool | None = None
) -> EmbeddingBagCollection:
    """One float32 sum-pooled table per sparse feature, of the feature's name; weighted (None) if any feature is.

    ``device`` may be meta: sharding allocates the real storage and ``RowAccess.initialise`` fills it.
    """
    tables = [
        EmbeddingBagConfig(
            name=column.name,
            embedding_dim=dim,
            num_embeddings=column.rows,
            feature_names=[column.name],
            pooling=PoolingType.SUM,
        )
        for column in schema.sparse
    ]
    any_weighted = any(column.weighted for column in schema.sparse)
    return EmbeddingBagCollection(
        tables=tables, device=device, is_weighted=any_weighted if weighted is None else weighted
    )


def apply_fused_optimizer(collection: EmbeddingBagCollection, lr: float, optimizer: str = "rowwise_adagrad") -> None:
    """Give every table ``rowwise_adagrad`` or ``sgd`` at rate ``lr``, fused into the backward pass once sharded.

    No others: TorchRec's CPU kernels have no Adam, and silently ignore weight decay and max_norm.
    """
    kinds = {"rowwise_adagrad": (RowWiseAdagrad, {"lr": lr, "eps": ADAGRAD_EPS}), "sgd": (SGD, {"lr": lr})}
    kind, settings = kinds[optimizer]
    _apply_optimizer_in_backward(kind, collection.parameters(), optimizer_kwargs=settings)


def has_state(parameter: Any) -> bool:
    """Whether the optimizer that ``apply_fused_optimizer`` gave a table's ``parameter`` keeps sums of its gradients."""
    return parameter._optimizer_classes[0] is not SGD


class _Reorder(torch.autograd.Function):
    """index_select along dim 1 whose backward is the inverse selection; PyTorch's own one scatters."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return values.index_select(1, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(1, ctx.saved_tensors[0]), None, None


@lru_cache(maxsize=16)
def _order(found: tuple[str, ...], wanted: tuple[str, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    place = {name: i for i, name in enumerate(found)}
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


def reordered(stacked: Tensor, found: Sequence[str], wanted: Sequence[str]) -> Tensor:
    """``stacked`` [B, F, D], whose vectors have the names ``found``, in the order ``wanted``."""
    found, wanted = tuple(found), tuple(wanted)
    if found == wanted:
        return stacked
    return cast(Tensor, _Reorder.apply(stacked, *_order(found, wanted, stacked.device)))
