"""Interactions of feature vectors: dot products, crosses, bilinear and factorised forms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeline.models.layers.perceptron import Logit, compute_dtype, mlp
from pipeline.models.operation_counter import counts_as_one


def pair_products(vectors: Tensor) -> Tensor:
    """Return the sum of the dot products of all pairs of ``vectors`` [B, m, D]: [B]."""
    # Use the square of the sum: the second-order term of a factorisation machine (Rendle 2010, lemma 3.1).
    return 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)


def with_own_weights(embeddings: Tensor, count: int = 1) -> tuple[Tensor, Tensor]:
    """Separate the ids' own weights from their embeddings.

    An embedding's first values are weights of the id itself, as a table of width ``count`` would hold them. They share
    the row's optimizer state with the rest of the row.

    Args:
        embeddings: [B, V, D].
        count: The number of weights of an id.

    Returns:
        The weights, added up over V, [B, count]; and the rest, [B, V, D - count].
    """
    return embeddings[:, :, :count].sum(1), embeddings[:, :, count:]


class BilinearLogit(nn.Module):
    """The fusion of two streams by a bilinear form of several heads (FinalMLP, arXiv 2304.00902, section 3.3).

    forward(a [B, m], b [B, k]) -> logits [B] in float32: bias + w1 a + w2 b + sum over heads of a_h^T W_h b_h.

    ``heads`` divides both widths.
    """

    def __init__(self, first: int, second: int, heads: int) -> None:
        super().__init__()
        self.sizes = first // heads, second // heads
        self.linear = Logit(first + second)
        self.heads = nn.ModuleList(nn.Linear(self.sizes[1], self.sizes[0], bias=False) for _ in range(heads))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        logits: Tensor = self.linear(torch.cat([first, second], dim=1))
        # Each head only sees its share of both streams, so the products cost 1 / ``heads`` of a full bilinear form.
        pairs = zip(self.heads, first.split(self.sizes[0], 1), second.split(self.sizes[1], 1), strict=True)
        for head, one, other in pairs:
            logits = logits + (one * head(other)).sum(1)
        return logits

    def start_at(self, logit: float) -> None:
        """Set the bias to ``logit``."""
        self.linear.start_at(logit)


class Cross(nn.Linear):
    """forward(first [B, w], x [B, w]) -> [B, w]: f is a whole matrix (equation 1)."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def forward(self, first: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        return first * super().forward(value) + value


