"""The rows of a shard that lie in host memory, between a device's slots and the log.

Rows that leave the device come here, and those that leave this memory go to the log. A row that the device wants again
leaves at once, so every row is in one place, and rows leave in the order in which they came: together the slots and
this memory hold the most recently used rows. All of it is arrays made at the start: for each row that it has room for
its values and ``HOST_ROW_BYTES``, never more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.embeddings.ssd.aio import I64
from pipeline.embeddings.ssd.log import F32, I8

# Places and their turns in line are numbers of 32 bits, and there are two turns for each place.
MOST_HOST_ROWS = 2**30
_LOOK = 4096  # turns looked at together at least


class HostRows:
    """At most ``count`` rows of ``values`` each, in places from 0 on; the one that came first leaves first.

    For one thread. Turns in line of rows that left before their time are passed over.
    """

    def __init__(self, count: int, values: int) -> None:
        self.count = count
        self._values: F32 = np.empty((count, values), np.float32)  # memory only once a place is used
        self._row = np.empty(count, np.uint32)
        self._kind = np.empty(count, np.int8)
        self._turn = np.empty(count, np.int32)  # where a place stands in line; -1: it is free
        self._line = np.empty(2 * count, np.int32)  # places in the order in which their rows came
        self._free = np.empty(count, np.int32)
        self.clear()

    @property
    def bytes(self) -> int:
        """What all of it takes once every place was used."""
        arrays = self._values, self._row, self._kind, self._turn, self._line, self._free
        return sum(each.nbytes for each in arrays)

    def clear(self) -> None:
        """Forget all rows."""
        self._turn[:] = -1
        self._free[:] = np.arange(self.count)
        self._unused, self._first, self._end = self.count, 0, 0

    def add(self, rows: I64, values: F32, kinds: I8) -> tuple[I64, tuple[I64, F32, I8]]:
        """Take in ``rows``, at most ``count``, the one to leave first in front; ``kinds``: the log's.

        Their places, and the rows that leave to make room, with their values and kinds.
        """
        leaving = self._first_in_line(len(rows) - self._unused)
        left = self._row[leaving].astype(np.int64), self._values[leaving], self._kind[leaving]
        self.drop(leaving)
        self._unused -= len(rows)
        places = self._free[self._unused : self._unused + len(rows)].astype(np.int64)
        self._row[places], self._values[places], self._kind[places] = rows, values, kinds
        self.renew(places)
        return places, left

    def read(self, places: I64) -> F32:
        """Copies of the values in ``places`` [n]: [n, values]."""
        copies: F32 = self._values[places]
        return copies

    def kinds(self, places: I64) -> I8:
        """What the rows in ``places`` came with."""
        kinds: I8 = self._kind[places]
        return kinds

    def drop(self, places: I64) -> None:
        """The rows in ``places`` [n], each once, are somewhere else from now on."""
        self._turn[places] = -1
        self._free[self._unused : self._unused + len(places)] = places
        self._unused += len(places)

    def renew(self, places: I64) -> None:
        """The rows in ``places`` [n], each once, leave after all others."""
        if self._end + len(places) > len(self._line):
            self._close_up()
        turns = np.arange(self._end, self._end + len(places), dtype=np.int32)
        self._line[turns], self._turn[places] = places, turns
        self._end += len(places)

    def _close_up(self) -> None:
        """Drop the turns that are passed over, so that half the line is free at least."""
        waiting = self._line[self._first : self._end]
        waiting = waiting[self._in_turn(waiting, self._first)]
        self._first, self._end = 0, len(waiting)
        self._line[: self._end], self._turn[waiting] = waiting, np.arange(self._end)

    def _first_in_line(self, count: int) -> I64:
        """The places of the ``count`` rows that leave first."""
        found = [np.empty(0, np.int64)]
        while count > 0:
            next_ones = self._line[self._first : min(self._end, self._first + max(count, _LOOK))]
            stand = np.flatnonzero(self._in_turn(next_ones, self._first))[:count]
            found.append(next_ones[stand].astype(np.int64))
            count -= len(stand)
            self._first += len(next_ones) if count else int(stand[-1]) + 1
        return np.concatenate(found)

    def _in_turn(self, places: NDArray[np.int32], first: int) -> NDArray[np.bool_]:
        """Which of ``places``, which stand in line from ``first`` on, have not left or come again since."""
        here: NDArray[np.bool_] = self._turn[places] == np.arange(first, first + len(places))
        return here
