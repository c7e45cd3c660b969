"""A linear layer's products on a CPU with AVX-512: ``native/linear.c``, called through ctypes.

Weights stay in float32; a product rounds them to bf16 as it lays them out, adds the bias and applies ReLU. Gradients of
weights and biases are float32 sums, whatever the dtype of the inputs. Where the library or the CPU's instructions are
missing, or the CPU has AMX, which oneDNN uses, oneDNN and PyTorch do the same, up to rounding.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from pipeline.core.kernels import open_installed, open_library

_VERSION = 2  # version of the functions, the same as in linear.c


class _Linear(ctypes.Structure):
    # The struct ``Linear`` of linear.c.
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("for_x", ctypes.c_void_p),
        ("for_weight", ctypes.c_void_p),
        ("for_bias", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("relu", ctypes.c_int32),
        ("bf16", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


class LinearKernels:
    """The functions of the library at ``path``. ``able``: whether this CPU has what they need, for bf16 or float32."""

    def __init__(self, path: Path) -> None:
        self._library = open_library(path, _VERSION)
        self.able = {bf16: bool(self._library.linear_able(int(bf16))) for bf16 in (False, True)}

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, relu: bool) -> None:
        """Fill ``out`` with ``x @ weight.T + bias``, followed by a ReLU if ``relu``.

        Args:
            x: [B, in], float32 or bf16, each row's values adjacent.
            weight: float32 [width, in], contiguous.
            bias: float32 [width], or None.
            out: [B, width], in the dtype of ``x``.
        """
        self._call("linear_forward", _task(x, weight, bias=_at(bias), out=_at(out), relu=relu))

    def backward(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor | None,
        grad: Tensor,
        for_x: Tensor | None,
        for_weight: Tensor,
        for_bias: Tensor,
    ) -> None:
        """Fill ``for_weight`` and ``for_bias``, and ``for_x`` unless it is None, from ``grad`` (contiguous).

        ``out``: the output of ``forward`` if there is a ReLU, else None.
        """
        task = _task(x, weight, out=_at(out), grad=_at(grad), for_x=_at(for_x))
        task.for_weight = for_weight.data_ptr()
        task.for_bias = for_bias.data_ptr()
        self._call("linear_backward", task)

    def _call(self, name: str, task: _Linear) -> None:
        # The only possible failure is a lack of memory for packed weights or partial gradients.
        if getattr(self._library, name)(ctypes.byref(task)):
            raise MemoryError(f"no memory for {name}")


def _task(x: Tensor, weight: Tensor, **others: int | None) -> _Linear:
    return _Linear(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        n=len(x),
        inputs=x.shape[1],
        width=len(weight),
        x_stride=x.stride(0),
        bf16=x.dtype == torch.bfloat16,
        # Read at each call, because the number is a setting of the calling thread.
        threads=torch.get_num_threads(),
        **others,
    )


def _at(values: Tensor | None) -> int | None:
    return None if values is None else values.data_ptr()


def load() -> LinearKernels | None:
    """Return the installed kernels; None if there are none, or they belong to another release."""
    return open_installed(Path(__file__).parent / "native", "linear", LinearKernels, "linear layers run in oneDNN")
