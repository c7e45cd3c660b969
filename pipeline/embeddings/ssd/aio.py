"""Many reads of a disk at once, past the page cache, into one piece of memory that is reused.

Linux AIO (io_submit(2)) rather than io_uring, which container runtimes often forbid. One call submits a thousand
requests and NumPy fills the arrays, so a read costs about 5 us of CPU time; threads took 17 (docs/measurements.md).
Where the kernel refuses AIO, reads are done one after another, which is slow.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
_LIBC = ctypes.CDLL(None, use_errno=True)
# io_setup, io_destroy, io_getevents, io_submit.
_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
_REQUEST = np.dtype(
    [("data", "<u8"), ("key", "<u4"), ("flags", "<i4"), ("what", "<u2"), ("priority", "<i2"), ("fd", "<u4"),
     ("buffer", "<u8"), ("bytes", "<u8"), ("offset", "<i8"), ("reserved", "<u8"), ("more", "<u8")]
)  # fmt: skip
_EVENT = np.dtype([("data", "<u8"), ("request", "<u8"), ("result", "<i8"), ("more", "<i8")])
_DEPTH = 1024
_STAGING = 8 << 20


class DiskQueue:
    """A queue of reads into 8 MiB of memory of its own. For one thread.

    ``refused``: why reads are done one after another, '' where they are not.
    """

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, _STAGING)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._address = self._bytes.ctypes.data
        self._requests = np.zeros(_DEPTH, _REQUEST)
        self._pointers = self._requests.ctypes.data + _REQUEST.itemsize * np.arange(_DEPTH, dtype=np.uint64)
        self._events = np.zeros(_DEPTH, _EVENT)
        self._calls = _CALLS.get(platform.machine())
        self.refused = "" if self._calls else f"not known for {platform.machine()}"
        context = ctypes.c_ulong(0)
        if self._calls and self._call(0, _DEPTH, ctypes.byref(context)):
            self._calls, self.refused = None, os.strerror(ctypes.get_errno())
        self._context = context

    def read(self, fds: I64, offsets: I64, lengths: I64) -> Iterator[tuple[I64, I64, NDArray[np.float32]]]:
        """Read [offset, offset + length) of each file, whole pages; yields (which, where, memory) as reads are done.

        Request ``which[i]`` is in ``memory`` from word ``where[i]`` on, until the iterator advances. OSError where the
        disk fails; EIO where a file ends too early.
        """
        if not len(offsets):
            return
        stride = int(lengths.max())
        slots = min(_DEPTH, _STAGING // stride, len(offsets))
        memory = self._bytes.view(np.float32)
        for which, places in (self._several if self._calls else self._one)(fds, offsets, lengths, stride, slots):
            yield which, places * (stride // 4), memory

    def _several(self, fds: I64, offsets: I64, lengths: I64, stride: int, slots: int) -> Iterator[tuple[I64, I64]]:
        free, sent, flying = np.arange(slots), 0, 0
        holds = np.empty(slots, np.int64)
        while sent < len(offsets) or flying:
            count = min(len(free), len(offsets) - sent)
            if count:
                places, which = free[:count], np.arange(sent, sent + count)
                part = self._requests[:slots]
                part["data"][places], part["fd"][places] = places, fds[which]
                part["buffer"][places] = self._address + places * stride
                part["bytes"][places], part["offset"][places] = lengths[which], offsets[which]
                holds[places] = which
                count = self._submit(places)
                free, sent, flying = free[count:], sent + count, flying + count
            done = self._wait(max(1, min(flying, slots // 4)))
            places = self._events["data"][:done].astype(np.int64)
            which = holds[places]
            self._check(self._events["result"][:done], lengths[which])
            yield which, places
            free, flying = np.concatenate([free, places]), flying - done

    def _submit(self, places: I64) -> int:
        """Hand over the requests at ``places``; how many the kernel took, at least one."""
        pointers = self._pointers[places]
        taken = self._call(3, self._context, ctypes.c_long(len(places)), pointers.ctypes.data_as(ctypes.c_void_p))
        if taken < 1:
            raise _error(ctypes.get_errno())
        return taken

    def _wait(self, least: int) -> int:
        """Wait for ``least`` requests; how many are done."""
        events = self._events.ctypes.data_as(ctypes.c_void_p)
        while True:
            done = self._call(2, self._context, ctypes.c_long(least), ctypes.c_long(_DEPTH), events, None)
            if done >= 1:
                return done
            if done < 0 and ctypes.get_errno() != errno.EINTR:
                raise _error(ctypes.get_errno())

    def _call(self, which: int, *arguments: Any) -> int:
        assert self._calls is not None
        return int(_LIBC.syscall(ctypes.c_long(self._calls[which]), *arguments))

    def _check(self, results: NDArray[np.int64], lengths: I64) -> None:
        if (results == lengths).all():
            return
        failed = int(results[results != lengths][0])
        raise _error(-failed if failed < 0 else errno.EIO)

    def _one(self, fds: I64, offsets: I64, lengths: I64, stride: int, slots: int) -> Iterator[tuple[I64, I64]]:
        place = np.zeros(1, np.int64)
        with memoryview(self._map) as view:
            for number in range(len(offsets)):
                length = int(lengths[number])
                done = os.preadv(int(fds[number]), [view[:length]], int(offsets[number]))
                self._check(np.array([done]), np.array([length]))
                yield np.array([number]), place

    def close(self) -> None:
        """Return the queue to the kernel, once the requests under way are done."""
        if self._calls:
            self._call(1, self._context)
            self._calls = None


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
