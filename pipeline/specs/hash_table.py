"""The rows of ids by their hashes: what a ``FittedMapping`` looks ids up in.

A table can be pickled, as Ray's workers need, and works on a machine with and on one without the compiled kernels.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from pipeline.core.kernels import load_kernels


class HashTable:
    """int32 ``rows`` by distinct uint64 ``hashes``."""

    def __init__(self, hashes: np.ndarray, rows: np.ndarray) -> None:
        self._keys, self._rows = np.ascontiguousarray(hashes, np.uint64), np.ascontiguousarray(rows, np.int32)
        kernels = load_kernels("rows")
        # Remember this, because the table may be unpickled on another machine, and only one of the two may have
        # kernels. Without an index, ``rows_of`` searches the sorted keys.
        self._indexed = kernels is not None
        if kernels is not None:
            self._keys, self._rows = kernels.index(self._keys, self._rows)

    def rows_of(self, hashes: np.ndarray) -> np.ndarray:
        """Return the row of each of ``hashes``, int32; -1 for one that has none."""
        hashes = np.ascontiguousarray(hashes, np.uint64)
        kernels = load_kernels("rows")
        if kernels is not None and self._indexed:
            return kernels.find(self._keys, self._rows, hashes)
        # A hash above the largest key gets the place after it, where ``rows`` has an extra entry of -1 and ``keys`` has
        # none.
        keys, rows = self._sorted
        place = np.searchsorted(keys, hashes)
        known = place < len(keys)
        known[known] = keys[place[known]] == hashes[known]
        return rows[np.where(known, place, len(keys))]

    @cached_property
    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        # Return the keys, rising, and their rows, followed by -1. Free places of an index have row -1, too.
        used = np.flatnonzero(self._rows >= 0)
        used = used[np.argsort(self._keys[used])]
        return self._keys[used], np.append(self._rows[used], np.int32(-1))
