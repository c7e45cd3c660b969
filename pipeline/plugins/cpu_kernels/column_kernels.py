"""Columns in one pass each: ids coded, counted, looked up and taken, rows hashed, numbers summed.

This is ``native/rows.c``, called through ctypes for NumPy and Arrow arrays. NumPy and Arrow do the same, to the bit, in
several times the time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.core.kernels import open_installed, open_library

_VERSION = 3  # version of the functions, the same as in rows.c
_NAN = 0x7FF8000000000000  # bits of a float64 NaN
_BUCKETS = 1 << 16  # buckets of a sketch
_EXPONENTS = 1 << 11  # exponents of a float64
_OTHERS = 4  # at most one in this many values may be looked up elsewhere
_SUMMED = 1 << 20  # this many values have sums by exponent that fit into 128 bits
Counts = tuple[np.ndarray, np.ndarray, np.ndarray]  # a sketch's buckets, rows and clicks


class _Column(ctypes.Structure):
    # ``Column`` of rows.c: a column of 64-bit values in Arrow's layout.
    _fields_ = (
        ("values", ctypes.c_void_p),
        ("present", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        ("none", ctypes.c_uint64),
    )


class ColumnKernels:
    """The functions of the library at ``path``."""

    def __init__(self, path: Path) -> None:
        self._library = open_library(path, _VERSION)
        for name in ("code", "sketch", "exact", "merge", "look_up", "look_up_sums"):
            getattr(self._library, f"rows_{name}").restype = ctypes.c_int64

    def code(self, hashes: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Find the distinct ``hashes`` (uint64) as they appear, and each one's place in them.

        Returns:
            uint64 [distinct], and int32 [n]; of a null the number of distinct ones.
        """
        distinct = np.empty(len(hashes), np.uint64)
        codes = np.empty(len(hashes), np.int32)
        column = _column(hashes)
        count = self._library.rows_code(ctypes.byref(column), _size(hashes), _at(distinct), _at(codes))
        # Copy, so that a few distinct values do not keep the memory of the whole array alive.
        return distinct[: _some(count)].copy(), codes

    def count(self, codes: np.ndarray, keep: np.ndarray | None, distinct: int) -> tuple[np.ndarray, np.ndarray]:
        """Count how often each of ``codes``, 0 to ``distinct``, occurs where ``keep`` (bool) says so.

        Returns:
            The counts, and where a code occurs first: int64 [distinct + 1], undefined for a code that does not occur.
        """
        codes = np.ascontiguousarray(codes, np.int32)
        counts = np.zeros(distinct + 1, np.int64)
        first = np.zeros(distinct + 1, np.int64)
        marks = None
        if keep is not None:
            # Keep a reference: a temporary array would be freed before the library reads its memory.
            keep = np.ascontiguousarray(keep, np.bool_)
            marks = _at(keep)
        self._library.rows_count(_at(codes), marks, _size(codes), _at(counts), _at(first))
        return counts, first

    def take(self, values: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Return ``values[codes]`` for int32 ``values`` and codes of 16 or 32 bits within them."""
        values = np.ascontiguousarray(values, np.int32)
        codes = np.ascontiguousarray(codes)
        out = np.empty_like(codes, np.int32)
        self._library.rows_take(_at(values), _at(codes), ctypes.c_int32(codes.itemsize), _size(codes), _at(out))
        return out

    def mix(self, columns: Sequence[pa.Array]) -> np.ndarray:
        """Hash each row over ``columns`` of uint64 or float64: uint64. A null counts as 0, or as NaN among numbers."""
        total = np.empty(len(columns[0]), np.uint64)
        array = (_Column * len(columns))(*map(_column, columns))
        self._library.rows_mix(array, ctypes.c_int64(len(columns)), _size(total), _at(total))
        return total

    def whole_sums(self, values: np.ndarray) -> tuple[float, float, tuple[int, int] | None]:
        """Return minimum and maximum of float64 ``values``.

        If all are whole and small, also their sum and that of their squares.
        """
        values = np.ascontiguousarray(values)
        bounds = np.empty(2)
        sums = np.empty(2, np.int64)
        if not self._library.rows_sums(_at(values), _size(values), _at(bounds), _at(sums)):
            return float(bounds[0]), float(bounds[1]), None
        return float(bounds[0]), float(bounds[1]), (int(sums[0]), int(sums[1]))

    def look_up(self, values: pa.Array, table: np.ndarray, none: float) -> tuple[np.ndarray, np.ndarray] | None:
        """Return ``table[values]`` (float32) where ``values`` are whole and in range, and the places of all others.

        Args:
            values: float64.
            table: float32.
            none: The value for nulls.

        Returns:
            None if there are many others.
        """
        # Beyond this number of other values, looking those up elsewhere costs more than the table saves.
        most, column = len(values) // _OTHERS, _column(values)
        out, rest = np.empty(len(values), np.float32), np.empty(most, np.int64)
        given = ctypes.byref(column), _size(values), _at(table), _size(table), ctypes.c_int64(most)
        count = self._library.rows_look_up(*given, ctypes.c_float(none), _at(out), _at(rest))
        return (out, rest[:count]) if count >= 0 else None

    def look_up_sums(self, values: pa.Array, table: np.ndarray) -> tuple[list[int], list[int], np.ndarray] | None:
        """Return least and largest of ``table[values]`` (int32), their sum and that of their squares; see ``look_up``.

        Nulls are left out. The squares of all values must fit into 63 bits.
        """
        most, column = len(values) // _OTHERS, _column(values)
        bounds, sums, rest = np.empty(2, np.int32), np.empty(2, np.int64), np.empty(most, np.int64)
        given = ctypes.byref(column), _size(values), _at(table), _size(table), ctypes.c_int64(most)
        count = self._library.rows_look_up_sums(*given, _at(bounds), _at(sums), _at(rest))
        return (bounds.tolist(), sums.tolist(), rest[:count]) if count >= 0 else None

    def exact_sums(self, values: np.ndarray) -> tuple[int, int] | None:
        """Sum finite float64 ``values``, and their squares, exactly, in units of 2^-1075 and 2^-2150.

        Returns:
            None if a value that is not 0 is below 2^-480 or above 2^480.
        """
        values, exponents = np.ascontiguousarray(values, np.float64), np.empty(_EXPONENTS, np.int32)
        words, total, squares = np.empty((_EXPONENTS, 4), np.uint64), 0, 0
        for start in range(0, len(values), _SUMMED):
            part = values[start : start + _SUMMED]
            count = self._library.rows_exact(_at(part), _size(part), _at(exponents), _at(words))
            if count < 0:
                return None
            # The library sums by exponent, in 128 bits each. Python's integers have no limit and add these sums
            # exactly.
            for exponent, sums in zip(exponents[:count].tolist(), words[:count].tolist(), strict=True):
                low, high, square, above = sums
                # The sum is signed, in two's complement; the sum of squares is unsigned.
                total += (low + (high << 64) - (high >> 63 << 128)) << exponent
                squares += (square + (above << 64)) << 2 * exponent
        return total, squares

    def sketch(self, values: np.ndarray, labels: np.ndarray) -> Counts:
        """Count finite float64 ``values``, and clicks among their ``labels``, by bucket of ``ingest.sketch``."""
        values = np.ascontiguousarray(values, np.float64)
        labels = np.ascontiguousarray(labels, np.float32)
        # No more buckets can be in use than there are values.
        used, counts, clicks = _room(min(len(values), _BUCKETS))
        given = _at(values), _at(labels), _size(values)
        count = _some(self._library.rows_sketch(*given, _at(used), _at(counts), _at(clicks)))
        return used[:count].copy(), counts[:count].copy(), clicks[:count].copy()

    def merge(self, one: Counts, other: Counts) -> Counts:
        """Add up the counts of two sketches."""
        used, counts, clicks = _room(len(one[0]) + len(other[0]))
        given = [*map(_at, one), _size(one[0]), *map(_at, other), _size(other[0])]
        count = self._library.rows_merge(*given, _at(used), _at(counts), _at(clicks))
        return used[:count].copy(), counts[:count].copy(), clicks[:count].copy()

    def narrow(self, values: np.ndarray) -> np.ndarray | None:
        """Return float64 ``values`` as float32, where each of them is one (or NaN); None if one is not."""
        values = np.ascontiguousarray(values)
        out = np.empty(len(values), np.float32)
        if not self._library.rows_narrow(_at(values), _size(values), _at(out)):
            return None
        return out

    def unseen(self, rows_of: np.ndarray, codes: np.ndarray, hashes: np.ndarray, first: int, count: int) -> np.ndarray:
        """Return the hash (uint64) of each lookup whose row is one of ``count`` from ``first`` on; 0 of the others.

        ``codes`` of 16 or 32 bits are the lookups' places in ``hashes``.
        """
        rows_of, codes = np.ascontiguousarray(rows_of, np.int32), np.ascontiguousarray(codes)
        hashes, out = np.ascontiguousarray(hashes), np.zeros(len(rows_of), np.uint64)
        given = _at(rows_of), _at(codes), ctypes.c_int32(codes.itemsize), _at(hashes), _size(out)
        self._library.rows_unseen(*given, ctypes.c_int32(first), ctypes.c_int32(count), _at(out))
        return out

    def index(self, hashes: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Build the hash table of int32 ``rows`` by distinct uint64 ``hashes``.

        Returns:
            The keys of its places, uint64 [a power of two], and their rows, int32; -1 for a free place.
        """
        # At least twice as many places as keys, rounded up to a power of two, keep searches short.
        bits = max(2 * len(hashes), 2).bit_length()
        keys, places = np.empty(1 << bits, np.uint64), np.empty(1 << bits, np.int32)
        given = _at(hashes), _at(rows), _size(hashes)
        self._library.rows_index(*given, _at(keys), _at(places), ctypes.c_int32(bits))
        return keys, places

    def find(self, keys: np.ndarray, rows: np.ndarray, hashes: np.ndarray) -> np.ndarray:
        """Return the row of each of ``hashes`` (uint64) in a table of ``index``: int32; -1 of one that has none."""
        out, bits = np.empty(len(hashes), np.int32), len(keys).bit_length() - 1
        self._library.rows_find(_at(keys), _at(rows), ctypes.c_int32(bits), _at(hashes), _size(hashes), _at(out))
        return out


def _column(values: pa.Array) -> _Column:
    column = _Column(offset=values.offset)
    present, data = values.buffers()
    if data is not None:
        column.values = data.address
    # A slice without nulls may still have its column's bitmap.
    if present is not None and values.null_count:
        column.present = present.address
    if pa.types.is_floating(values.type):
        column.none = _NAN
    return column


def _room(most: int) -> Counts:
    return np.empty(most, np.uint16), np.empty(most, np.int64), np.empty(most, np.int64)


def _some(count: int) -> int:
    if count < 0:
        raise MemoryError("no memory to work on the columns of a block")
    return count


def _size(values: np.ndarray | pa.Array) -> ctypes.c_int64:
    return ctypes.c_int64(len(values))


def _at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def load() -> ColumnKernels | None:
    """Return the installed kernels; None if there are none, or they belong to another release."""
    folder = Path(__file__).parent / "native"
    return open_installed(folder, "rows", ColumnKernels, "columns are worked on without the compiled steps")
