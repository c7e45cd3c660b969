"""Compiled parts of a training step on a CPU: ``steps.c``, called through ctypes.

PyTorch makes several passes over memory where these make one, and FBGEMM's kernels for CPUs use one thread. A wheel and
the image carry the library; installing from a checkout builds it where there is a C compiler. Where there is none, or
not GCC, PyTorch and FBGEMM do the same, up to rounding. ctypes lets go of the interpreter's lock during a call.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.core.compiled import checked, open_installed

_VERSION = 2  # of the functions, as steps.c has it


class Interact(ctypes.Structure):
    """The vectors of a dot interaction and their gradients: ``Interact`` of steps.c."""

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


class Mask(ctypes.Structure):
    """The gradient of a layer with bias and ReLU: ``Mask`` of steps.c."""

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


class Head(ctypes.Structure):
    """The layer that gives the logits: ``Head`` of steps.c."""

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


class Tables(ctypes.Structure):
    """Embedding tables and the lookups of a batch: ``Tables`` of steps.c."""

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
        ("threads", ctypes.c_int32),
    )


class StepsLibrary:
    """The functions of the library at ``path``."""

    def __init__(self, path: Path) -> None:
        self._library = checked(path, "steps", _VERSION)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepsLibrary:
        """The same library: it has no state, and a copy of a model may have it too."""
        return self

    def limit(self, level: int) -> None:
        """Limit the instruction set: 0 uses no more than every CPU has, 1 AVX2 too, 2 all."""
        self._library.steps_limit(level)

    def interact(self, task: Interact) -> None:
        """Fill ``out``: the first vector, and the dot products of all pairs in the order (1,0), (2,0), (2,1), ..."""
        self._call("steps_interact", task)

    def interact_back(self, task: Interact) -> None:
        """Fill ``grad_first`` and ``grad_rest`` from ``grad``."""
        self._call("steps_interact_back", task)

    def mask(self, task: Mask) -> None:
        """Fill ``masked`` with ``grad`` where ``out`` is above 0, and ``sums`` with the sums of its columns."""
        self._call("steps_mask", task)

    def head(self, task: Head) -> None:
        """Fill ``logits``."""
        self._call("steps_head", task)

    def head_back(self, task: Head) -> None:
        """Fill ``grad_hidden``, and ``sums`` with the gradients of weight and bias, from ``grad``."""
        self._call("steps_head_back", task)

    def look_up(self, task: Tables) -> bool:
        """Fill ``pooled``; False where a row number is outside of its table."""
        return not self._library.steps_look_up(ctypes.byref(task))

    def adagrad(self, task: Tables) -> None:
        """Train the rows of the lookups by row-wise Adagrad; ``pooled`` has the gradient."""
        self._call("steps_adagrad", task)

    def _call(self, name: str, task: ctypes.Structure) -> None:
        if getattr(self._library, name)(ctypes.byref(task)):
            raise MemoryError(f"no memory for {name}")


@cache
def library() -> StepsLibrary | None:
    """The library that was installed with this package; None where there is none, or it is another release's."""
    return open_installed(__file__, "steps", StepsLibrary, "training runs without its compiled parts")
