"""The cross of a sample's features at full width, in bf16: ``native/crosses.c``, called through ctypes.

With x [B, F, N] and each sample's values side by side as ``flat``::

    h = flat @ V.T                     # the rank of V is small
    crossed = flat * (h @ U.T + b) + flat
    mixed = crossed @ M.T + mb
    out = crossed by feature @ P.T + pb + mixed @ A.T + ab

Weights stay in float32 and are rounded to bf16 in each call. Their gradients are float32 sums. Products take AMX, or
AVX512_BF16 where there is none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.core.kernels import open_installed, open_library

_VERSION = 1  # version of the functions, the same as in crosses.c


class Weights(NamedTuple):
    """Weights and biases of a cross, or their gradients: float32, contiguous."""

    down: Tensor  # V [R, F * N]
    up: Tensor  # U [F * N, R]
    gate_bias: Tensor  # b [F * N]
    project: Tensor  # P [dim, N]
    project_bias: Tensor  # pb [dim]
    mix: Tensor  # M [S, F * N]
    mix_bias: Tensor  # mb [S]
    spread: Tensor  # A [F * dim, S]
    spread_bias: Tensor  # ab [F * dim]


class _Cross(ctypes.Structure):
    # The struct ``Cross`` of crosses.c.
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("gate_bias", ctypes.c_void_p),
        ("project", ctypes.c_void_p),
        ("project_bias", ctypes.c_void_p),
        ("mix", ctypes.c_void_p),
        ("mix_bias", ctypes.c_void_p),
        ("spread", ctypes.c_void_p),
        ("spread_bias", ctypes.c_void_p),
        ("h", ctypes.c_void_p),
        ("mixed", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("for_x", ctypes.c_void_p),
        ("for_down", ctypes.c_void_p),
        ("for_up", ctypes.c_void_p),
        ("for_gate_bias", ctypes.c_void_p),
        ("for_project", ctypes.c_void_p),
        ("for_project_bias", ctypes.c_void_p),
        ("for_mix", ctypes.c_void_p),
        ("for_mix_bias", ctypes.c_void_p),
        ("for_spread", ctypes.c_void_p),
        ("for_spread_bias", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("features", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("mixtures", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("threads", ctypes.c_int32),
    )


class CrossKernels:
    """The functions of the library at ``path``. ``able``: whether this CPU has AMX or AVX512_BF16."""

    def __init__(self, path: Path) -> None:
        self._library = open_library(path, _VERSION)
        self.able = self._library.crosses_level() > 0

    def limit(self, level: int) -> int:
        """Allow no more than AMX (2), AVX512_BF16 (1) or nothing (0), for tests; return what is used now."""
        self._library.crosses_limit(level)
        return int(self._library.crosses_level())

    @staticmethod
    def weights(parameters: Sequence[Tensor]) -> Weights:
        """Return ``parameters``, weights and biases in the order of ``Weights``, contiguous."""
        return Weights(*(values.detach().contiguous() for values in parameters))

    def forward(self, x: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``out`` [B, F, dim], ``h`` [B, R] and ``mixed`` [B, S], all bf16.

        Args:
            x: bf16 [B, F, N], each sample's values adjacent.
            weights: The weights and biases.
        """
        task = _task(x, weights)
        out = x.new_empty(task.n, task.features, task.dim)
        h, mixed = x.new_empty(task.n, task.rank), x.new_empty(task.n, task.mixtures)
        task.out, task.h, task.mixed = out.data_ptr(), h.data_ptr(), mixed.data_ptr()
        self._call("crosses_forward", task)
        return out, h, mixed

    def backward(self, x: Tensor, weights: Weights, h: Tensor, mixed: Tensor, grad: Tensor) -> tuple[Tensor, Weights]:
        """Return the gradient of ``x``, bf16, and those of the weights and biases, float32.

        Args:
            x: As in ``forward``.
            weights: As in ``forward``.
            h: From ``forward``.
            mixed: From ``forward``.
            grad: Gradient of ``out``, bf16 and contiguous.
        """
        task = _task(x, weights)
        for_x = torch.empty(x.shape, dtype=x.dtype)
        gradients = Weights(*(torch.empty_like(values) for values in weights))
        task.h, task.mixed, task.grad, task.for_x = h.data_ptr(), mixed.data_ptr(), grad.data_ptr(), for_x.data_ptr()
        for name, values in gradients._asdict().items():
            setattr(task, f"for_{name}", values.data_ptr())
        self._call("crosses_backward", task)
        return for_x, gradients

    def _call(self, name: str, task: _Cross) -> None:
        # The only possible failure is a lack of memory.
        if getattr(self._library, name)(ctypes.byref(task)):
            raise MemoryError(f"no memory for {name}")


def _task(x: Tensor, weights: Weights) -> _Cross:
    return _Cross(
        x=x.data_ptr(),
        x_stride=x.stride(0),
        n=len(x),
        features=x.shape[1],
        width=x.shape[2],
        rank=len(weights.down),
        mixtures=len(weights.mix),
        dim=len(weights.project),
        # Read at each call, because the number is a setting of the calling thread.
        threads=torch.get_num_threads(),
        **{name: values.data_ptr() for name, values in weights._asdict().items()},
    )


def load() -> CrossKernels | None:
    """Return the installed kernels; None if there are none, or they belong to another release."""
    return open_installed(Path(__file__).parent / "native", "crosses", CrossKernels, "crosses run in PyTorch")
