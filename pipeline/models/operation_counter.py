"""Counting what a module runs, forward and backward: its operations, and the values that they read and write."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, cast

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Matrix products, whose time goes by their FLOP.
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
# The work of a product's call, in that of an element-wise operation: its operands are cast to 16 bits, and a linear
# layer is a function of its own in Python, forward and backward.
PRODUCT_CALLS = 5
# Memory that is allocated and not written.
_WITHOUT_WORK = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach"})
# Those that take about three times as long per value as others do, by the times of whole steps
# (docs/measurements/planning.md).
_SLOW = frozenset({"native_layer_norm", "native_layer_norm_backward", "_softmax", "_softmax_backward_data"})
_TIMES_SLOW = 3

F = TypeVar("F", bound=Callable[..., Any])


class OperationCounter(TorchDispatchMode):
    """Counts all operations while it is on. Views are none: they compute nothing.

    Attributes:
        operations: Their number; a matrix product counts as ``PRODUCT_CALLS``.
        moved: Values that all but products read and write.
    """

    running: ClassVar[OperationCounter | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.moved = 0
        self._paused = False
        self._outer: OperationCounter | None = None

    def __enter__(self) -> OperationCounter:
        self._outer, OperationCounter.running = OperationCounter.running, self
        return cast(OperationCounter, super().__enter__())

    def __exit__(self, *error: Any) -> None:
        OperationCounter.running = self._outer
        super().__exit__(*error)

    def run_as_one(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function``; whatever it does counts as one operation, which reads ``args`` and writes the result."""
        before, self._paused = self._paused, True
        try:
            result = function(*args)
        finally:
            self._paused = before
        self._add(_tensors([args, result]), 1)
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._paused:
            return result
        name = func._schema.name.partition("::")[2]
        if name in _PRODUCTS:
            self.operations += PRODUCT_CALLS
            return result
        read, written = _tensors([args, kwargs]), _tensors(result)
        storages = {tensor.untyped_storage()._cdata for tensor in read}
        shared = [tensor.untyped_storage()._cdata in storages for tensor in written]
        is_view = all(shared) and not func._schema.is_mutable
        if not is_view and name not in _WITHOUT_WORK:
            self._add([*read, *written], _TIMES_SLOW if name in _SLOW else 1)
        return result

    def _add(self, tensors: list[Tensor], times: int) -> None:
        self.operations += 1
        self.moved += times * sum(tensor.numel() for tensor in tensors)


def counts_as_one(function: F) -> F:
    """Have the work of ``function`` count as one operation, because on a CPU a compiled kernel takes its place."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if OperationCounter.running is None:
            return function(*args)
        return OperationCounter.running.run_as_one(function, *args)

    return cast(F, call)


def _tensors(values: Any) -> list[Tensor]:
    # Each one once: an operation in place returns what it was given.
    found = {id(value): value for value in tree_leaves(values) if isinstance(value, Tensor)}
    return list(found.values())
