"""Gradient accumulation (``train.accumulate``): the ranking model works through a batch in parts, within one step.

Kernels of tables update rows in the backward pass, and k optimizer updates with parts of a gradient are not the same as
one update with their sum: row-wise Adagrad would add k squares of parts instead of the square of the sum. So the tables
keep their one lookup and their one gradient, and only the activations of the ranking model, which need the memory, are
computed by parts. Each part runs its backward pass at once, which frees its activations, and leaves its gradients:
those of the parameters, added up, and those of its rows' embeddings. The step's own backward pass then hands these on
to towers, tables and DDP, which notice nothing: every parameter still gets one gradient. Unlike recomputed activations
(Chen et al. 2016, arXiv 1604.06174) this costs no second forward pass.

The loss is a sum over rows, so the step equals that of the whole batch except for the order in which the parts of the
parameters' gradients are added. A layer that looks at other rows of its batch would only see those of its part
(``require_rowwise``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise, starmap
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.core.errors import ConfigError
from pipeline.models.layers.perceptron import BatchNorm

# (dense features, vectors, labels, weights, extra) of some rows -> (loss, (logits, labels, weights)).
Compute = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, tuple[Tensor, Tensor, Tensor]]]


def split_rows(rows: int, parts: int) -> list[slice]:
    """Split ``rows`` rows into consecutive parts, the same on every rank: padding gives all of them as many rows.

    Returns:
        ``parts`` slices whose sizes differ by one at most; fewer if there are fewer rows.
    """
    count = max(1, min(parts, rows))
    ends = [rows * number // count for number in range(count + 1)]
    return list(starmap(slice, pairwise(ends)))


def accumulate(
    compute: Compute,
    parts: Sequence[slice],
    dense: Tensor,
    vectors: Tensor,
    labelled: tuple[Tensor, Tensor, Tensor | None],
    parameters: Sequence[nn.Parameter],
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Compute the loss of a batch part by part, and its gradients with it.

    Args:
        compute: Returns the loss of some rows, a sum over them, and what metrics need, detached.
        parts: The rows of each part.
        dense: [b, n].
        vectors: [b, V, D].
        labelled: Labels, weights and ``extra`` of the rows.
        parameters: The parameters that ``compute`` trains; it must depend on no others.

    Returns:
        The loss, whose backward pass gives ``dense``, ``vectors`` and ``parameters`` their gradients, once; logits,
        labels and weights of all rows.
    """
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    loss, *output = _Accumulated.apply(compute, parts, labelled, dense, vectors, *learning)
    return loss, (output[0], output[1], output[2])


class _Accumulated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        compute: Compute,
        parts: Sequence[slice],
        labelled: tuple[Tensor, Tensor, Tensor | None],
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        # ``inputs`` holds dense features and vectors, both by rows, and then the parameters.
        losses, outputs = [], []
        sums: list[Tensor | None] = [None] * len(inputs)
        for rows in parts:
            # New leaves: autograd stops there, so the activations of a part are freed before the next one runs.
            dense, vectors = (each[rows].detach().requires_grad_(each.requires_grad) for each in inputs[:2])
            labels, weights, extra = labelled
            part_extra = None if extra is None else extra[rows]
            with torch.enable_grad():
                loss, output = compute(dense, vectors, labels[rows], weights[rows], part_extra)
            places, learning = list[int](), list[Tensor]()
            for place, each in enumerate((dense, vectors, *inputs[2:])):
                if each.requires_grad:
                    places.append(place)
                    learning.append(each)
            # Hooks of parameters do not run here: DDP reduces the sums, not the parts.
            gradients = torch.autograd.grad(loss, learning, allow_unused=True)
            for place, gradient in zip(places, gradients, strict=True):
                if gradient is None:
                    continue
                # Sum into separate memory that has the parameter's strides: a CUDA graph overwrites its outputs when it
                # is replayed.
                whole = sums[place]
                if whole is None:
                    whole = sums[place] = torch.zeros_like(inputs[place])
                # Each part covers its own rows of the dense features and vectors; all parts share the parameters.
                if place < 2:
                    whole = whole[rows]
                whole.add_(gradient)
            losses.append(loss.detach())
            outputs.append(output)
        ctx.gradients = sums
        joined = list(map(torch.cat, zip(*outputs, strict=True)))
        ctx.mark_non_differentiable(*joined)
        ctx.set_materialize_grads(False)
        return torch.stack(losses).sum(), *joined

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sums, ctx.gradients = ctx.gradients, None
        for each in sums:
            if each is not None:
                each.mul_(grads[0])
        return None, None, None, *sums


def require_rowwise(model: nn.Module, parts: int) -> None:
    """Raise ConfigError where a layer of ``model`` looks at other rows of the batch, since a part has only some."""
    for name, layer in model.named_modules():
        # A plugin's model may have PyTorch's own batch norm instead of ours.
        if isinstance(layer, BatchNorm | _BatchNorm):
            raise ConfigError(
                f"train.accumulate is {parts}, but layer {name!r} normalises by mean and variance of the whole batch, "
                "and parts of it have others",
                hint="model.norm=layer, or train.accumulate=1",
            )
