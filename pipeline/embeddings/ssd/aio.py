"""Many concurrent disk reads, past the page cache: by io_uring, by Linux AIO, or by threads that do one each.

A read costs 4 to 5 us of processor time with io_uring or Linux AIO, whichever the kernel allows; threads took 17
(docs/measurements/ssd.md).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
DEPTH = 1024
# The bytes of the memory that reads go into, which is reused.
_STAGING = 8 << 20
_LIBC = ctypes.CDLL(None, use_errno=True)


class IoEngine(Protocol):
    """``memory`` is where most reads go, if known; the constructor raises OSError if the machine refuses the engine."""

    name: str

    def submit(self, numbers: I64, fds: I64, offsets: I64, lengths: I64, addresses: I64, *, write: bool = False) -> int:
        """Request reads into ``addresses``, or writes from there; return how many, >= 1, were accepted in order."""
        ...

    def wait(self, least: int) -> tuple[I64, I64]:
        """Wait for ``least`` requests; return the numbers of those done, and their bytes or negative error numbers."""
        ...

    def close(self) -> None:
        """Give the engine back to the kernel, once the requests under way are done."""
        ...


def _call(number: int, *arguments: Any) -> int:
    return int(_LIBC.syscall(ctypes.c_long(number), *arguments))


def failed(number: int) -> OSError:
    """Return the OSError of error ``number``."""
    return OSError(number, os.strerror(number))


def _at(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


# System call numbers, which are the same on every machine.
_SETUP, _ENTER, _REGISTER = 425, 426, 427
_RING, _ENTRIES = 0, 0x10000000
_PARAMETERS = np.dtype(
    [
        ("entries", "<u4"),
        ("completions", "<u4"),
        ("flags", "<u4"),
        ("rest", "<u4", 7),
        ("sq", "<u4", 10),
        ("cq", "<u4", 10),
    ]
)
_ENTRY = np.dtype(
    [
        ("what", "u1"),
        ("flags", "u1"),
        ("priority", "<u2"),
        ("fd", "<i4"),
        ("offset", "<u8"),
        ("address", "<u8"),
        ("bytes", "<u4"),
        ("more", "<u4"),
        ("data", "<u8"),
        ("buffer", "<u2"),
        ("rest", "<u2", 11),
    ]
)
_DONE = np.dtype([("data", "<u8"), ("result", "<i4"), ("flags", "<u4")])
_READ, _WRITE, _READ_FIXED = 22, 23, 4
# IORING_REGISTER_BUFFERS and IORING_ENTER_GETEVENTS.
_BUFFERS, _GET_EVENTS = 0, 1
# IORING_SETUP_COOP_TASKRUN, IORING_FEAT_SINGLE_MMAP.
_COOPERATE, _SINGLE_MAP = 1 << 8, 1


class Uring:
    """io_uring(7) with ``memory`` registered, so that the kernel need not find its pages for every read."""

    name = "io_uring"

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        parameters, self._fd = np.zeros(1, _PARAMETERS), -1
        # Kernels before 5.19 do not know the flag that saves interrupts.
        for flags in (_COOPERATE, 0):
            parameters["flags"] = flags
            self._fd = _call(_SETUP, DEPTH, _at(parameters))
            if self._fd >= 0 or ctypes.get_errno() != errno.EINVAL:
                break
        if self._fd < 0:
            raise failed(ctypes.get_errno())
        try:
            self._map(parameters[0])
        except OSError:
            os.close(self._fd)
            raise
        self._read = _READ
        if memory is not None:
            whole = np.frombuffer(memory, np.uint8)
            vector = np.array([whole.ctypes.data, len(whole)], np.uint64)
            # If the memory may not be locked, reads into it cost a little more.
            if _call(_REGISTER, self._fd, _BUFFERS, _at(vector), 1) == 0:
                self._read = _READ_FIXED

    def _map(self, parameters: Any) -> None:
        if not parameters["rest"][2] & _SINGLE_MAP:
            raise failed(errno.ENOSYS)  # kernels before 5.4
        sq, cq = parameters["sq"], parameters["cq"]
        entry_count, done_count = int(parameters["entries"]), int(parameters["completions"])
        size = max(int(sq[6]) + entry_count * 4, int(cq[5]) + done_count * _DONE.itemsize)
        ring = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED, offset=_RING)
        entries = mmap.mmap(self._fd, entry_count * _ENTRY.itemsize, flags=mmap.MAP_SHARED, offset=_ENTRIES)
        self._entries = np.frombuffer(entries, _ENTRY)
        words = np.frombuffer(ring, np.uint32, size // 4)
        self._sq_tail, self._cq_head, self._cq_tail = (words[at // 4 : at // 4 + 1] for at in (sq[1], cq[0], cq[1]))
        words[sq[6] // 4 : sq[6] // 4 + entry_count] = np.arange(entry_count)
        self._done = np.frombuffer(ring, _DONE, done_count, offset=int(cq[5]))

    def submit(self, numbers: I64, fds: I64, offsets: I64, lengths: I64, addresses: I64, *, write: bool = False) -> int:
        tail = int(self._sq_tail[0])
        at = (tail + np.arange(len(numbers))) % len(self._entries)
        self._entries["what"][at] = _WRITE if write else self._read
        self._entries["fd"][at], self._entries["offset"][at] = fds, offsets
        self._entries["address"][at], self._entries["bytes"][at] = addresses, lengths
        self._entries["data"][at] = numbers
        self._sq_tail[0] = (tail + len(numbers)) % (1 << 32)
        taken = self._enter(len(numbers), 0)
        if taken < len(numbers):
            # The caller requests the rest again.
            self._sq_tail[0] = (tail + max(0, taken)) % (1 << 32)
        if taken < 1:
            raise failed(ctypes.get_errno())
        return taken

    def _enter(self, count: int, least: int) -> int:
        flags = _GET_EVENTS if least else 0
        return _call(_ENTER, self._fd, count, least, flags, None, ctypes.c_size_t(0))

    def wait(self, least: int) -> tuple[I64, I64]:
        while True:
            head = int(self._cq_head[0])
            ready = (int(self._cq_tail[0]) - head) % (1 << 32)
            if ready >= least:
                done = self._done[(head + np.arange(ready)) % len(self._done)]
                self._cq_head[0] = (head + ready) % (1 << 32)
                return done["data"].astype(np.int64), done["result"].astype(np.int64)
            if self._enter(0, least) < 0 and ctypes.get_errno() != errno.EINTR:
                raise failed(ctypes.get_errno())

    def close(self) -> None:
        os.close(self._fd)


# io_setup, io_destroy, io_getevents, io_submit.
_AIO = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
_REQUEST = np.dtype(
    [
        ("data", "<u8"),
        ("key", "<u4"),
        ("flags", "<i4"),
        ("what", "<u2"),
        ("priority", "<i2"),
        ("fd", "<u4"),
        ("buffer", "<u8"),
        ("bytes", "<u8"),
        ("offset", "<i8"),
        ("reserved", "<u8"),
        ("more", "<u8"),
    ]
)
_EVENT = np.dtype([("data", "<u8"), ("request", "<u8"), ("result", "<i8"), ("more", "<i8")])


class Aio:
    """Linux AIO (io_submit(2))."""

    name = "Linux AIO"

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        if platform.machine() not in _AIO:
            raise OSError(errno.ENOSYS, f"not known for {platform.machine()}")
        setup, self._destroy, self._get, self._ask = _AIO[platform.machine()]
        self._context = ctypes.c_ulong(0)
        if _call(setup, DEPTH, ctypes.byref(self._context)):
            raise failed(ctypes.get_errno())
        self._requests, self._events = np.zeros(DEPTH, _REQUEST), np.zeros(DEPTH, _EVENT)
        self._pointers = self._requests.ctypes.data + _REQUEST.itemsize * np.arange(DEPTH, dtype=np.uint64)

    def submit(self, numbers: I64, fds: I64, offsets: I64, lengths: I64, addresses: I64, *, write: bool = False) -> int:
        part = self._requests
        part["data"][numbers], part["fd"][numbers], part["what"][numbers] = numbers, fds, int(write)
        part["buffer"][numbers], part["bytes"][numbers] = addresses, lengths
        part["offset"][numbers] = offsets
        pointers = self._pointers[numbers]
        taken = _call(self._ask, self._context, ctypes.c_long(len(numbers)), _at(pointers))
        if taken < 1:
            raise failed(ctypes.get_errno())
        return taken

    def wait(self, least: int) -> tuple[I64, I64]:
        while True:
            done = _call(self._get, self._context, ctypes.c_long(least), ctypes.c_long(DEPTH), _at(self._events), None)
            if done >= least:
                return self._events["data"][:done].astype(np.int64), self._events["result"][:done].copy()
            if done < 0 and ctypes.get_errno() != errno.EINTR:
                raise failed(ctypes.get_errno())

    def close(self) -> None:
        _call(self._destroy, self._context)


_THREADS = 32


class Threads:
    """pread(2) and pwrite(2) in threads, which work everywhere and cost several times the processor time."""

    name = "threads"

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="nightjar-read")
        self._done: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def submit(self, numbers: I64, fds: I64, offsets: I64, lengths: I64, addresses: I64, *, write: bool = False) -> int:
        call = _LIBC.pwrite if write else _LIBC.pread
        requests = np.stack([numbers, fds, offsets, lengths, addresses], axis=1).tolist()
        for request in requests:
            self._pool.submit(self._transfer, call, *request)
        return len(numbers)

    def _transfer(self, call: Any, number: int, fd: int, offset: int, length: int, address: int) -> None:
        done = call(fd, ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_longlong(offset))
        if done < 0:
            # Return errors as negative numbers, like io_uring and Linux AIO.
            done = -ctypes.get_errno()
        self._done.put((number, done))

    def wait(self, least: int) -> tuple[I64, I64]:
        done = [self._done.get() for _ in range(max(least, self._done.qsize()))]
        numbers, results = np.array(done, np.int64).reshape(-1, 2).T
        return numbers, results

    def close(self) -> None:
        self._pool.shutdown()


ENGINES = (Uring, Aio, Threads)


class DiskQueue:
    """A queue of reads into its own 8 MiB of memory, by the first of the ``engines`` that works. For one thread.

    ``engine`` is its name; ``refused`` says by name why those before it are not used.
    """

    def __init__(self, engines: Sequence[Any] = ENGINES) -> None:
        self._map = mmap.mmap(-1, _STAGING)
        self._memory = np.frombuffer(self._map, np.float32)
        self._start = self._memory.ctypes.data
        self._closed = False
        self.refused: dict[str, str] = {}
        for kind in engines:
            try:
                self._engine: IoEngine = kind(self._map)
                return
            except OSError as error:
                self.refused[kind.name] = error.strerror or str(error)
        raise failed(errno.ENOSYS)

    @property
    def engine(self) -> str:
        """The name of what reads from the kernel: io_uring, Linux AIO, or threads."""
        return self._engine.name

    def read(self, fds: I64, offsets: I64, lengths: I64) -> Iterator[tuple[I64, I64, NDArray[np.float32]]]:
        """Read [offset, offset + length) of each file, whole pages; yields (which, where, memory) as reads are done.

        Request ``which[i]`` is in ``memory`` from word ``where[i]`` on, until the iterator advances. Raises OSError if
        the disk fails, with EIO if a file ends too early.
        """
        if not len(offsets):
            return
        stride = int(lengths.max())
        slots = min(DEPTH, _STAGING // stride, len(offsets))
        free, sent, in_flight = np.arange(slots), 0, 0
        request_of_slot = np.empty(slots, np.int64)
        while sent < len(offsets) or in_flight:
            count = min(len(free), len(offsets) - sent)
            if count:
                places, which = free[:count], np.arange(sent, sent + count)
                request_of_slot[places] = which
                addresses = self._start + places * stride
                count = self._engine.submit(places, fds[which], offsets[which], lengths[which], addresses)
                free, sent, in_flight = free[count:], sent + count, in_flight + count
            places, results = self._engine.wait(max(1, min(in_flight, slots // 4)))
            which = request_of_slot[places]
            wrong = results[results != lengths[which]]
            if len(wrong):
                # A read of fewer bytes than requested, without an error, means that the file ends too early.
                error = -int(wrong[0]) if wrong[0] < 0 else errno.EIO
                raise failed(error)
            yield which, places * (stride // 4), self._memory
            free, in_flight = np.concatenate([free, places]), in_flight - len(places)

    def close(self) -> None:
        """Give the queue back to the kernel, once the requests under way are done."""
        if not self._closed:
            self._closed = True
            self._engine.close()
