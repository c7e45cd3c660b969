"""The dot interaction of DLRM, written so that neither direction scatters.

PyTorch's own backward of an index selection adds into a zero tensor element by element, which costs more than the
batched products around it. Here both directions only read and copy.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn


def _maps(vectors: int, dim: int) -> tuple[Tensor, Tensor]:
    """Positions of the pairs i > j in a flat [V, V] matrix, and for each of its cells the output column that feeds it.

    Cells of the diagonal point at column 0, which the backward pass replaces by zeros.
    """
    low = torch.tril_indices(vectors, vectors, -1)
    pairs = low[0] * vectors + low[1]
    columns = dim + torch.arange(pairs.numel())
    cells = torch.zeros(vectors, vectors, dtype=torch.int64)
    cells[low[0], low[1]] = columns
    cells[low[1], low[0]] = columns
    return pairs, cells.flatten()


class _DotInteraction(torch.autograd.Function):
    """Eager and compiled code copy in different ways, each the fastest one measured (README)."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, pairs: Tensor, cells: Tensor) -> Tensor:
        ctx.save_for_backward(vectors, cells)
        products = torch.bmm(vectors, vectors.mT)
        flat = products.flatten(1)
        if torch.compiler.is_compiling():
            return torch.cat([vectors[:, 0], flat.index_select(1, pairs)], dim=1)
        dim = vectors.shape[2]
        out = flat.new_empty(len(flat), dim + pairs.numel())
        out[:, :dim] = vectors[:, 0]
        _gather(flat, pairs, out[:, dim:])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        vectors, cells = ctx.saved_tensors
        count, dim = vectors.shape[1:]
        compiling = torch.compiler.is_compiling()
        if compiling:
            symmetric = grad.index_select(1, cells)
        else:
            symmetric = _gather(grad, cells, grad.new_empty(len(grad), cells.numel()))
        symmetric = symmetric.view(-1, count, count)
        symmetric.diagonal(dim1=1, dim2=2).zero_()
        result = torch.bmm(symmetric, vectors.to(grad.dtype))  # under autocast the products are 16-bit floats
        result[:, 0] += grad[:, :dim]
        return result, None, None


def _gather(values: Tensor, columns: Tensor, out: Tensor) -> Tensor:
    """Fill ``out`` with ``values[:, columns]``. Of 16-bit floats PyTorch would gather through a float32 copy."""
    same, into = values, out
    if values.dtype in (torch.bfloat16, torch.float16):
        same, into = values.view(torch.int16), out.view(torch.int16)
    torch.gather(same, 1, columns.expand(len(same), -1), out=into)
    return out


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
