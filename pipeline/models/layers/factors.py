"""The second-order term of a factorisation machine (Rendle 2010), and weights that ids have of their own."""

from __future__ import annotations

from torch import Tensor


def pair_products(vectors: Tensor) -> Tensor:
    """The sum of the dot products of all pairs of vectors [B, m, D]: [B], by the square of the sum (lemma 3.1)."""
    return 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)


def with_own_weights(embeddings: Tensor, count: int = 1) -> tuple[Tensor, Tensor]:
    """The first ``count`` values of all embeddings [B, V, D], added up over V: [B, count]; and the rest [B, V, D - c].

    An embedding's first values are weights of the id itself, as a table of width ``count`` would hold them. They share
    the row's optimizer state with the rest of the row.
    """
    return embeddings[:, :, :count].sum(1), embeddings[:, :, count:]
