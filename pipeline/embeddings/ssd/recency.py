"""The slots whose rows no batch holds, in the order in which their last batches let them go."""

from __future__ import annotations

from collections import deque

import numpy as np

from pipeline.embeddings.ssd.aio import I64

_STALE = 4  # entries a slot before those of rows that were used since are dropped


class Recency:
    """A queue of slots, the longest unused first. A slot may be used again meanwhile: its old entry is passed over."""

    def __init__(self, slots: int = 0) -> None:
        self._queue: deque[tuple[I64, I64]] = deque()  # times and slots
        self._queued = 0
        self._time = np.full(slots, -1, np.int64)  # when a slot was last let go; -1: it has left since
        self._now = 0

    def grow(self, slots: int) -> None:
        """There are ``slots`` more."""
        self._time = np.concatenate([self._time, np.full(slots, -1, np.int64)])

    def add(self, slots: I64, held: np.ndarray) -> None:
        """``slots`` were let go; ``held``: how many batches hold each slot."""
        self._now += 1
        self._time[slots] = self._now
        self._queue.append((self._time[slots], slots))
        self._queued += len(slots)
        if self._queued > _STALE * len(self._time):
            self._compact(held)

    def take(self, count: int, held: np.ndarray) -> I64:
        """The ``count`` longest unused ones, which leave the queue; as many must be there."""
        leaving = [np.empty(0, np.int64)]
        while count:
            times, slots = self._queue.popleft()
            self._queued -= len(slots)
            still = np.flatnonzero((self._time[slots] == times) & (held[slots] == 0))
            leaving.append(slots[still[:count]])
            if len(still) > count:
                rest = still[count:]
                self._queue.appendleft((times[rest], slots[rest]))
                self._queued += len(rest)
            count -= len(leaving[-1])
        taken = np.concatenate(leaving)
        self._time[taken] = -1
        return taken

    def _compact(self, held: np.ndarray) -> None:
        slots = np.flatnonzero((self._time > 0) & (held == 0))
        slots = slots[np.argsort(self._time[slots], kind="stable")]
        self._queue, self._queued = deque([(self._time[slots], slots)]), len(slots)
