"""Counting what a module runs, forward and backward: its operations, and the values that they read and write."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Matrix products, whose time goes by their FLOP.
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
# The work of a product's call, in that of an element-wise operation: its operands are cast to 16 bits, and a linear
# layer is a function of its own in Python, forward and backward.
PRODUCT_CALLS = 5
# Room that is taken and not written.
_WITHOUT_WORK = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach"})


class OperationCounter(TorchDispatchMode):
    """Counts all operations while it is on. Views are none: they compute nothing.

    Attributes:
        operations: Their number; a matrix product counts as ``PRODUCT_CALLS``.
        moved: Values that all but products read and write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name in _PRODUCTS:
            self.operations += PRODUCT_CALLS
            return result
        read, written = _tensors([args, kwargs]), _tensors(result)
        storages = {tensor.untyped_storage()._cdata for tensor in read}
        shared = [tensor.untyped_storage()._cdata in storages for tensor in written]
        is_view = all(shared) and not func._schema.is_mutable
        if not is_view and name not in _WITHOUT_WORK:
            self.operations += 1
            self.moved += sum(tensor.numel() for tensor in [*read, *written])
        return result


def _tensors(values: Any) -> list[Tensor]:
    # Each one once: an operation in place returns what it was given.
    found = {id(value): value for value in tree_leaves(values) if isinstance(value, Tensor)}
    return list(found.values())
