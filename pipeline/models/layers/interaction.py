"""The dot interaction of DLRM, written so that neither direction scatters.

PyTorch's own backward of an index selection adds into a zero tensor element by element, which costs more than the
batched products around it. Here both directions only read and copy.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional


def _maps(vectors: int, dim: int) -> tuple[Tensor, Tensor]:
    """Positions of the pairs i > j in a flat [V, V] matrix, and for each of its cells the output column that feeds it.

    Cells of the diagonal point at one column past the output, which the backward pass pads with zeros.
    """
    low = torch.tril_indices(vectors, vectors, -1)
    pairs = low[0] * vectors + low[1]
    columns = dim + torch.arange(pairs.numel())
    cells = torch.full((vectors, vectors), dim + pairs.numel())
    cells[low[0], low[1]] = columns
    cells[low[1], low[0]] = columns
    return pairs, cells.flatten()


class _DotInteraction(torch.autograd.Function):
    """Eager and compiled code copy in different ways, each the fastest one measured (README)."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, pairs: Tensor, cells: Tensor) -> Tensor:
        count = vectors.shape[1]
        ctx.save_for_backward(vectors, cells)
        products = torch.bmm(vectors, vectors.mT)
        if torch.compiler.is_compiling():
            return torch.cat([vectors[:, 0], products.flatten(1).index_select(1, pairs)], dim=1)
        return torch.cat([vectors[:, 0], *(products[:, i, :i] for i in range(1, count))], dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        vectors, cells = ctx.saved_tensors
        count, dim = vectors.shape[1:]
        padded = functional.pad(grad, (0, 1))
        if torch.compiler.is_compiling():
            symmetric = padded.index_select(1, cells)
        else:
            symmetric = torch.gather(padded, 1, cells.expand(len(padded), -1))
        result = torch.bmm(symmetric.view(-1, count, count), vectors)
        return torch.cat([result[:, :1] + grad[:, None, :dim], result[:, 1:]], dim=1), None, None


class DotInteraction(nn.Module):
    """forward(vectors [B, V, D]) -> the first vector and the dot products of all pairs: [B, D + V * (V - 1) / 2]."""

    pairs: Tensor
    cells: Tensor

    def __init__(self, vectors: int, dim: int) -> None:
        super().__init__()
        self.width = dim + vectors * (vectors - 1) // 2
        pairs, cells = _maps(vectors, dim)
        self.register_buffer("pairs", pairs, persistent=False)
        self.register_buffer("cells", cells, persistent=False)

    def forward(self, vectors: Tensor) -> Tensor:
        """[B, D + V * (V - 1) / 2] in the dtype of ``vectors``; pairs in the order (1,0), (2,0), (2,1), ..."""
        return cast(Tensor, _DotInteraction.apply(vectors, self.pairs, self.cells))
