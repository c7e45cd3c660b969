"""Delimited text to columns, and texts to hashes, in one pass each: ``native/fields.c``, called through ctypes.

Polars and NumPy do the same, to the bit, and take the blocks that these leave to them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.core.kernels import open_installed, open_library

_VERSION = 1  # version of the functions, the same as in fields.c
_VIEW = 16  # bytes of a string view
_MOST = 2**31 - 1  # bytes that a view can address


class _Field(ctypes.Structure):
    # ``Field`` of fields.c: where a column goes.
    _fields_ = (("out", ctypes.c_void_p), ("present", ctypes.c_void_p), ("rest", ctypes.c_int64))


class _Texts(ctypes.Structure):
    # ``Texts`` of fields.c: a column of string views.
    _fields_ = (
        ("views", ctypes.c_void_p),
        ("present", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        ("buffers", ctypes.c_void_p),
    )


class TextKernels:
    """The functions of the library at ``path``."""

    def __init__(self, path: Path) -> None:
        self._library = open_library(path, _VERSION)
        for name in ("count", "hash"):
            getattr(self._library, f"fields_{name}").restype = ctypes.c_int64

    def count(self, text: bytes | memoryview, byte: int) -> int:
        """Count how often ``byte`` occurs in ``text``."""
        data = np.frombuffer(text, np.uint8)
        return int(self._library.fields_count(_at(data), ctypes.c_int64(len(data)), ctypes.c_uint8(byte)))

    def split(self, block: bytes, separator: int, numbers: Sequence[bool]) -> list[pa.Array] | None:
        """Split whole lines of text without quotes into columns.

        Args:
            block: The lines.
            separator: The byte between two fields.
            numbers: For each column, whether it has numbers.

        Returns:
            float64 columns where ``numbers`` says so, else string views. An empty field is no number, and an empty
            text. None if text is not ASCII or has a carriage return, a line has more or fewer fields, or a number
            is not plain digits, at most 15, with a point between them and a minus before them if they like.
        """
        if len(numbers) < 2 or len(block) > _MOST or not block.endswith(b"\n"):
            return None
        if not block.isascii() or b"\r" in block:
            return None

        # 1. Allocate the columns, because the library allocates nothing.
        lines = self.count(block, ord("\n"))
        outs, marks, fields = [], [], (_Field * len(numbers))()
        for field, number in zip(fields, numbers, strict=True):
            if number:
                out = np.empty(lines, np.float64)
                mark = np.zeros(-(-lines // 8), np.uint8)
                field.present = _at(mark)
            else:
                # Text is never null: an empty field is an empty string.
                out = np.empty((lines, _VIEW), np.uint8)
                mark = np.zeros(0, np.uint8)
            field.out = _at(out)
            outs.append(out)
            marks.append(mark)

        # 2. One pass over the bytes.
        size, count = ctypes.c_int64(len(block)), ctypes.c_int64(len(numbers))
        if self._library.fields_split(block, size, ctypes.c_uint8(separator), fields, count, ctypes.c_int64(lines)):
            return None

        # 3. Arrow arrays of the same memory, without a copy.
        columns = []
        for out, mark, number, field in zip(outs, marks, numbers, fields, strict=True):
            if number:
                buffers = [pa.py_buffer(mark), pa.py_buffer(out)]
                columns.append(pa.Array.from_buffers(pa.float64(), lines, buffers, field.rest))
                continue
            buffers = [None, pa.py_buffer(out)]
            if field.rest:
                # Copy long texts to a separate buffer, so that a few of them do not keep the whole block alive.
                own = np.empty(field.rest, np.uint8)
                self._library.fields_own(block, _at(out), ctypes.c_int64(len(out)), _at(own))
                buffers.append(pa.py_buffer(own))
            columns.append(pa.Array.from_buffers(pa.string_view(), len(out), buffers))
        return columns

    def hash(self, texts: pa.Array, seed: int, none: Sequence[int] = ()) -> pa.Array:
        """Hash each of ``texts``, string views.

        Returns:
            xxhash64 (uint64) of the bytes; null if a text is null, or its hash is one of ``none``.
        """
        present, views, *buffers = texts.buffers()
        addresses = (ctypes.c_void_p * max(len(buffers), 1))(*(each.address for each in buffers))
        column = _Texts(offset=texts.offset, buffers=ctypes.addressof(addresses))
        if views is not None:
            # The library indexes views from the slice's first one, but bits of the bitmap from the offset.
            column.views = views.address + _VIEW * texts.offset
        if present is not None and texts.null_count:
            column.present = present.address
        hashes, marks = np.empty(len(texts), np.uint64), np.zeros(-(-len(texts) // 8), np.uint8)
        words = np.array(none, np.uint64)
        given = ctypes.c_int64(len(texts)), ctypes.c_uint64(seed), _at(words), ctypes.c_int64(len(words))
        absent = self._library.fields_hash(ctypes.byref(column), *given, _at(hashes), _at(marks))
        valid = pa.py_buffer(marks) if absent else None
        return pa.Array.from_buffers(pa.uint64(), len(texts), [valid, pa.py_buffer(hashes)], absent)


def _at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def load() -> TextKernels | None:
    """Return the installed kernels; None if there are none, or they belong to another release."""
    folder = Path(__file__).parent / "native"
    return open_installed(folder, "fields", TextKernels, "text is read without the compiled steps")
