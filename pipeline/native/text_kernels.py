"""Delimited text to columns, and texts to hashes, in one pass each, by ``fields.c``.

A wheel and the image carry the library; installing from a checkout builds it where there is a C compiler. Everywhere
else the functions return None, and whoever calls them asks Polars for the same. ctypes lets go of the interpreter's
lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.core.compiled import checked, open_installed

_VERSION = 1  # of the functions, as fields.c has it
_VIEW = 16  # bytes of a string view
_MOST = 2**31 - 1  # bytes that a view can reach
_COUNTED = 1 << 18  # bytes compared at a time: they stay in the cache


class _Field(ctypes.Structure):
    """Where a column goes: ``Field`` of fields.c."""

    _fields_ = (("out", ctypes.c_void_p), ("present", ctypes.c_void_p), ("rest", ctypes.c_int64))


class _Texts(ctypes.Structure):
    """A column of string views: ``Texts`` of fields.c."""

    _fields_ = (
        ("views", ctypes.c_void_p),
        ("present", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        ("buffers", ctypes.c_void_p),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The library that was installed with this package; None where there is none, or it is another release's."""

    def opened(path: Path) -> ctypes.CDLL:
        fields = checked(path, "fields", _VERSION)
        for name in ("count", "hash"):
            getattr(fields, f"fields_{name}").restype = ctypes.c_int64
        return fields

    return open_installed(__file__, "fields", opened, "text is read without the compiled steps")


def occurrences(text: bytes | memoryview, byte: int) -> int:
    """How often ``byte`` occurs, where that is often; without the library in several times the time, by NumPy."""
    fields, data = library(), np.frombuffer(text, np.uint8)
    if fields is not None:
        return int(fields.fields_count(_at(data), ctypes.c_int64(len(data)), ctypes.c_uint8(byte)))
    return sum(int(np.count_nonzero(data[at : at + _COUNTED] == byte)) for at in range(0, len(data), _COUNTED))


def split(block: bytes, separator: int, numbers: Sequence[bool]) -> list[pa.Array] | None:
    """The columns of whole lines of text without quotes: float64 where ``numbers`` says so, else string views.

    An empty field is no number, and an empty text. None without the library, and where text is not ASCII or has a
    carriage return, a line has more or fewer fields, or a number is not plain digits, at most 15, with a point between
    them and a minus before them if they like.
    """
    fields = library()
    if fields is None or len(numbers) < 2 or len(block) > _MOST or not block.endswith(b"\n"):
        return None
    if not block.isascii() or b"\r" in block:
        return None
    size, lines = ctypes.c_int64(len(block)), occurrences(block, ord("\n"))
    columns = [np.empty(lines if number else (lines, _VIEW), np.float64 if number else np.uint8) for number in numbers]
    marks = [np.zeros(-(-lines // 8) if number else 0, np.uint8) for number in numbers]
    into = (_Field * len(columns))(
        *(
            _Field(_at(out), _at(mark) if number else None)
            for out, mark, number in zip(columns, marks, numbers, strict=True)
        )
    )
    given = ctypes.c_uint8(separator), into, ctypes.c_int64(len(columns)), ctypes.c_int64(lines)
    if fields.fields_split(block, size, *given):
        return None
    return [
        pa.Array.from_buffers(pa.float64(), lines, [pa.py_buffer(mark), pa.py_buffer(out)], field.rest)
        if number
        else _texts(fields, block, out, field.rest)
        for out, mark, number, field in zip(columns, marks, numbers, into, strict=True)
    ]


def _texts(fields: ctypes.CDLL, block: bytes, views: np.ndarray, rest: int) -> pa.Array:
    """``views``, and a buffer of the ``rest`` bytes of those that point into ``block``."""
    own = np.empty(rest, np.uint8)
    if rest:
        fields.fields_own(block, _at(views), ctypes.c_int64(len(views)), _at(own))
    buffers = [None, pa.py_buffer(views), *([pa.py_buffer(own)] if rest else [])]
    return pa.Array.from_buffers(pa.string_view(), len(views), buffers)


def hashed(texts: pa.Array, seed: int, none: Sequence[int] = ()) -> pa.Array | None:
    """xxhash64 (uint64) of the bytes of each of ``texts``, string views; null where it is null, or one of ``none``.

    None without the library.
    """
    fields = library()
    if fields is None:
        return None
    marks, views, *buffers = texts.buffers()
    at = (ctypes.c_void_p * max(len(buffers), 1))(*(each.address for each in buffers))
    column = _Texts(
        (0 if views is None else views.address) + _VIEW * texts.offset,
        marks.address if marks is not None and texts.null_count else None,
        texts.offset,
        ctypes.addressof(at),
    )
    out, present = np.empty(len(texts), np.uint64), np.zeros(-(-len(texts) // 8), np.uint8)
    words = np.array(none, np.uint64)
    given = ctypes.c_int64(len(texts)), ctypes.c_uint64(seed), _at(words), ctypes.c_int64(len(words))
    absent = fields.fields_hash(ctypes.byref(column), *given, _at(out), _at(present))
    there = pa.py_buffer(present) if absent else None
    return pa.Array.from_buffers(pa.uint64(), len(texts), [there, pa.py_buffer(out)], absent)


def _at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
