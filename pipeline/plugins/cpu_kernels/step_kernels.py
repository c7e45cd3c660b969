"""Parts of a training step on a CPU: ``native/steps.c``, called through ctypes with the addresses of tensors.

PyTorch makes several passes over memory where these make one, and FBGEMM's kernels for CPUs use one thread. Results
agree up to rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.core.kernels import open_installed, open_library

_VERSION = 3  # version of the functions, the same as in steps.c


class _Interact(ctypes.Structure):
    # The struct ``Interact`` of steps.c.
    _fields_ = (
        ("first", ctypes.c_void_p),
        ("rest", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("grad_first", ctypes.c_void_p),
        ("grad_rest", ctypes.c_void_p),
        ("first_stride", ctypes.c_int64),
        ("rest_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("vectors", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("bf16", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


class _Mask(ctypes.Structure):
    # The struct ``Mask`` of steps.c.
    _fields_ = (
        ("grad", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("masked", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("bf16", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


class _Head(ctypes.Structure):
    # The struct ``Head`` of steps.c.
    _fields_ = (
        ("hidden", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("grad_hidden", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("bias", ctypes.c_float),
        ("bf16", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


class _Tables(ctypes.Structure):
    # The struct ``Tables`` of steps.c.
    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("dims", ctypes.c_void_p),
        ("table_of", ctypes.c_void_p),
        ("column", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("pooled", ctypes.c_void_p),
        ("tables", ctypes.c_int64),
        ("features", ctypes.c_int64),
        ("batch", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("ids_count", ctypes.c_int64),
        ("lr", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("mean", ctypes.c_int32),
        ("bf16", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


class StepKernels:
    """The functions of the library at ``path``."""

    def __init__(self, path: Path) -> None:
        self._library = open_library(path, _VERSION)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepKernels:
        """Return this library: it has no state, so copies of a model may share it."""
        return self

    def limit(self, level: int) -> None:
        """Limit the instruction set: 0 uses no more than every CPU has, 1 AVX2 too, 2 all."""
        self._library.steps_limit(level)

    def interact(self, vectors: Tensor, first: Tensor | None, out: Tensor) -> None:
        """Fill ``out`` with the first vector and the dot products of all pairs in the order (1,0), (2,0), (2,1), ...

        Args:
            vectors: float32 [B, V, D]; each sample's values are adjacent.
            first: The vector before the others, float32 or bf16 [B, D], its values adjacent; None: there is none.
            out: [B, D + pairs], in the dtype of the first vector.
        """
        task = _interact(vectors, first, out)
        task.out = out.data_ptr()
        self._call("steps_interact", task)

    def interact_back(
        self, vectors: Tensor, first: Tensor | None, grad: Tensor, grad_vectors: Tensor, grad_first: Tensor | None
    ) -> None:
        """Compute the gradients of ``interact``.

        Args:
            grad: The gradient of its ``out``.
            grad_vectors: Is filled, contiguous.
            grad_first: Is filled, contiguous.
        """
        task = _interact(vectors, first, grad)
        task.grad = grad.data_ptr()
        task.grad_rest = grad_vectors.data_ptr()
        task.grad_first = _at(grad_first)
        self._call("steps_interact_back", task)

    def mask(self, grad: Tensor, out: Tensor | None, masked: Tensor, sums: Tensor) -> None:
        """Fill ``masked`` with ``grad`` where ``out`` is above 0, and ``sums`` with the sums of its columns.

        Args:
            grad: [n, width], float32 or bf16, contiguous as all are here.
            out: The output of the ReLU, shaped like ``grad``; None if there is none.
            masked: Shaped like ``grad``, and may be ``grad`` itself without ReLU.
            sums: float32 [width].
        """
        task = _Mask(
            grad=grad.data_ptr(),
            out=_at(out),
            masked=masked.data_ptr(),
            sums=sums.data_ptr(),
            n=len(grad),
            width=grad.shape[1],
            bf16=grad.dtype == torch.bfloat16,
            threads=torch.get_num_threads(),
        )
        self._call("steps_mask", task)

    def head(self, hidden: Tensor, weight: Tensor, bias: float, logits: Tensor) -> None:
        """Compute the ``logits`` of a last layer with one output, ``hidden`` times ``weight`` plus ``bias``.

        Args:
            logits: Is filled, float32 [n].
            hidden: float32 or bf16 [n, width], contiguous.
            weight: float32 [1, width].
        """
        task = _head(hidden, weight)
        task.logits = logits.data_ptr()
        task.bias = bias
        self._call("steps_head", task)

    def head_back(self, hidden: Tensor, weight: Tensor, grad: Tensor, grad_hidden: Tensor, sums: Tensor) -> None:
        """Fill ``grad_hidden``, and ``sums`` with the gradients of weight and bias, from ``grad``, that of the logits.

        ``sums``: float32 [width + 1], the bias last.
        """
        task = _head(hidden, weight)
        task.grad = grad.data_ptr()
        task.grad_hidden = grad_hidden.data_ptr()
        task.sums = sums.data_ptr()
        self._call("steps_head_back", task)

    def tables(
        self, weights: Sequence[Tensor], states: Sequence[Tensor], table_of_feature: Sequence[int], *, mean: bool
    ) -> Tables:
        """Return the embedding tables ``weights``, with functions that look up and train their rows in place.

        Args:
            weights: float32 [rows, dim] of each table, contiguous.
            states: Row-wise Adagrad's, float32 [rows] of each table.
            table_of_feature: The table of each feature; features of one table are neighbours.
            mean: Bags are averaged, not summed up.
        """
        return Tables(self._library, weights, states, table_of_feature, mean)

    def _call(self, name: str, task: ctypes.Structure) -> None:
        if getattr(self._library, name)(ctypes.byref(task)):
            raise MemoryError(f"no memory for {name}")


class Tables:
    """Embedding tables of ``StepKernels.tables``."""

    def __init__(
        self,
        library: ctypes.CDLL,
        weights: Sequence[Tensor],
        states: Sequence[Tensor],
        table_of_feature: Sequence[int],
        mean: bool,
    ) -> None:
        self._library, self._mean = library, mean
        # These tensors keep the memory alive that the library writes to.
        self._tensors = [*weights, *states]
        # The column at which each feature's pooled embedding begins.
        columns = []
        self._width = 0
        for table in table_of_feature:
            columns.append(self._width)
            self._width += weights[table].shape[1]
        self._counts = {"tables": len(weights), "features": len(table_of_feature)}
        # Make these arrays once, so that a lookup only passes their addresses.
        self._arrays = {
            "weights": _pointers(weights),
            "state": _pointers(states),
            "rows": _integers([len(each) for each in weights]),
            "dims": _integers([each.shape[1] for each in weights]),
            "table_of": _integers(table_of_feature),
            "column": _integers(columns),
        }

    def look_up(self, ids: Tensor, offsets: Tensor, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """Look up the bags of a batch of b samples.

        Args:
            ids: int64 [n], contiguous as ``offsets``.
            offsets: int64 [features * b + 1].
            dtype: float32, or bf16, to which the pooled values are then rounded.

        Returns:
            The pooled embeddings, ``dtype`` [b, sum of the features' dims]; None if a row number is outside of its
            table.
        """
        pooled = torch.empty((offsets.numel() - 1) // self._counts["features"], self._width, dtype=dtype)
        # The caller knows the tables' names and reports the wrong row.
        failed = self._library.steps_look_up(ctypes.byref(self._task(ids, offsets, pooled)))
        return None if failed else pooled

    def adagrad(self, ids: Tensor, offsets: Tensor, grad: Tensor, lr: float, eps: float) -> None:
        """Train the rows of a lookup by row-wise Adagrad.

        ``grad``: the pooled embeddings' gradient, float32 or bf16, contiguous.
        """
        task = self._task(ids, offsets, grad)
        task.lr, task.eps = lr, eps
        if self._library.steps_adagrad(ctypes.byref(task)):
            raise MemoryError("no memory for steps_adagrad")

    def _task(self, ids: Tensor, offsets: Tensor, pooled: Tensor) -> _Tables:
        addresses = {name: ctypes.addressof(array) for name, array in self._arrays.items()}
        return _Tables(
            ids=ids.data_ptr(),
            offsets=offsets.data_ptr(),
            pooled=pooled.data_ptr(),
            batch=len(pooled),
            width=self._width,
            ids_count=ids.numel(),
            mean=self._mean,
            bf16=pooled.dtype == torch.bfloat16,
            threads=torch.get_num_threads(),
            **self._counts,
            **addresses,
        )


def _interact(vectors: Tensor, first: Tensor | None, like: Tensor) -> _Interact:
    # ``like`` is the output or its gradient, which have the same layout.
    samples, count, dim = vectors.shape
    task = _Interact(
        rest=vectors.data_ptr(),
        rest_stride=vectors.stride(0),
        out_stride=like.stride(0),
        n=samples,
        vectors=count,
        dim=dim,
        bf16=like.dtype == torch.bfloat16,
        threads=torch.get_num_threads(),
    )
    if first is not None:
        task.first = first.data_ptr()
        task.first_stride = first.stride(0)
        task.vectors += 1
    return task


def _head(hidden: Tensor, weight: Tensor) -> _Head:
    return _Head(
        hidden=hidden.data_ptr(),
        weight=weight.data_ptr(),
        n=len(hidden),
        width=hidden.shape[1],
        bf16=hidden.dtype == torch.bfloat16,
        threads=torch.get_num_threads(),
    )


def _at(values: Tensor | None) -> int | None:
    return None if values is None else values.data_ptr()


def _pointers(tensors: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _integers(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def load() -> StepKernels | None:
    """Return the installed kernels; None if there are none, or they belong to another release."""
    folder = Path(__file__).parent / "native"
    return open_installed(folder, "steps", StepKernels, "training runs without its compiled parts")