class LowRankCross(nn.Module):
    """forward(first [B, w], x [B, w]) -> [B, w]: f is U V^T of ``rank`` (equation 2)."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width)

    def forward(self, first: Tensor, value: Tensor) -> Tensor:
        return first * self.up(self.down(value)) + value


class MixtureCross(nn.Module):
    """forward(first [B, w], x [B, w]) -> [B, w]: experts U_i g(C_i g(V_i^T x)), weighted by a softmax (equation 4).

    g is tanh.
    """

    def __init__(self, width: int, rank: int, experts: int) -> None:
        super().__init__()
        self.rank = rank
        self.gate = nn.Linear(width, experts)
        self.down = nn.Linear(width, experts * rank, bias=False)
        self.within = nn.ModuleList(nn.Linear(rank, rank, bias=False) for _ in range(experts))
        self.up = nn.Linear(experts * rank, width)

    def forward(self, first: Tensor, value: Tensor) -> Tensor:
        shares = self.gate(value).softmax(dim=1)
        # V of all experts is one matrix, for a single product and a single tanh.
        parts = torch.tanh(self.down(value)).split(self.rank, dim=1)
        outputs = []
        for number, expert in enumerate(self.within):
            outputs.append(torch.tanh(expert(parts[number])) * shares[:, number, None])
        # U of all experts is one matrix, so its product also sums over experts. The gate's weights sum to 1, so one
        # bias is enough for all of them.
        return first * self.up(torch.cat(outputs, dim=1)) + value


CROSSES: dict[str, Callable[[int, int, int], nn.Module]] = {
    "full": lambda width, rank, experts: Cross(width),
    "low_rank": lambda width, rank, experts: LowRankCross(width, rank),
    "mixture": MixtureCross,
}


class CrossNet(nn.Module):
    """Cross layers (DCN-V2, Wang et al. 2021, arXiv 2008.13535, section 3): x <- x0 * f(x) + x, element by element.

    forward(x0 [B, w]) -> [B, w]: ``layers`` cross layers of one ``kind`` (a key of ``CROSSES``).
    """

    def __init__(self, kind: str, layers: int, width: int, rank: int, experts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CROSSES[kind](width, rank, experts) for _ in range(layers))

    def forward(self, first: Tensor) -> Tensor:
        value = first
        for layer in self.layers:
            value = layer(first, value)
        return value


Pair = tuple[int, int]


def _pair_maps(vectors: int, dim: int, dropped: Collection[Pair]) -> tuple[Tensor, Tensor]:
    # Returns positions of the pairs i > j in a flat [V, V] matrix, and the output column of each cell of the matrix.
    low = torch.tril_indices(vectors, vectors, -1)
    pairs = low[0] * vectors + low[1]
    if dropped:
        # The two vectors of a pair may come in either order.
        gone = torch.tensor([max(pair) * vectors + min(pair) for pair in dropped])
        stays = ~torch.isin(pairs, gone)
        low, pairs = low[:, stays], pairs[stays]
    # For each cell of the matrix, find the output column that feeds it. Cells of the diagonal and of dropped pairs
    # point at column 0, which the backward pass replaces by zeros.
    columns = dim + torch.arange(pairs.numel())
    cells = torch.zeros(vectors, vectors, dtype=torch.int64)
    cells[low[0], low[1]] = columns
    cells[low[1], low[0]] = columns
    return pairs, cells.flatten()


class _DotInteraction(torch.autograd.Function):
    @staticmethod
    @counts_as_one
    def forward(ctx: Any, vectors: Tensor, pairs: Tensor, cells: Tensor) -> Tensor:
        ctx.save_for_backward(vectors, cells)
        products = torch.bmm(vectors, vectors.mT)
        flat = products.flatten(1)
        # Eager and compiled code copy in different ways, each the fastest one measured (README).
        if torch.compiler.is_compiling():
            return torch.cat([vectors[:, 0], flat.index_select(1, pairs)], dim=1)
        dim = vectors.shape[2]
        out = flat.new_empty(len(flat), dim + pairs.numel())
        out[:, :dim] = vectors[:, 0]
        _gather(flat, pairs, out[:, dim:])
        return out

    @staticmethod
    @once_differentiable
    @counts_as_one
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # The gradient of vector i is the sum of the other vectors, each times the gradient of its pair with i.
        (grad,) = grads
        vectors, cells = ctx.saved_tensors
        count, dim = vectors.shape[1:]
        if torch.compiler.is_compiling():
            symmetric = grad.index_select(1, cells)
        else:
            symmetric = _gather(grad, cells, grad.new_empty(len(grad), cells.numel()))
        if 2 * (grad.shape[1] - dim) < count * (count - 1):
            # Cells of dropped pairs point at column 0, so set them to 0.
            symmetric = symmetric * (cells > 0)
        symmetric = symmetric.view(-1, count, count)
        symmetric.diagonal(dim1=1, dim2=2).zero_()
        # Under autocast the products are 16-bit floats.
        result = torch.bmm(symmetric, vectors.to(grad.dtype))
        result[:, 0] += grad[:, :dim]
        return result, None, None


def _gather(values: Tensor, columns: Tensor, out: Tensor) -> Tensor:
    # Computes out = values[:, columns].
    source, target = values, out
    if values.dtype in (torch.bfloat16, torch.float16):
        # View the values as integers, since PyTorch would gather 16-bit floats through a float32 copy.
        source, target = values.view(torch.int16), out.view(torch.int16)
    torch.gather(source, 1, columns.expand(len(source), -1), out=target)
    return out


class _CompiledInteraction(torch.autograd.Function):
    # Runs the compiled kernels, without a copy of the vectors; ``first`` is [B, D] or None.

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, first: Tensor | None, kernels: Any) -> Tensor:
        samples, count, dim = vectors.shape
        like = vectors
        if first is not None:
            # The bottom MLP's output is bf16 under autocast, and the result must have the same dtype.
            like = first
            count += 1
        out = like.new_empty(samples, dim + count * (count - 1) // 2)
        ctx.save_for_backward(vectors, first)
        ctx.kernels = kernels
        kernels.interact(vectors, first, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        grad = grads[0].contiguous()
        vectors, first = ctx.saved_tensors
        # The kernel fills adjacent values, whatever the strides of the inputs are.
        grad_vectors = torch.empty_like(vectors, memory_format=torch.contiguous_format)
        grad_first = None
        if first is not None:
            grad_first = torch.empty_like(first, memory_format=torch.contiguous_format)
        ctx.kernels.interact_back(vectors, first, grad, grad_vectors, grad_first)
        return grad_vectors, grad_first, None


class DotInteraction(nn.Module):
    """forward(vectors [B, V, D]) -> the first vector and the dot products of all pairs: [B, D + V * (V - 1) / 2].

    ``dropped`` has the pairs of vectors, by number, that are left out. ``kernels`` is ``load_kernels("steps")``, which
    computes it on a CPU if no pair is left out; None: PyTorch does.
    """

    pairs: Tensor
    cells: Tensor

    def __init__(self, vectors: int, dim: int, dropped: Collection[Pair] = ()) -> None:
        super().__init__()
        self.kernels: Any = None
        self.whole = not dropped
        pairs, cells = _pair_maps(vectors, dim, dropped)
        self.width = dim + pairs.numel()
        self.register_buffer("pairs", pairs, persistent=False)
        self.register_buffer("cells", cells, persistent=False)

    def forward(self, vectors: Tensor, first: Tensor | None = None) -> Tensor:
        """Return [B, ``width``] in the dtype of ``vectors``; pairs in the order (1,0), (2,0), (2,1), ...

        ``first`` [B, D] is put in front of the ``vectors`` [B, V - 1, D], and the result has its dtype.
        """
        if self.whole and not torch.compiler.is_compiling() and self.kernels is not None:
            # The kernel reads raw memory: float32 on a CPU, with each sample's values adjacent.
            fits = vectors.dtype == torch.float32 and vectors.device.type == "cpu"
            fits = fits and vectors.stride()[1:] == (vectors.shape[2], 1)
            if first is not None:
                fits = fits and first.dtype in (torch.float32, torch.bfloat16) and first.stride(1) == 1
            if fits:
                return cast(Tensor, _CompiledInteraction.apply(vectors, first, self.kernels))
        if first is not None:
            vectors = torch.cat([first[:, None], vectors.to(first.dtype)], dim=1)
        return cast(Tensor, _DotInteraction.apply(vectors, self.pairs, self.cells))


class Vectors(nn.Module):
    """forward(dense [B, n], embeddings [B, V, D]) -> [B, V + 1, D]: an MLP's output on the dense features comes first.

    Without dense features it is [B, V, D]. ``count`` is the number of output vectors.
    """

    def __init__(self, dense: int, vectors: int, dim: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.bottom = mlp([dense, *hidden, dim], last_activation=False) if dense else None
        self.count = vectors + (dense > 0)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        # Under autocast the MLP's output has 16 bits, and the embeddings must have its dtype. Without an MLP they are
        # cast as well, so that what follows is the same with and without dense features.
        if self.bottom is None:
            return embeddings.to(compute_dtype(embeddings))
        first = self.bottom(dense)
        return torch.cat([first[:, None], embeddings.to(first.dtype)], dim=1)


class VectorLinear(nn.Linear):
    """forward(vectors [B, m, D]) -> [B, k, D]: sums of the vectors, with learnt weights and a bias for each."""

    def forward(self, vectors: Tensor) -> Tensor:
        return super().forward(vectors.mT).mT


def concat_vectors(dense: Tensor, embeddings: Tensor) -> Tensor:
    """Put the dense features beside the flattened embeddings.

    Args:
        dense: [B, n].
        embeddings: [B, V, D].

    Returns:
        [B, n + V * D], in the dtype of ``embeddings``.
    """
    return torch.cat([dense.to(embeddings.dtype), embeddings.flatten(1)], dim=1)


def concat_parts(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate ``parts`` along dimension 1; a single part is not copied."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts), dim=1)
