"""Tables in memory pages of 2 MiB where Linux has them: lookups of rows in no order miss the TLB less.

Pages change where values lie, not the values. Nothing depends on them: where Linux refuses some, those stay small.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from pipeline.embeddings.row_access import LocalShard

LARGE_PAGE = 1 << 21
_AT_ONCE = 32 * LARGE_PAGE  # a call of the kernel, which first waits for all CPUs
_SMALL_PAGE = 4096
_COLLAPSE = 25  # MADV_COLLAPSE, from Linux 6.1 on: copies what is there into large pages at once
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")

Advise = Callable[[int, int, int], int]  # (address, bytes, advice) -> errno, 0 where it was done


def large_pages(count: int) -> Tensor:
    """float32 zeros [count], in large pages from their first use on where Linux has them."""
    if count * 4 < LARGE_PAGE:
        return torch.zeros(count)
    try:
        memory = mmap.mmap(-1, count * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # no such memory, which torch says so that nobody looks for it on a disk
        return torch.zeros(count)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32, count=count)


def use_large_pages(shards: Sequence[LocalShard], advise: Advise | None = None) -> int:
    """Move the rows and states of ``shards`` in host memory into large pages; returns how many bytes are in them.

    Call it when all rows have values: what was never touched would take room too. Linux copies a page at a time, so it
    takes no more memory, and some 0.3 s a GiB. It refuses where a memory limit leaves no room for a page or
    memory is in too small pieces. Before Linux 6.1 it is asked to do it in the background, which counts as 0 bytes.
    Shards on tier ssd stay as they are: their memory is as long as the table, and few rows of it are used.
    """
    advise = advise or _advise
    if not hasattr(mmap, "MADV_HUGEPAGE") or not _offered():
        return 0
    moved = 0
    for start, stop in _pieces(shards):
        error = advise(start, stop - start, _COLLAPSE)
        if error == errno.EINVAL:
            advise(start, stop - start, mmap.MADV_HUGEPAGE)
        elif error == errno.ENOMEM:
            break
        elif not error:
            moved += stop - start
    return moved


def _offered(enabled: Path = _ENABLED) -> bool:
    """Whether this machine's operator allows large pages for memory that asks for them."""
    with suppress(OSError):
        return "[never]" not in enabled.read_text()
    return False


def _advise(address: int, size: int, advice: int) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    return ctypes.get_errno() if library.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice) else 0


def _pieces(shards: Sequence[LocalShard]) -> Iterator[tuple[int, int]]:
    """Addresses from and to, both at the edge of a large page, of the memory of ``shards``."""
    for start, stop in _ranges(shards):
        last = stop // LARGE_PAGE * LARGE_PAGE
        for first in range(-(-start // LARGE_PAGE) * LARGE_PAGE, last, _AT_ONCE):
            yield first, min(first + _AT_ONCE, last)


def _ranges(shards: Sequence[LocalShard]) -> list[tuple[int, int]]:
    """The memory of ``shards``, ascending; tables of a kernel, which lie one behind the other, are one range."""
    tensors = [
        values for shard in shards if type(shard) is LocalShard for values in (shard.weight, *shard.state.values())
    ]
    spans = sorted(_span(values) for values in tensors if values.device.type == "cpu" and values.numel())
    ranges: list[tuple[int, int]] = []
    for start, stop in spans:
        if ranges and start <= ranges[-1][1] + _SMALL_PAGE:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], stop))
        else:
            ranges.append((start, stop))
    return ranges


def _span(values: Tensor) -> tuple[int, int]:
    """Addresses of the first byte of ``values`` and behind the last one."""
    last = sum((size - 1) * step for size, step in zip(values.shape, values.stride(), strict=True))
    return values.data_ptr(), values.data_ptr() + (last + 1) * values.element_size()
