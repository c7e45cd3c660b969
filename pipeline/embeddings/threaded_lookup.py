"""Kernels of one rank side by side: FBGEMM's CPU kernels use one thread each, so the tables are divided over several.

A kernel's forward and backward pass run in a thread of a pool. Tables do not share rows, so the results are the same to
the bit as one after the other.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

_GROUP = "_batch_key"  # tables of different values get kernels of their own; TorchRec drops it before it makes them


def separate_kernel(parameters: Sequence[nn.Parameter], kind: str) -> None:
    """Have TorchRec make a kernel of its own of the tables with these ``parameters``, which are of one ``kind``.

    Call it after the optimizer is fused and before the tables are sharded.
    """
    for parameter in parameters:
        given = parameter._optimizer_kwargs  # type: ignore[attr-defined]
        joined = [{**kwargs, _GROUP: f"{kwargs.get(_GROUP, '')}{kind}"} for kwargs in given]
        parameter._optimizer_kwargs = joined  # type: ignore[attr-defined]


def divide_tables(parameters: Sequence[nn.Parameter], parts: int) -> None:
    """Have TorchRec make up to ``parts`` kernels of the tables with these ``parameters``, neighbours together.

    Call it after the optimizer is fused and before the tables are sharded.
    """
    parts = min(parts, len(parameters))
    for number, parameter in enumerate(parameters):
        separate_kernel([parameter], f"part {number * parts // len(parameters)}")


class ThreadedLookup(nn.Module):
    """forward(features) -> pooled embeddings [B, sum of widths] of ``kernels``, which run at once, a thread each.

    ``splits``: the number of features of each kernel.
    """

    def __init__(self, kernels: Sequence[nn.Module], splits: Sequence[int]) -> None:
        super().__init__()
        self._kernels, self._cutter = list(kernels), _Cutter(splits)  # a plain list: their owner has them as modules
        self._pool = ThreadPoolExecutor(len(kernels), thread_name_prefix="nightjar-lookup")
        self._anchor = torch.zeros(0, requires_grad=True)
        _start_single(self._pool, len(kernels))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """``features``: of all kernels in their order."""
        training = torch.is_grad_enabled()

        def look_up(kernel: nn.Module, features: KeyedJaggedTensor) -> Tensor:
            with torch.set_grad_enabled(training):
                return cast(Tensor, kernel(features))

        with torch.profiler.record_function("nightjar::lookups"):
            outputs = list(self._pool.map(look_up, self._kernels, self._cutter(features)))
        return cast(Tensor, _Joined.apply(self._anchor, self._pool, outputs))


class _Cutter:
    """Cuts features into ``splits``. Batches with one id a sample share their lengths, so they are cut only once."""

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
            self._offsets = [part.offsets().long() for part in self._parts]  # the kernels want int64
            self._lengths = features.lengths()
            return self._parts
        values = features.values().tensor_split(self._ends[:-1])
        return [
            KeyedJaggedTensor(part.keys(), cut, lengths=part.lengths(), offsets=offsets, stride=part.stride())
            for part, offsets, cut in zip(self._parts, self._offsets, values, strict=True)
        ]


class _Joined(torch.autograd.Function):
    """Concatenates the outputs; the backward pass runs their own backward passes in the pool."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, pool: ThreadPoolExecutor, outputs: list[Tensor]) -> Tensor:
        ctx.pool, ctx.outputs = pool, outputs
        return torch.cat([output.detach() for output in outputs], dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        parts = grads[0].split([output.shape[1] for output in ctx.outputs], dim=1)
        list(ctx.pool.map(torch.autograd.backward, ctx.outputs, parts))
        return None, None, None


def _start_single(pool: ThreadPoolExecutor, count: int) -> None:
    """Start the threads of ``pool``; operations in them use no further threads."""
    threads, meeting = torch.get_num_threads(), threading.Barrier(count)

    def start() -> None:
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        meeting.wait()

    started: list[Callable[[], Any]] = [pool.submit(start).result for _ in range(count)]
    for wait in started:
        wait()
    torch.set_num_threads(threads)
