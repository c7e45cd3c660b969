"""Columns in one pass each, by ``rows.c``: ids coded, counted, looked up and taken, rows hashed, numbers summed.

A wheel and the image carry the library; installing from a checkout builds it where there is a C compiler. Everywhere
else NumPy and Arrow do the same, to the bit, in several times the time. ctypes lets go of the interpreter's lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.core.compiled import checked, open_installed

_VERSION = 3  # of the functions, as rows.c has it
_NAN = 0x7FF8000000000000  # the bits of a float64 that is no number
_BUCKETS = 1 << 16  # of a sketch
_EXPONENTS = 1 << 11  # of a float64
_OTHERS = 4  # one in so many values may be looked up elsewhere
_SUMMED = 1 << 20  # values whose sums by exponent fit into 128 bits
Counts = tuple[np.ndarray, np.ndarray, np.ndarray]  # of a sketch: buckets, rows and clicks


class _Column(ctypes.Structure):
    """A column of 64-bit values as Arrow has it: ``Column`` of rows.c."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("present", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        ("none", ctypes.c_uint64),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The library that was installed with this package; None where there is none, or it is another release's."""

    def opened(path: Path) -> ctypes.CDLL:
        rows = checked(path, "rows", _VERSION)
        for name in ("code", "sketch", "exact", "merge", "look_up", "look_up_sums"):
            getattr(rows, f"rows_{name}").restype = ctypes.c_int64
        return rows

    return open_installed(__file__, "rows", opened, "columns are worked on without the compiled steps")


