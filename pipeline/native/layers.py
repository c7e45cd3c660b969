"""A linear layer's products on a CPU with AVX-512: ``linear.c``, called through ctypes.

Weights stay in float32; a product rounds them to bf16 as it lays them out, adds the bias and applies ReLU. Gradients of
weights and biases are float32 sums, whatever the dtype of the inputs. Where the library or the CPU's instructions are
missing, or the CPU has AMX, which oneDNN uses, oneDNN and PyTorch do the same, up to rounding.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from pipeline.core.compiled import checked, open_installed

_VERSION = 2  # of the functions, as linear.c has it


class Linear(ctypes.Structure):
    """A layer, a batch and its gradients: ``Linear`` of linear.c."""

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


class LinearLibrary:
    """The functions of the library at ``path``."""

    def __init__(self, path: Path) -> None:
        self._library = checked(path, "linear", _VERSION)
        self.able = {bf16: bool(self._library.linear_able(int(bf16))) for bf16 in (False, True)}

    def forward(self, task: Linear) -> None:
        """Fill ``out``."""
        self._call("linear_forward", task)

    def backward(self, task: Linear) -> None:
        """Fill ``for_weight`` and ``for_bias``, and ``for_x`` unless it is None; ``out`` where there is a ReLU."""
        self._call("linear_backward", task)

    def _call(self, name: str, task: Linear) -> None:
        if getattr(self._library, name)(ctypes.byref(task)):
            raise MemoryError(f"no memory for {name}")


@cache
def library() -> LinearLibrary | None:
    """The library that was installed with this package; None where there is none, or it is another release's."""
    return open_installed(__file__, "linear", LinearLibrary, "linear layers run in oneDNN")
