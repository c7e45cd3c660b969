"""Shampoo's steps on a CPU, where they are installed: ``shampoo.c``, called through ctypes.

PyTorch makes a dozen passes over all blocks, and its products of many small matrices run at a third of this one's
speed. A wheel and the image carry the library; installing from a checkout builds it where there is a C compiler.
Everywhere else ``shampoo_steps.PlainWork`` does the same with PyTorch, up to rounding. ctypes lets go of the
interpreter's lock during a call.
"""

from __future__ import annotations

import ctypes
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.kernels import open_installed, open_library

# The version of the functions below; shampoo.c has the same number.
_VERSION = 1

# ``Block`` of shampoo.c, which documents the fields: rows and columns of a parameter.
_ADDRESSES = ("gradient", "parameter", "direction", "mean", "squares", "left", "right", "left_root", "right_root")
BLOCK = np.dtype(
    [
        *zip(_ADDRESSES, repeat(np.uintp)),
        ("rows", np.int64),
        ("columns", np.int64),
        ("stride", np.int64),
        ("rate", np.float32),
        ("decay", np.float32),
    ]
)
Blocks = np.ndarray[Any, np.dtype[np.void]]


class Factors(ctypes.Structure):
    """``Factors`` of shampoo.c."""

    _fields_ = (("old", ctypes.c_double), ("fresh", ctypes.c_double))


class Step(ctypes.Structure):
    """``Step`` of shampoo.c."""

    _fields_ = (
        ("fresh", ctypes.c_float),
        ("correction", ctypes.c_float),
        ("kept", ctypes.c_float),
        ("added", ctypes.c_float),
        ("unbiased", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("rooted", ctypes.c_int32),
    )


class ShampooLibrary:
    """The functions of the library at ``path``; ``blocks`` are arrays of ``BLOCK``."""

    def __init__(self, path: Path) -> None:
        self._library = open_library(path, _VERSION)

    def limit(self, level: int) -> None:
        """Limit the instruction set: 0 uses no more than every CPU has, 1 AVX2 too."""
        self._library.shampoo_limit(level)

    def accumulate(self, blocks: Blocks, factors: Factors, threads: int) -> None:
        """Take the gradients into the factors."""
        self._call("shampoo_accumulate", blocks, ctypes.byref(factors), threads)

    def directions(self, blocks: Blocks, step: Step, threads: int) -> None:
        """Fill in the directions; updates means and squares."""
        self._call("shampoo_directions", blocks, ctypes.byref(step), threads)

    def move(self, blocks: Blocks, threads: int) -> None:
        """Let the weights decay by their ``decay`` and move them by ``rate`` along the directions."""
        self._library.shampoo_move(*_array(blocks), threads)

    def _call(self, name: str, blocks: Blocks, settings: Any, threads: int) -> None:
        if getattr(self._library, name)(*_array(blocks), settings, threads):
            raise MemoryError(f"no memory for {name}")


def _array(blocks: Blocks) -> tuple[ctypes.c_void_p, ctypes.c_int64]:
    # ctypes would pass a plain integer as a C int, which cuts an address to 32 bits.
    return ctypes.c_void_p(blocks.ctypes.data), ctypes.c_int64(len(blocks))


@cache
def library() -> ShampooLibrary | None:
    """Return the installed library; None if there is none, or it belongs to another release."""
    return open_installed(Path(__file__).parent, "shampoo", ShampooLibrary, "shampoo runs without its compiled steps")
