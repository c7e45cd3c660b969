"""The quantiser of checkpoints' rows: ``native/rowcodes.c`` with nothing of Python in it, called through ctypes.

Why C that is built at installation, and not Numba (measured at 4 bits with a fitted range, one thread of an EPYC with
AVX-512): C codes 1.3 GB/s of float32 at 64 columns and 1.0 at 16, Numba 1.2 and 0.5, and torch's operations 0.1. Numba
and LLVM are 208 MB to install, and every process imports and compiles for seconds before its first row, in pods at each
start; this library is 100 KB and needs no particular version of Python, NumPy or torch. torch and fbgemm offer rows of
4 bits too, but not with this search (fbgemm), or one row at a time (``embedding_bag_4bit_prepack``).
``pipeline.checkpoint.quantise`` does the same with torch. ctypes lets go of the interpreter's lock during a call, so
training goes on.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.kernels import open_installed, open_library

if TYPE_CHECKING:
    # ``nightjar doctor`` opens the library where torch may be missing.
    from torch import Tensor

_VERSION = 2  # version of the functions below, the same as in rowcodes.c
_ALL = 2  # allows all instruction sets


class _Task(ctypes.Structure):
    # ``Task`` of rowcodes.c: the rows to code, and where their codes go.
    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("steps", ctypes.c_int32),
        ("most", ctypes.c_int32),
        ("fits", ctypes.c_int32),
        ("unit", ctypes.c_float),
        ("codes", ctypes.c_void_p),
        ("low", ctypes.c_void_p),
        ("span", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
    )


class QuantisationKernels:
    """The functions of the library at ``path``. ``level``: 0 uses no more than every CPU has, 1 AVX2 too, 2 all."""

    def __init__(self, path: Path, level: int = _ALL) -> None:
        self._library, self._level = open_library(path, _VERSION), level

    def magnitudes(self, rows: Tensor, out: Tensor) -> None:
        """Fill ``out`` (float32 [n]) with the largest magnitude of each of ``rows`` (float32 [n, columns])."""
        self._library.rowcodes_magnitudes(ctypes.byref(_task(rows)), ctypes.c_void_p(out.data_ptr()))

    def encode(
        self,
        rows: Tensor,
        bits: int,
        search: tuple[int, int, int],
        unit: float,
        codes: Tensor,
        low: Tensor,
        span: Tensor,
    ) -> None:
        """Fill ``codes``, ``low`` and ``span`` as ``quantise.encode`` says; ``search``: steps, most of them, fits."""
        task = _task(rows)
        task.bits, task.unit, task.row_bytes = bits, unit, codes.shape[1]
        task.steps, task.most, task.fits = search
        task.codes, task.low, task.span = codes.data_ptr(), low.data_ptr(), span.data_ptr()
        if self._library.rowcodes_encode(ctypes.byref(task), self._level):
            raise MemoryError("no memory to quantise rows")


def _task(rows: Tensor) -> _Task:
    count, columns = rows.shape
    return _Task(rows=rows.data_ptr(), stride=rows.stride(0), n=count, columns=columns)


def load() -> QuantisationKernels | None:
    """Return the installed kernels; None if there are none, or they belong to another release."""
    folder = Path(__file__).parent / "native"
    return open_installed(
        folder, "rowcodes", QuantisationKernels, "checkpoints are coded without the compiled quantiser"
    )
