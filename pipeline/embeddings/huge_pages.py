"""Puts tables into memory pages of 2 MiB where Linux has them, so that lookups of random rows miss the TLB less.

Pages change where values lie, not the values. Nothing depends on them: where Linux refuses some, those stay small.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from pipeline.embeddings.row_access import LocalShard

LARGE_PAGE = 1 << 21
# The bytes of one call of madvise, which first waits for all CPUs.
_CHUNK = 32 * LARGE_PAGE
_SMALL_PAGE = 4096
# MADV_COLLAPSE, from Linux 6.1 on, copies the memory into large pages at once.
_COLLAPSE = 25
_MAP_NORESERVE = 0x4000
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")

Advise = Callable[[int, int, int], int]  # (address, bytes, advice) -> errno, 0 where it was done


def large_pages(count: int) -> Tensor:
    """Return float32 zeros [count], in large pages from their first use on where Linux has them."""
    if count * 4 < LARGE_PAGE:
        return torch.zeros(count)
    try:
        memory = mmap.mmap(-1, count * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        # There is not enough memory. torch's own error says so; this one reads as if a disk had failed.
        return torch.zeros(count)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel may lack large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32, count=count)


def sparse_memory(count: int) -> Tensor:
    """Return float32 zeros [count] that take memory only where they are touched, however many they are."""
    if not count:
        return torch.empty(0)
    # With a reservation, Linux would count all of it as taken and refuse a table larger than memory.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, count * 4, flags=flags), dtype=torch.float32, count=count)


def use_large_pages(shards: Sequence[LocalShard], advise: Advise | None = None) -> int:
    """Move the rows and states of ``shards`` in host memory into large pages.

    Call it when all rows have values: memory that was never touched would take room too. Linux copies one page at a
    time, so it takes no more memory, and about 0.3 s per GiB. Shards on tier ssd stay as they are: their memory is as
    long as the table, and few rows of it are used. Returns the number of bytes that are in large pages now. ``advise``
    replaces madvise(2) in tests.
    """
    advise = advise or _madvise
    if not hasattr(mmap, "MADV_HUGEPAGE") or not _large_pages_allowed():
        return 0
    moved = 0
    for start, stop in _memory_ranges(shards):
        first, last = -(-start // LARGE_PAGE) * LARGE_PAGE, stop // LARGE_PAGE * LARGE_PAGE
        for address in range(first, last, _CHUNK):
            size = min(_CHUNK, last - address)
            error = advise(address, size, _COLLAPSE)
            if error == errno.EINVAL:
                # Before Linux 6.1 a kernel thread does it in the background, which counts as 0 bytes.
                advise(address, size, mmap.MADV_HUGEPAGE)
            elif error == errno.ENOMEM:
                # A memory limit leaves no room for a page, or memory is too fragmented.
                return moved
            elif not error:
                moved += size
    return moved


def _large_pages_allowed(enabled: Path = _ENABLED) -> bool:
    # An operator may switch large pages off even for memory that asks for them.
    with suppress(OSError):
        return "[never]" not in enabled.read_text()
    return False


def _madvise(address: int, size: int, advice: int) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    if library.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice):
        return ctypes.get_errno()
    return 0


def _memory_ranges(shards: Sequence[LocalShard]) -> list[tuple[int, int]]:
    # Returns ascending [start, stop) addresses. The tables of a kernel are adjacent, so they become one range.
    spans = []
    for shard in shards:
        if type(shard) is not LocalShard:
            continue
        for values in (shard.weight, *shard.state.values()):
            if values.device.type == "cpu" and values.numel():
                last = 0
                for size, stride in zip(values.shape, values.stride(), strict=True):
                    last += (size - 1) * stride
                spans.append((values.data_ptr(), values.data_ptr() + (last + 1) * values.element_size()))
    ranges: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if ranges and start <= ranges[-1][1] + _SMALL_PAGE:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], stop))
        else:
            ranges.append((start, stop))
    return ranges