def coded(hashes: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """The distinct ``hashes`` (uint64) as they appear, and each one's place in them, int32; of a null their number."""
    rows = library()
    if rows is None:
        encoded = hashes.dictionary_encode()
        distinct = encoded.dictionary.to_numpy()
        codes = encoded.indices.fill_null(len(distinct)) if encoded.null_count else encoded.indices
        return distinct, codes.to_numpy()
    distinct, codes = np.empty(len(hashes), np.uint64), np.empty(len(hashes), np.int32)
    column = _column(hashes)
    count = rows.rows_code(ctypes.byref(column), _size(hashes), _at(distinct), _at(codes))
    return distinct[: _some(count)].copy(), codes


def counted(codes: np.ndarray, keep: np.ndarray | None, distinct: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each of the ``codes``, 0 to ``distinct``, occurs where ``keep`` (bool) says so, and where first: int64.

    ``first`` means nothing for a code that does not occur.
    """
    rows, first = library(), np.zeros(distinct + 1, np.int64)
    if rows is None:
        places = np.arange(len(codes)) if keep is None else np.flatnonzero(keep)
        first[codes[places[::-1]]] = places[::-1]
        return np.bincount(codes[places], minlength=distinct + 1), first
    codes, counts = np.ascontiguousarray(codes, np.int32), np.zeros(distinct + 1, np.int64)
    marks = None if keep is None else np.ascontiguousarray(keep, np.bool_)
    rows.rows_count(_at(codes), None if marks is None else _at(marks), _size(codes), _at(counts), _at(first))
    return counts, first


def taken(values: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """``values[codes]``: of int32, by codes of 16 or 32 bits that lie within them."""
    rows = library()
    if rows is None or codes.itemsize not in (2, 4):
        return values[codes]
    values, codes, out = (
        np.ascontiguousarray(values, np.int32),
        np.ascontiguousarray(codes),
        np.empty_like(codes, np.int32),
    )
    rows.rows_take(_at(values), _at(codes), ctypes.c_int32(codes.itemsize), _size(codes), _at(out))
    return out


def mixed(columns: Sequence[pa.Array]) -> np.ndarray | None:
    """One hash (uint64) of each row over ``columns`` of uint64 or float64; None without the library.

    A null counts as 0, or as NaN among numbers.
    """
    rows = library()
    if rows is None:
        return None
    total, array = np.empty(len(columns[0]), np.uint64), (_Column * len(columns))(*map(_column, columns))
    rows.rows_mix(array, ctypes.c_int64(len(columns)), _size(total), _at(total))
    return total


def whole_sums(values: np.ndarray) -> tuple[float, float, tuple[int, int] | None]:
    """Minimum and maximum of float64 ``values``; if all are whole and small, their sum and that of their squares.

    Without the library the sums are None, and the bounds are the same.
    """
    rows = library()
    if rows is None:
        return float(values.min()), float(values.max()), None
    values, bounds, sums = np.ascontiguousarray(values), np.empty(2), np.empty(2, np.int64)
    whole = rows.rows_sums(_at(values), _size(values), _at(bounds), _at(sums))
    return float(bounds[0]), float(bounds[1]), (int(sums[0]), int(sums[1])) if whole else None


def looked_up(values: pa.Array, table: np.ndarray, none: float) -> tuple[np.ndarray, np.ndarray] | None:
    """``table[values]`` (float32) where float64 ``values`` are whole and in range, and the places of all others.

    ``none``: for nulls. None without the library, and where there are many others.
    """
    rows, most = library(), len(values) // _OTHERS
    if rows is None:
        return None
    out, rest, column = np.empty(len(values), np.float32), np.empty(most, np.int64), _column(values)
    given = ctypes.byref(column), _size(values), _at(table), _size(table), ctypes.c_int64(most)
    count = rows.rows_look_up(*given, ctypes.c_float(none), _at(out), _at(rest))
    return (out, rest[:count]) if count >= 0 else None


def looked_up_sums(values: pa.Array, table: np.ndarray) -> tuple[list[int], list[int], np.ndarray] | None:
    """Least and largest of ``table[values]`` (int32), their sum and that of their squares; else as ``looked_up``.

    Nulls are left out. The squares of all values must fit into 63 bits.
    """
    rows, most = library(), len(values) // _OTHERS
    if rows is None:
        return None
    bounds, sums, rest = np.empty(2, np.int32), np.empty(2, np.int64), np.empty(most, np.int64)
    column = _column(values)
    given = ctypes.byref(column), _size(values), _at(table), _size(table), ctypes.c_int64(most)
    count = rows.rows_look_up_sums(*given, _at(bounds), _at(sums), _at(rest))
    return (bounds.tolist(), sums.tolist(), rest[:count]) if count >= 0 else None


def exact_sums(values: np.ndarray) -> tuple[int, int] | None:
    """The sum of finite float64 ``values``, and that of their squares, exactly, in units of 2^-1075 and 2^-2150.

    None without the library, and where a value that is not 0 is below 2^-480 or above 2^480.
    """
    rows = library()
    if rows is None:
        return None
    values, exponents = np.ascontiguousarray(values, np.float64), np.empty(_EXPONENTS, np.int32)
    words, total, squares = np.empty((_EXPONENTS, 4), np.uint64), 0, 0
    for start in range(0, len(values), _SUMMED):
        part = values[start : start + _SUMMED]
        count = rows.rows_exact(_at(part), _size(part), _at(exponents), _at(words))
        if count < 0:
            return None
        for exponent, (low, high, square, above) in zip(
            exponents[:count].tolist(), words[:count].tolist(), strict=True
        ):
            total += (low + (high << 64) - (high >> 63 << 128)) << exponent
            squares += (square + (above << 64)) << 2 * exponent
    return total, squares


def sketched(values: np.ndarray, labels: np.ndarray) -> Counts | None:
    """The buckets (``ingest.sketch``) of finite float64 ``values``, their counts and clicks.

    None without the library.
    """
    rows = library()
    if rows is None:
        return None
    values, labels = np.ascontiguousarray(values, np.float64), np.ascontiguousarray(labels, np.float32)
    most = min(len(values), _BUCKETS)
    used, counts, clicks = np.empty(most, np.uint16), np.empty(most, np.int64), np.empty(most, np.int64)
    count = _some(rows.rows_sketch(_at(values), _at(labels), _size(values), _at(used), _at(counts), _at(clicks)))
    return used[:count].copy(), counts[:count].copy(), clicks[:count].copy()


def merged(one: Counts, other: Counts) -> Counts | None:
    """The sums of two sketches' counts; None without the library."""
    rows = library()
    if rows is None:
        return None
    most = len(one[0]) + len(other[0])
    used, counts, clicks = np.empty(most, np.uint16), np.empty(most, np.int64), np.empty(most, np.int64)
    given = [*map(_at, one), _size(one[0]), *map(_at, other), _size(other[0])]
    count = rows.rows_merge(*given, _at(used), _at(counts), _at(clicks))
    return used[:count].copy(), counts[:count].copy(), clicks[:count].copy()


def unseen(rows_of: np.ndarray, codes: np.ndarray, hashes: np.ndarray, first: int, count: int) -> np.ndarray:
    """The hash (uint64) of each lookup whose row is one of ``count`` from ``first`` on; 0 of the others."""
    rows, out = library(), np.zeros(len(rows_of), np.uint64)
    if rows is None or codes.itemsize not in (2, 4):
        there = (rows_of >= first) & (rows_of < first + count)
        out[there] = hashes[codes[there]]
        return out
    rows_of, codes = np.ascontiguousarray(rows_of, np.int32), np.ascontiguousarray(codes)
    hashes, bounds = np.ascontiguousarray(hashes), (ctypes.c_int32(first), ctypes.c_int32(count))
    rows.rows_unseen(
        _at(rows_of), _at(codes), ctypes.c_int32(codes.itemsize), _at(hashes), _size(out), *bounds, _at(out)
    )
    return out


def narrowed(values: np.ndarray) -> np.ndarray | None:
    """float64 ``values`` as float32, where each of them is one (or NaN); None where one is not."""
    rows = library()
    if rows is None:
        narrow = values.astype(np.float32)
        return narrow if bool(((narrow == values) | (values != values)).all()) else None
    values, out = np.ascontiguousarray(values), np.empty(len(values), np.float32)
    return out if rows.rows_narrow(_at(values), _size(values), _at(out)) else None


class HashTable:
    """int32 ``rows`` by distinct uint64 ``hashes``."""

    def __init__(self, hashes: np.ndarray, rows: np.ndarray) -> None:
        self._keys, self._rows = np.ascontiguousarray(hashes, np.uint64), np.ascontiguousarray(rows, np.int32)
        self._bits = 0
        if (native := library()) is not None:
            self._bits = max(2 * len(hashes), 2).bit_length()
            keys, places = np.empty(1 << self._bits, np.uint64), np.empty(1 << self._bits, np.int32)
            given = _at(self._keys), _at(self._rows), _size(self._keys)
            native.rows_index(*given, _at(keys), _at(places), ctypes.c_int32(self._bits))
            self._keys, self._rows = keys, places

    def rows_of(self, hashes: np.ndarray) -> np.ndarray:
        """The row of each of ``hashes``, int32; -1 of one that has none."""
        hashes, native = np.ascontiguousarray(hashes, np.uint64), library()
        if native is None or not self._bits:
            return self._searched(hashes)
        out = np.empty(len(hashes), np.int32)
        table = _at(self._keys), _at(self._rows), ctypes.c_int32(self._bits)
        native.rows_find(*table, _at(hashes), _size(hashes), _at(out))
        return out

    def _searched(self, hashes: np.ndarray) -> np.ndarray:
        keys, rows = self._sorted
        place = np.searchsorted(keys, hashes)
        known = place < len(keys)
        known[known] = keys[place[known]] == hashes[known]
        return rows[np.where(known, place, len(keys))]

    @cached_property
    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys, rising, and their rows, with -1 behind them."""
        used = np.flatnonzero(self._rows >= 0)
        used = used[np.argsort(self._keys[used])]
        return self._keys[used], np.append(self._rows[used], np.int32(-1))


def _column(values: pa.Array) -> _Column:
    present, data = values.buffers()
    marks = present.address if present is not None and values.null_count else None
    none = _NAN if pa.types.is_floating(values.type) else 0
    return _Column(None if data is None else data.address, marks, values.offset, none)


def _some(count: int) -> int:
    if count < 0:
        raise MemoryError("no memory to work on the columns of a block")
    return count


def _size(values: np.ndarray | pa.Array) -> ctypes.c_int64:
    return ctypes.c_int64(len(values))


def _at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
