"""Sorted row numbers as bytes: differences, seven bits a byte (LEB128), or a plain range.

A delta checkpoint names the rows it holds; touched rows lie close together (ids are ranked by
frequency), so a difference takes little more than one byte.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.checkpoint.container import VERIFY
from pipeline.errors import DamagedError

_LONGEST = 9


def encode_ids(ids: NDArray[np.int64]) -> NDArray[np.uint8]:
    """LEB128 bytes of the first id and of the differences that follow; ``ids`` strictly rising, from 0 up."""
    if not len(ids):
        return np.empty(0, np.uint8)
    deltas = np.diff(ids, prepend=0)
    if ids[0] < 0 or (deltas[1:] <= 0).any():
        raise ValueError("row numbers must rise strictly from 0 up")
    lengths = np.ones(len(deltas), np.int64)
    for size in range(1, _LONGEST):
        lengths += deltas >= (1 << (7 * size))
    ends = np.cumsum(lengths)
    place = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    values = (np.repeat(deltas, lengths) >> (7 * place)) & 0x7F
    more = place < np.repeat(lengths, lengths) - 1
    return (values | (more << 7)).astype(np.uint8)


def decode_ids(data: NDArray[np.uint8], count: int) -> NDArray[np.int64]:
    """The ``count`` ids that ``encode_ids`` wrote; DamagedError where the bytes do not hold that many."""
    last = (data & 0x80) == 0
    if int(last.sum()) != count or (len(data) > 0 and not last[-1]):
        raise DamagedError(
            f"row numbers are corrupt: {int(last.sum())} in the file, expected {count}",
            hint=VERIFY,
        )
    if not count:
        return np.empty(0, np.int64)
    ends = np.flatnonzero(last) + 1
    starts = np.concatenate([[0], ends[:-1]])
    place = np.arange(len(data)) - np.repeat(starts, ends - starts)
    values = (data & 0x7F).astype(np.int64) << (7 * place)
    return np.cumsum(np.add.reduceat(values, starts))
