"""Keeping the mapped rows under a memory budget where no memory cgroup does it: the coldest go back to the disk."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence

import numpy as np

from pipeline.embeddings.ssd.buffers import Buffer
from pipeline.embeddings.ssd.files import PAGE

_LIBC = ctypes.CDLL(None, use_errno=True)
_CHUNK = 64 << 20


def trim(buffers: Sequence[Buffer], excess: int) -> int:
    """Write back and drop mapped pages until ``excess`` bytes are free, last rows first; the bytes dropped.

    Rows are numbered in falling frequency, so the end of a table is its coldest part. Pinned rows stay.
    """
    freed = 0
    for buffer in buffers:
        for start in range((buffer.file.size - 1) // _CHUNK * _CHUNK, -1, -_CHUNK):
            low, high = max(start, buffer.pinned), min(start + _CHUNK, buffer.file.size)
            if freed >= excess:
                return freed
            if low < high and (held := resident_bytes(buffer, low, high)):
                buffer.write_back(low, high)  # pages that are not on the disk yet cannot be dropped
                _drop(buffer, low, high)
                freed += held - resident_bytes(buffer, low, high)
    return freed


def _drop(buffer: Buffer, low: int, high: int) -> None:
    """Take bytes [low, high), whole pages, out of our page tables and then out of the page cache.

    Both let pages be that are dirty or in use, so nothing written meanwhile is lost. Unlike MADV_PAGEOUT the second
    also finds pages that another processor still holds in its batch of new ones.
    """
    _LIBC.madvise(ctypes.c_void_p(buffer.address + low), ctypes.c_size_t(high - low), mmap.MADV_DONTNEED)
    os.posix_fadvise(buffer.file.fd, low, high - low, os.POSIX_FADV_DONTNEED)


def resident_bytes(buffer: Buffer, low: int, high: int) -> int:
    """Bytes of [low, high) of ``buffer``, whole pages, that the memory holds."""
    flags = np.empty((high - low) // PAGE, np.uint8)
    place = ctypes.c_void_p(buffer.address + low)
    if _LIBC.mincore(place, ctypes.c_size_t(high - low), flags.ctypes.data_as(ctypes.c_void_p)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno() or errno.EIO))
    return int((flags & 1).sum()) * PAGE
