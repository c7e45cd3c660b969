"""Many reads of a disk at once, past the page cache, into one piece of memory that is reused.

A read costs 4 to 5 us of processor time that way, whichever of io_uring and Linux AIO the kernel allows; threads took
17 (docs/measurements/ssd.md).
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.embeddings.ssd.engines import DEPTH, ENGINES, I64, best_engine, failed

_STAGING = 8 << 20


class DiskQueue:
    """A queue of reads into 8 MiB of memory of its own, by the first of the ``engines`` that works. For one thread.

    ``engine``: its name; ``refused``: why those before it are not used, by name.
    """

    def __init__(self, engines: Sequence[Any] = ENGINES) -> None:
        self._map = mmap.mmap(-1, _STAGING)
        self._memory = np.frombuffer(self._map, np.float32)
        self._start = self._memory.ctypes.data
        self._engine, self.refused = best_engine(self._map, engines)
        self._closed = False

    @property
    def engine(self) -> str:
        """What asks the kernel for reads: io_uring, Linux AIO, or threads."""
        return self._engine.name

    def read(self, fds: I64, offsets: I64, lengths: I64) -> Iterator[tuple[I64, I64, NDArray[np.float32]]]:
        """Read [offset, offset + length) of each file, whole pages; yields (which, where, memory) as reads are done.

        Request ``which[i]`` is in ``memory`` from word ``where[i]`` on, until the iterator advances. OSError where the
        disk fails; EIO where a file ends too early.
        """
        if not len(offsets):
            return
        stride = int(lengths.max())
        slots = min(DEPTH, _STAGING // stride, len(offsets))
        free, sent, flying = np.arange(slots), 0, 0
        holds = np.empty(slots, np.int64)
        while sent < len(offsets) or flying:
            count = min(len(free), len(offsets) - sent)
            if count:
                places, which = free[:count], np.arange(sent, sent + count)
                holds[places] = which
                into = self._start + places * stride
                count = self._engine.submit(places, fds[which], offsets[which], lengths[which], into)
                free, sent, flying = free[count:], sent + count, flying + count
            places, results = self._engine.wait(max(1, min(flying, slots // 4)))
            which = holds[places]
            self._check(results, lengths[which])
            yield which, places * (stride // 4), self._memory
            free, flying = np.concatenate([free, places]), flying - len(places)

    def _check(self, results: I64, lengths: I64) -> None:
        if (results == lengths).all():
            return
        wrong = int(results[results != lengths][0])
        raise failed(-wrong if wrong < 0 else errno.EIO)

    def close(self) -> None:
        """Return the queue to the kernel, once the requests under way are done."""
        if not self._closed:
            self._closed = True
            self._engine.close()
